"""Selecting one of several drafted tokens, with the exact distribution of the choice."""
