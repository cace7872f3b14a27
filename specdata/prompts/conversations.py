"""Recorded conversations to train on: where they are, what is left out, and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED, Form
from specdata.prompts.chat_templates import (
    Conversation,
    TemplateRefusedError,
    UnmaskableError,
    assistant_mask,
    unread_settings,
)
from specdata.prompts.forms import Unusable, conversation_of, objects_in, recorded_in, unread_in
from specdata.prompts.reading import check_names, check_split, is_remote, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHY_LEFT_OUT = {
    "undecodable": "not made of texts",
    "media": "with pictures, videos or sounds",
    "unknown_role": "with a role that is not known",
    "no_assistant_turn": "without a turn of the assistant",
    "refused": "refused by the chat template",
    "unmaskable": "whose chat template hides what the assistant said",
    "out_of_vocabulary": "with ids that the target has no row for",
}
_FORMS = (
    "`messages`, `conversations`, `conversation`, or `prompt` and `completion`: lists of {role, "
    "content} (system, developer, user, assistant, tool) or {from, value} (human, gpt)"
)
_SHOWN = 300  # characters of what is said of one conversation


@dataclass(slots=True)
class Account:
    """The account of one source: what was read and what of it is left out.

    `left_out` is how many by reason (one of `WHY_LEFT_OUT`), `first` the first one for each, in
    words; `unread` in how many rows is which key that nothing reads.
    """

    source: str
    read: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)

    def leave_out(self, row: int, reason: str, why: str = "") -> None:
        """Count a conversation that cannot be used."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        why = f": {why}" if why else ""
        self.first.setdefault(reason, f"the first is row {row}{why}"[:_SHOWN])

    def __str__(self) -> str:
        """The conversations that are left out and why, as a part of a sentence; "" if none is."""
        parts = [
            f"{count} {WHY_LEFT_OUT[reason]} ({self.first[reason]})"
            for reason, count in self.left_out.items()
        ]
        parts += [f"{name}, not read, in {count}" for name, count in self.unread.items()]
        return "; ".join(parts)

    def check(self) -> None:
        """Raise ConfigError if no conversation is left to train on."""
        if not self.read:
            raise ConfigError(
                f"conversations {self.source!r} are empty: they must hold at least one, such as "
                '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'
            )
        if sum(self.left_out.values()) == self.read:
            raise ConfigError(
                f"conversations {self.source!r}: none of {self.read} can be trained on: {self}. "
                f"Each must hold {_FORMS}, with a turn of the assistant"
            )


def read_conversations(account: Account, seed: int) -> Iterator[tuple[int, Conversation]]:
    """The conversations of a source, each with the number of its row, from 1.

    Rows hold them in `messages`, `conversations`, or `prompt` and `completion`. The seed decides
    the order of a catalogued set; of a Hub id, split train is read. Others are counted in the
    account; raises ConfigError in the end if none can be trained on.
    """
    name = account.source
    column = CATALOGUE[name].form.messages if name in CATALOGUE else None
    for number, row in read_rows(_checked(name), seed):
        account.read += 1
        if isinstance(row, str):
            account.leave_out(number, "undecodable")
            continue
        column = column or recorded_in(row) or "messages"
        if column not in row:
            raise ConfigError(
                f"conversations {name!r}, row {number}, has no column {column!r}; it has "
                f"{', '.join(map(repr, row)) or 'none'}. Each row must hold {_FORMS}"
            )
        if column == "prompt":
            parts = [objects_in(row["prompt"]), objects_in(row.get("completion") or [])]
            turns = None if None in parts else [turn for part in parts for turn in part or ()]
            row = {**row, "prompt": turns}
        talk = conversation_of(row, column)
        if isinstance(talk, Unusable):
            account.leave_out(number, talk.reason)
        elif all(message["role"] != "assistant" for message in talk.messages):
            account.leave_out(number, "no_assistant_turn")
        else:
            account.unread.update(unread_in(row, Form(messages=column)))
            yield number, talk
    account.check()


def masked_conversations(
    account: Account,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any],
    vocabulary: int = sys.maxsize,
) -> Iterator[tuple[list[int], list[int]]]:
    """The `assistant_mask` of each conversation whose ids are in the `vocabulary`: ids and mask.

    What a row gives the chat template precedes the `variables`.
    """
    for row, talk in read_conversations(account, seed):
        try:
            given = {**variables, **talk.variables}
            ids, mask = assistant_mask(tokenizer, talk.messages, given)
        except TemplateRefusedError as error:
            account.leave_out(row, "refused", str(error))
        except UnmaskableError as error:
            account.leave_out(row, "unmaskable", str(error))
        else:
            if (largest := max(ids)) < vocabulary:
                account.unread.update(unread_settings(tokenizer, given))
                yield ids, mask
            else:
                account.leave_out(row, "out_of_vocabulary", f"id {largest}")


def check_conversations(
    names: Sequence[str],
    seed: int,
    *,
    here_alone: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    variables: Mapping[str, Any] = {},
) -> None:
    """Find before any model is loaded what cannot be trained on.

    With `here_alone`, of sources that are not on this machine the names only are checked; with a
    `tokenizer`, that its chat template shows what the assistant says in one conversation of each.
    """
    check_names([PromptSet(name, "train", 0) for name in names])
    for name in names:
        if here_alone and is_remote(_checked(name)):
            continue
        for _ in read_conversations(Account(name), seed):
            pass
        if tokenizer is not None:
            next(masked_conversations(Account(name), seed, tokenizer, variables), None)


def _checked(name: str) -> PromptSet:
    """A source as a set. Raises ConfigError if it is unknown or holds no conversations."""
    catalogued = CATALOGUE.get(name)
    if name in EMBEDDED or (catalogued and not catalogued.form.messages):
        raise ConfigError(
            f"prompt set {name!r} holds prompts, no conversations with answers to train on: name "
            "sharegpt, a file or a Hub id, or leave draft.finetune.conversations out to train on "
            "the target's rollouts of it"
        )
    check_split(wanted := PromptSet(name, "train", 0))
    return wanted
