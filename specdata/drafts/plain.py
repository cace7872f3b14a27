"""Drafts that read tokens alone, one forward a token: any causal language model."""

from __future__ import annotations

from specdata.drafts.kind import DraftKind

PLAIN_DRAFT = DraftKind(
    "plain", is_of=lambda settings: True, section="init: {kind: target, layers: 2}"
)
