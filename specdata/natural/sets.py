"""The prompt sets of this folder: names, order and splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from specdata.natural import code, maths
from specdata.natural.splits import SPLITS
from specdata.natural.writing import Writer, read_phrases

Write = Callable[[random.Random, str], str]
MOST = {"train": 50_000, "dev": 5_000, "test": 5_000}
"""Prompts of each split that a set is read for."""

# A set counts as used up after this many draws in a row without a prompt not seen before.
_PATIENCE = 1_000


def _of_phrases(name: str) -> Write:
    def write(rng: random.Random, split: str) -> str:
        return Writer(read_phrases(name), rng, split).sentence("{prompt}")

    return write


WRITERS: Mapping[str, Write] = {
    "chat-assistant": _of_phrases("assistant.txt"),
    "chat-maths": maths.write,
    "chat-code": code.write,
    "chat-letters": _of_phrases("letters.txt"),
}
NATURAL = tuple(WRITERS)


def natural_prompts(name: str, split: str, count: int, *, seed: int) -> list[str]:
    """The first `count` prompts of a split, each another text.

    What a prompt is about (its subjects, the story with its numbers, or the function asked for)
    belongs to one split, for any seed; only the words around it are shared.

    Args:
        name: one of `NATURAL`.
        split: train (80 % of what there is to ask about), dev or test (10 % each).
        count: how many.
        seed: the same seed gives the same prompts; a larger count only appends.

    Raises:
        ValueError: if the set or the split is unknown, or the split has fewer prompts.
    """
    if name not in WRITERS:
        raise ValueError(f"unknown prompt set {name!r}; choose from {', '.join(NATURAL)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    if count > MOST[split]:
        raise ValueError(
            f"the {split} split of {name!r} has {MOST[split]} prompts, {count} were asked for: "
            "lower `count`"
        )
    taken = list(islice(_stream(name, split, seed), count))
    if len(taken) < count:
        raise ValueError(
            f"the {split} split of {name!r} has {len(taken)} prompts for this seed, {count} were "
            "asked for: lower `count`"
        )
    return taken


def _stream(name: str, split: str, seed: int) -> Iterator[str]:
    rng = random.Random(f"{name}:{split}:{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _PATIENCE:
        text = WRITERS[name](rng, split)
        repeats = repeats + 1 if text in seen else 0
        if not repeats:
            seen.add(text)
            yield text
