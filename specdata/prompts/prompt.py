"""A prompt, and what a folder that keeps prompts says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdata.prompts.chat_templates import Message
from specdata.storage.files import read_object
from specdata.storage.resume import Settings

RECORD = "prompts.json"
"""In a folder that keeps prompts: what they were made of, and the report."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: T token ids, and what they were made of.

    Attributes:
        example_id: a hash of its text, or of its messages and follow-ups.
        messages: the conversation that a chat template rendered; empty for plain text.
        follow_ups: the user's later turns, which depend on the model's answers.
        reference: the text that an answer is scored against, if its row has one.
        variables: what else the chat template was given: `tools`, and variables that it reads.
        row: the row of its set, if that is a conversation, whose prompts begin alike.
    """

    example_id: str
    dataset: str
    split: str
    ids: list[int]
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    row: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts, in the order of the sets, and an account of each set as JSON values.

    It holds the set's name, split, source and licence, and how many prompts were asked for, read,
    kept, dropped for each of `REASONS`, and kept with which key that is `unread`.
    """

    prompts: Sequence[Prompt]
    report: list[dict[str, Any]]


def kept_report(folder: Path, made_of: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The report of prompts that a folder keeps, if that is what they were made of; else None."""
    try:
        record = read_object(folder / RECORD)
    except (OSError, ValueError):
        return None
    asked, kept = Settings(made_of).values, record.get("made_of", {})
    is_same = all(kept.get(name) == value for name, value in asked.items())
    report: list[dict[str, Any]] = record.get("report", [])
    return report if is_same else None
