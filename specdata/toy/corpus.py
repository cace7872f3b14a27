"""The text inside the package: three prompt families and the library text of every CPython.

It lets the whole pipeline run offline. Prompts and answers come from seeded grammars (see
`grammar.py`); the rest is source code and documentation that Python itself ships. Nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from specdata.toy.grammar import WRITERS, Example, Writer

FAMILIES = tuple(WRITERS)
SPLITS = ("train", "dev", "test")

# A family counts as used up after this many draws in a row without a prompt not seen before.
_PATIENCE = 2_000

# Modules that every CPython since 3.8 ships, as paths below the standard library.
TRAINING_MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "collections/__init__.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "datetime.py",
    "difflib.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "inspect.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/__init__.py",
    "random.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
    "threading.py",
    "unittest/case.py",
)

MOST = {"train": 50_000, "dev": 6_250, "test": 6_250}
"""Prompts of each split that a family is read for; writing more takes minutes of one processor."""


def prompts(family: str, split: str, count: int, *, seed: int) -> dict[str, str]:
    """Return `count` prompts of one split, each with one of its many possible answers.

    No prompt belongs to two splits, for any seed. Raises ValueError if the family or the split is
    unknown, or has fewer prompts.
    """
    if split in MOST and count > MOST[split]:
        raise ValueError(
            f"the {split} split of {family!r} has {MOST[split]} prompts, {count} were asked for: "
            "lower `count`"
        )
    chosen = _take(_split(family, split, seed), count, f"the {split} split of {family!r}")
    return {example.prompt: example.completion for example in chosen}


def split_of(prompt: str) -> str:
    """The split of a prompt, decided by its text alone: 80% train, 10% dev, 10% test."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 10
    return {0: "dev", 1: "test"}.get(bucket, "train")


def library_texts(characters: int) -> list[str]:
    """Return pieces of the standard library (a class or a function each), up to `characters`.

    The modules share the room evenly, in a fixed order; one that is missing here is left out. The
    result depends on the installed Python only.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / name for name in TRAINING_MODULES if (folder / name).is_file()]
    texts: list[str] = []
    for path in files:
        room = characters // len(files)
        for piece in re.split(r"\n(?=class |def )", path.read_text("utf-8", errors="replace")):
            text = piece.strip()[: min(room, 1500)]
            if len(text) >= 100:
                texts.append(text)
                room -= len(text)
    return texts


def corpus(
    *, seed: int, examples_per_family: int = 2000, library_characters: int = 100_000
) -> list[str]:
    """Return the training documents in random order: examples of the train split, library text.

    The seed decides the examples and the order.
    """
    documents = library_texts(library_characters)
    for family in FAMILIES:
        chosen = _take(_split(family, "train", seed), examples_per_family, f"train of {family!r}")
        documents += [example.prompt + example.completion for example in chosen]
    random.Random(seed).shuffle(documents)
    return documents


def examples(family: str, seed: int) -> Iterator[Example]:
    """Examples of a family with distinct prompts, until `_PATIENCE` draws in a row bring none.

    The same seed gives the same ones.
    """
    if family not in WRITERS:
        raise ValueError(f"unknown prompt family {family!r}; choose from {', '.join(FAMILIES)}")
    rng = random.Random(f"{family}:{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _PATIENCE:
        example = WRITERS[family](Writer(rng))
        repeats = repeats + 1 if example.prompt in seen else 0
        if not repeats:
            seen.add(example.prompt)
            yield example


def _split(family: str, split: str, seed: int) -> Iterator[Example]:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    return (example for example in examples(family, seed) if split_of(example.prompt) == split)


def _take(source: Iterator[Example], count: int, what: str) -> list[Example]:
    taken = list(islice(source, count))
    if len(taken) < count:
        raise ValueError(f"{what} has {len(taken)} distinct prompts, {count} were asked for")
    return taken
