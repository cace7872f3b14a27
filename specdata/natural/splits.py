"""Splits by content: what prompts are about is dealt to train, dev and test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SPLITS = ("train", "dev", "test")


def _rank(subject: str) -> bytes:
    return hashlib.sha256(subject.encode()).digest()


def dealt(subjects: Sequence[str], split: str) -> list[str]:
    """Those of a split: a tenth (rounded up) for dev, as many for test, and the others for train.

    They are dealt in the order of their hashes, so that their order does not matter.
    """
    ranked = sorted(subjects, key=_rank)
    tenth = -(-len(ranked) // 10)
    bounds = {"dev": (0, tenth), "test": (tenth, 2 * tenth), "train": (2 * tenth, len(ranked))}
    return ranked[slice(*bounds[split])]


def split_of(subject: str) -> str:
    """The split of a subject of which there is no list: 80 % train, 10 % dev, 10 % test."""
    return {0: "dev", 1: "test"}.get(int.from_bytes(_rank(subject)[:8], "big") % 10, "train")
