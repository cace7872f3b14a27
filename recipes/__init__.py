"""One stage per file: typed configuration in, artefact folder out."""

import sys
from pathlib import Path

from specdata import __version__
from specdata.terminal import end_quietly_when_interrupted

__all__ = ["__version__"]


def _is_the_program() -> bool:
    """True if a recipe or the command was started, rather than this package imported by another."""
    started = Path(sys.argv[0])
    return started.name in ("-m", "draftsmith") or started.parent.resolve() == Path(__file__).parent


if _is_the_program():  # before the imports of the recipes, which take a while
    end_quietly_when_interrupted()
