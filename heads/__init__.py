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
    """Import a head when it is first asked for: `heads.config` must not import torch."""
    from heads.config import KINDS

    if name == "BaseHead":
        from heads.model import BaseHead

        return BaseHead
    for kind in KINDS.values():
        if kind.head.endswith(f".{name}"):
            return kind.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
