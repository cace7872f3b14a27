"""The base layer: distributions, rollouts, labels and stored shards."""

from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent.parent
for _name in ("recipes", "eval", "heads", "distill"):
    # A script's own folder is looked through first, and these are everyday names.
    _found = _find_spec(_name)
    if _found and _found.origin and _Path(_found.origin).resolve().parent.parent != _here:
        raise ImportError(
            f"{_found.origin} hides draftsmith's package {_name!r}: rename it, or move the script "
            "that is started out of that folder"
        )

__version__ = "0.1.0"
