"""The acceptance head as an artefact: its kinds, inputs, token mixing, loss, training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads.kinds import AcceptanceHead, ConfidenceHead, ImmediateHead
    from heads.model import BaseHead

__all__ = ["AcceptanceHead", "BaseHead", "ConfidenceHead", "ImmediateHead"]


def __getattr__(name: str) -> Any:
    """Import all heads when one is first asked for: `heads.config` must not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from heads import kinds, model

    return getattr(model if name == "BaseHead" else kinds, name)
