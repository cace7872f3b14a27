"""What is run, what is counted, and results.json."""
