"""What people read: the report, its plots, model cards, folders for the Hub."""
