"""Drafters, which propose tokens, and the rules that stop them."""
