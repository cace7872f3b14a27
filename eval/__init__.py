"""Decode, measure, report, release."""
