"""Decode, measure, report, release."""

from specdata import __version__

__all__ = ["__version__"]
