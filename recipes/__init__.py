"""One stage per file: typed configuration in, artefact folder out."""

from specdata import __version__

__all__ = ["__version__"]
