"""Every kind of acceptance head by name."""

from __future__ import annotations

from heads.base import BaseHead
from heads.immediate import ImmediateHead
from heads.model import AcceptanceHead

HEADS: dict[str, type[BaseHead]] = {head.kind: head for head in (AcceptanceHead, ImmediateHead)}
