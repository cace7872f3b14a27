"""Prompts by name: the embedded families, or a local JSONL file with a `prompt` column."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdata import toy
from specdata.errors import ConfigError

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Some prompts of one data set."""

    name: str = field(
        metadata={"help": f"{', '.join(toy.FAMILIES)} (embedded) or a JSONL file with `prompt`"}
    )
    split: str = field(
        default="test", metadata={"help": "train, dev or test; stored with each row"}
    )
    count: int = field(default=100, metadata={"help": "how many prompts, from the first"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `example_id` is a hash of its text, or of its messages.

    `messages` is what a chat template rendered (empty for plain text); `follow_ups` are the user's
    later turns, which depend on the model's answers.
    """

    example_id: str
    dataset: str
    split: str
    ids: list[int]
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Prompts, and an account of what was read, kept and dropped (JSON-able, one entry a set)."""

    prompts: list[Prompt]
    report: list[dict[str, Any]]


def load_prompts(
    sets: Sequence[PromptSet],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int | None = None,
) -> Loaded:
    """Read and tokenize prompt sets. A text that comes twice is kept once.

    Args:
        sets: what to read.
        tokenizer: the target's.
        seed: decides the embedded prompts and the order of catalogued sets.
        max_tokens: prompts of more tokens are dropped and counted.

    Raises:
        ConfigError: for an unknown set, an unreadable file, a missing column or too few prompts.
    """
    files = {entry.name for entry in sets if is_file(entry.name)}
    if len({Path(name).stem for name in files}) < len(files):
        raise ConfigError(
            f"prompt files must have different names, which the report shows; got {sorted(files)}"
        )
    found: dict[str, Prompt] = {}
    for wanted in sets:
        for text in read_texts(wanted, seed):
            example_id = hashlib.sha256(text.encode()).hexdigest()[:16]
            ids = [int(token) for token in tokenizer(text)["input_ids"]]
            if not ids:
                raise ConfigError(f"prompt set {wanted.name!r} holds an empty prompt")
            name = Path(wanted.name).stem
            found.setdefault(example_id, Prompt(example_id, name, wanted.split, ids))
    return Loaded(list(found.values()), [])


def is_file(name: str) -> bool:
    """Whether a prompt set is a file rather than an embedded family."""
    return Path(name).suffix == ".jsonl"


def read_texts(wanted: PromptSet, seed: int) -> list[str]:
    """The texts of a prompt set. Raises ConfigError if it cannot be read as asked."""
    if wanted.count < 1:
        raise ConfigError(f"prompt set {wanted.name!r}: count must be positive, got {wanted.count}")
    if wanted.name in toy.FAMILIES:
        try:
            return toy.prompts(wanted.name, wanted.split, wanted.count, seed=seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    path = Path(wanted.name)
    if not is_file(wanted.name):
        raise ConfigError(
            f"unknown prompt set {wanted.name!r}: give one of {', '.join(toy.FAMILIES)}, or a "
            "file that ends in .jsonl"
        )
    try:
        # Not splitlines(): it also splits at characters that may stand inside a JSON string.
        with path.open(encoding="utf-8-sig") as lines:
            rows = islice((line for line in lines if line.strip()), wanted.count)
            texts = [json.loads(line)["prompt"] for line in rows]
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: every line must be a JSON object with a `prompt` ({error!r})"
        ) from error
    if len(texts) < wanted.count or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"{path} must hold {wanted.count} prompts (strings), it has {len(texts)}: lower `count`"
        )
    return texts


def check_sets(sets: Sequence[PromptSet], seed: int) -> None:
    """Find before any model is loaded what `load_prompts` would refuse. Raises ConfigError."""
    for entry in sets:
        read_texts(entry, seed)
