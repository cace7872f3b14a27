"""Configuration of prompt sets: importable without torch or transformers."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from specdata.config import Count


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class PromptSet:
    """Some prompts of one data set, constructed by position: `PromptSet("maths", "test", 100)`."""

    name: str = Field(
        description="embedded (natural, for chat models: chat-assistant, chat-maths, chat-code, "
        "chat-letters; long, lists of such texts; for the embedded pair: instruct, maths, code), "
        "catalogued (alpaca, gsm8k, ...), a JSONL, JSON or parquet file, a folder, or a Hub id "
        "OWNER/NAME[@REVISION]"
    )
    split: str = Field(default="test", description="train, dev or test; stored with each row")
    count: Count = Field(
        default=100, ge=0, description="how many prompts are read, from the first; 0 for all"
    )
    source: str | None = Field(
        default=None, description="read a catalogued set from this file, folder or Hub id"
    )
    subset: str | None = Field(default=None, description="configuration of a Hub data set")
    source_split: str | None = Field(
        default=None, description="the Hub split that is read (default: the one of `split`)"
    )
    template: str | None = Field(
        default=None, description="the prompt's text, with {column} for what a row holds"
    )
    reference: str | None = Field(
        default=None,
        description="the text that an answer is scored against (eval.scores), with {column} for "
        "what a row holds (default: as catalogued, or the column `reference`)",
    )
    chat: bool | None = Field(
        default=None,
        description="use the chat template (default: as the set is meant; `prompt`: no)",
    )
    turns: Literal["all", "first", "last"] = Field(
        default="all", description="which of a user's turns in conversations are prompts"
    )
