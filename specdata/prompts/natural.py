"""Natural English prompts for chat models, as finished texts: what people ask an assistant.

`NAME.json.xz` beside this file holds each set's splits. What a prompt is about (its subject, the
story with its numbers, the function asked for) is in one split alone. The texts were written by a
program out of phrases; no other data set is in them.
"""

from __future__ import annotations

import json
import lzma
import random
from functools import cache
from importlib.resources import files

NATURAL = ("chat-assistant", "chat-maths", "chat-code", "chat-letters")
LONG = "long"
"""Long plain texts, for what windows do: each lists `LISTED` texts of each of the first three sets
above, of the same split."""
LISTED = 5
MEASURED = 1000
"""Texts for tests that are not in the test split: settings were chosen by some of them."""


def natural_prompts(name: str, split: str, count: int, *, seed: int) -> list[str]:
    """The first `count` prompts of a split, each another text.

    A set of `NATURAL` has 2,000 in train, 5,000 in dev and 4,000 in test, `LONG` a fifth as many.
    Seed 0 is the order of the file, any other shuffles it; a larger count only appends. Raises
    ValueError if the split is unknown, or has fewer prompts.
    """
    if name == LONG:
        sets = [natural_prompts(each, split, LISTED * count, seed=seed) for each in NATURAL[:3]]
        texts = [text for each in zip(*sets, strict=True) for text in each]
        size = LISTED * len(sets)
        return ["\n\n".join(texts[n * size : (n + 1) * size]) + "\n\n" for n in range(count)]
    splits = _read(name)
    if split not in splits:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(splits)}")
    prompts = splits[split][MEASURED if split == "test" else 0 :]
    if count > len(prompts):
        raise ValueError(
            f"the {split} split of {name!r} has {len(prompts)} prompts, {count} were asked for: "
            "lower `count`, or add another set"
        )
    if seed:
        random.Random(f"{name}:{split}:{seed}").shuffle(prompts)
    return prompts[:count]


@cache
def _read(name: str) -> dict[str, list[str]]:
    """The splits of a set."""
    packed = files(__package__).joinpath(f"{name}.json.xz").read_bytes()
    splits: dict[str, list[str]] = json.loads(lzma.decompress(packed))
    return splits
