"""The acceptance head as an artefact: architecture, inputs, token mixing, loss, training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdata import __version__

if TYPE_CHECKING:
    from heads.model import AcceptanceHead

__all__ = ["AcceptanceHead", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the head when it is first asked for: `heads.config` must not import torch."""
    if name != "AcceptanceHead":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from heads.model import AcceptanceHead

    return AcceptanceHead
