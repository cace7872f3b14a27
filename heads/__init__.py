"""The acceptance head as an artefact: architecture, token mixing, loss, training."""

from __future__ import annotations

from heads.model import AcceptanceHead
from specdata import __version__

__all__ = ["AcceptanceHead", "__version__"]
