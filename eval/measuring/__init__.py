"""Runs, counts, and results.json."""
