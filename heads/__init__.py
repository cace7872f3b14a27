"""The acceptance head as an artefact: architecture, inputs, token mixing, loss, training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads.model import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead

__all__ = ["AcceptanceHead", "BaseHead", "ConfidenceHead", "ImmediateHead"]


def __getattr__(name: str) -> Any:
    """Import a head when it is first asked for: `heads.config` must not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from heads import model

    return getattr(model, name)
