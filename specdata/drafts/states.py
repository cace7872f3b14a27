"""Drafts that read their target's states, in a form of ours, which no engine loads."""

from __future__ import annotations

from specdata.config import checked_taps
from specdata.drafts.kind import KEY, DraftKind, Served, usual_taps

STATES = DraftKind(
    "states",
    is_of=lambda settings: settings.get(KEY) is not None,
    served=Served(method="draftsmith", tags=()),
    reads_states=True,
    taps_of=lambda taps, count: checked_taps(taps or usual_taps(count), count),
    section="init: {kind: states, layers: 1}",
)
