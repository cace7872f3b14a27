"""The acceptance head as an artefact: its kinds, inputs, token mixing, loss, training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads.kinds.confidence import ConfidenceHead
    from heads.kinds.immediate import ImmediateHead
    from heads.kinds.specdecpp import AcceptanceHead
    from heads.model import BaseHead

__all__ = ["AcceptanceHead", "BaseHead", "ConfidenceHead", "ImmediateHead"]


def __getattr__(name: str) -> Any:
    """Import all heads when one is first asked for: `heads.config` must not import torch."""
    from heads.config import HEAD_KINDS

    if name not in {"BaseHead", *(kind.head.split(".")[1] for kind in HEAD_KINDS.values())}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    classes = [kind.load() for kind in HEAD_KINDS.values()]  # a folder may hold any of them
    return next(each for kind in classes for each in kind.__mro__ if each.__name__ == name)
