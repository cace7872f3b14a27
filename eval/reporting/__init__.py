"""Documents for people: the report, its plots, model cards, folders for the Hub."""
