"""Comparison of greedy output, replay of acceptance, and the exact results of the papers."""
