"""Configuration of prompt sets: importable without torch or transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Some prompts of one data set."""

    name: str = field(
        metadata={
            "help": "embedded (instruct, maths, code, library), catalogued (alpaca, gsm8k, ...), a "
            "JSONL, JSON or parquet file, a folder, or a Hub id OWNER/NAME[@REVISION]"
        }
    )
    split: str = field(
        default="test", metadata={"help": "train, dev or test; stored with each row"}
    )
    count: int = field(
        default=100, metadata={"help": "how many prompts are read, from the first; 0 for all"}
    )
    source: str | None = field(
        default=None, metadata={"help": "read a catalogued set from this file, folder or Hub id"}
    )
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub data set"})
    source_split: str | None = field(
        default=None, metadata={"help": "the Hub split that is read (default: the one of `split`)"}
    )
    template: str | None = field(
        default=None, metadata={"help": "the prompt's text, with {column} for what a row holds"}
    )
    chat: bool | None = field(
        default=None,
        metadata={"help": "use the chat template (default: as the set is meant; `prompt`: no)"},
    )
    turns: Literal["all", "first", "last"] = field(
        default="all", metadata={"help": "which of a user's turns in conversations are prompts"}
    )
