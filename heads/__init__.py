"""The acceptance head as an artefact: architecture, token mixing, loss, training."""

from __future__ import annotations

from heads.model import AcceptanceHead

__all__ = ["AcceptanceHead"]
