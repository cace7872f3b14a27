"""The prompt sets of the papers (catalogue.yaml): source, licence, template and splits.

A split is either one of the source's own, or a part of it that is cut by content: prompts are
ranked by the sha256 of their columns, and a split is a range of ranks. So it depends on no seed and
no row order, and equal rows are never in two splits.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from specdata.toy.corpus import TOY_SETS

NATURAL = ("chat-assistant", "chat-maths", "chat-code", "chat-letters", "chat-edits")
"""Natural English prompts for chat models; `NAME.json.xz` beside this file holds the splits. What a
prompt is about is in one split alone. A program wrote the texts out of phrases; no other data set
is in them. Of the last, which asks for small changes to a text, most answers repeat the text."""
LONG_TEXTS = "long"
"""Long plain texts, for what windows do: each lists `LISTED` texts of each of the first three sets
above, of the same split."""
LISTED = 5
SEEN_TESTS = 1000
"""Texts for tests that are not in the test split: settings were chosen by some of them."""


def natural_prompts(name: str, split: str, count: int, *, seed: int) -> list[str]:
    """The first `count` prompts of a split, each another text.

    A set of `NATURAL` has 2,000 in train, 5,000 in dev and 4,000 in test, but chat-edits has 380,
    379 and 376; `LONG_TEXTS` has a fifth as many.
    Seed 0 is the order of the file, any other shuffles it; a larger count only appends. Raises
    ValueError if the split is unknown, or has fewer prompts.
    """
    if name == LONG_TEXTS:
        sets = [natural_prompts(each, split, LISTED * count, seed=seed) for each in NATURAL[:3]]
        texts = [text for each in zip(*sets, strict=True) for text in each]
        size = LISTED * len(sets)
        return ["\n\n".join(texts[n * size : (n + 1) * size]) + "\n\n" for n in range(count)]
    splits = _splits_of(name)
    if split not in splits:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(splits)}")
    skipped = SEEN_TESTS if split == "test" and len(splits[split]) > SEEN_TESTS else 0
    prompts = splits[split][skipped:]
    if count > len(prompts):
        raise ValueError(
            f"the {split} split of {name!r} has {len(prompts)} prompts, {count} were asked for: "
            "lower `count`, or add another set"
        )
    if seed:
        random.Random(f"{name}:{split}:{seed}").shuffle(prompts)
    return prompts[:count]


@cache
def _splits_of(name: str) -> dict[str, list[str]]:
    """The splits of a set."""
    packed = files(__package__).joinpath(f"{name}.json.xz").read_bytes()
    splits: dict[str, list[str]] = json.loads(lzma.decompress(packed))
    return splits


EMBEDDED = (*TOY_SETS, *NATURAL, LONG_TEXTS)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A split of the source, or a part of it: the prompts between two ranks, as shares of 1."""

    of: str
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True, slots=True)
class Form:
    """The way from a row to prompts.

    Args:
        ask: the user's message where the target has a chat template: the first of these texts whose
            columns are all filled.
        questions: column with the user's turns, whose later ones depend on the model's answers.
        messages: column with a recorded conversation.
        keep: share of the words that is the prompt; the rest is what a model would write.
        reference: the text that an answer is scored against.
    """

    ask: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    questions: str | None = None
    messages: str | None = None
    keep: float = 1.0
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedSet:
    """A catalogued set: `hub` is its id on the Hub, or the URL of a file to download.

    Our `splits` are in terms of the source's; `files` hold each where the repository holds more.
    """

    hub: str
    licence: str
    splits: Mapping[str, SplitPart]
    form: Form
    subset: str | None = None
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def _read() -> dict[str, CataloguedSet]:
    """The sets of catalogue.yaml; a split there is "train", or "train 0 2/52" for a part of it."""
    sets = yaml.safe_load((Path(__file__).parent / "catalogue.yaml").read_text("utf-8"))
    for each in sets.values():
        parts = {name: split.split() for name, split in each["splits"].items()}
        each["splits"] = {
            name: SplitPart(of, *(float(Fraction(share)) for share in shares))
            for name, (of, *shares) in parts.items()
        }
    return TypeAdapter(dict[str, CataloguedSet]).validate_python(sets)


CATALOGUE: Mapping[str, CataloguedSet] = _read()
