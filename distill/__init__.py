"""Everything that makes a language model: the embedded pair and draft distillation."""

from specdata import __version__

__all__ = ["__version__"]
