"""Certificates of exactness, verifiers compared, and how well acceptance is predicted."""
