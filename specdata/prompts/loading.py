"""Prompts: sets of them read, rendered as the target wants them, tokenized, and accounted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED
from specdata.prompts.chat_templates import Message, TemplateRefusedError, chat_ids
from specdata.prompts.config import PromptSet
from specdata.prompts.forms import RawPrompt, form_of, prompts_in, uses_chat
from specdata.prompts.rows import PromptRow, columns_of, read_rows, require_columns
from specdata.prompts.sources import check_names, short_name, source_of
from specdata.toy import corpus as toy
from specdata.toy.library import LIBRARY, library_prompts

REASONS = ("duplicate", "near_empty", "over_long", "undecodable", "no_user_turn", "refused")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `example_id` is a hash of its text, or of its messages and follow-ups.

    `messages` is what a chat template rendered (empty for plain text); `follow_ups` are the user's
    later turns, which depend on the model's answers (`templates.next_turn` renders the next).
    """

    example_id: str
    dataset: str
    split: str
    ids: list[int]
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts, and an account of what was read, kept and dropped (JSON-able, one entry a set)."""

    prompts: list[Prompt]
    report: list[dict[str, Any]]


def load_prompts(
    sets: Sequence[PromptSet],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int | None = None,
) -> LoadedPrompts:
    """Read, render and tokenize prompt sets, always in the same order.

    A prompt is dropped, and counted under its reason, if it was there before (also in an earlier
    set), has no letter or digit, is longer than `max_tokens`, is no valid text, is a conversation
    without a turn of the user, or is refused by the chat template (a system message, say).

    Args:
        sets: what to read; `count` prompts of each are read, so fewer may be kept.
        tokenizer: the target's.
        seed: decides the embedded prompts, and the order of catalogued sets.
        max_tokens: longest prompt, such as the target's positions less `max_new_tokens`.

    Raises:
        ConfigError: for an unknown, absent or unreadable set, a missing column or chat template,
            fewer prompts than `count`, or a set of which nothing can be kept.
    """
    check_names(sets)
    seen: dict[str, Prompt] = {}
    report = []
    for wanted in sets:
        entry = _account(wanted)
        for found in _stream(wanted, seed, bool(tokenizer.chat_template)):
            entry["read"] += 1
            reason = found if isinstance(found, str) else _problem(found)
            if not reason:
                assert isinstance(found, RawPrompt)
                reason = _keep(found, wanted, tokenizer, seen, max_tokens, entry)
            if reason:
                entry["dropped"][reason] += 1
            else:
                entry["kept"] += 1
        _check_account(entry, max_tokens)
        report.append(entry)
    return LoadedPrompts(list(seen.values()), report)


def check_sets(sets: Sequence[PromptSet], seed: int) -> None:
    """Find before any model is loaded what `load_prompts` would refuse. Raises ConfigError."""
    check_names(sets)
    for wanted in sets:
        entry = _account(wanted)
        entry["read"] = entry["kept"] = sum(1 for _ in _stream(wanted, seed, has_template=True))
        _check_account(entry, None)


def dropped(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each set of a report that lost prompts, with the reasons."""
    return [
        f"prompts of {entry['name']}/{entry['split']}: {entry['kept']} of {entry['read']} kept; "
        + ", ".join(f"{count} {reason}" for reason, count in entry["dropped"].items() if count)
        for entry in report
        if entry["kept"] < entry["read"]
    ]


def _account(wanted: PromptSet) -> dict[str, Any]:
    return {
        "name": wanted.name,
        "split": wanted.split,
        "source": source_of(wanted) or "embedded",
        "licence": CATALOGUE[wanted.name].licence if wanted.name in CATALOGUE else None,
        "asked": wanted.count,
        "read": 0,
        "kept": 0,
        "dropped": dict.fromkeys(REASONS, 0),
    }


def _check_account(entry: Mapping[str, Any], max_tokens: int | None) -> None:
    what = f"prompt set {entry['name']!r} (split {entry['split']!r})"
    if not entry["read"]:
        raise ConfigError(f"{what} is empty: it must hold prompts")
    if entry["read"] < entry["asked"]:
        raise ConfigError(
            f"{what} must hold {entry['asked']} prompts, it has {entry['read']}: lower "
            "`count` (0 takes all)"
        )
    if entry["kept"] or entry["dropped"]["duplicate"]:
        return
    reasons = ", ".join(f"{count} {name}" for name, count in entry["dropped"].items() if count)
    limit = f" (at most {max_tokens} tokens fit beside the completion)" if max_tokens else ""
    because = f". {entry['refused_because']}" if "refused_because" in entry else ""
    raise ConfigError(
        f"{what}: none of its {entry['read']} prompts can be used: {reasons}{limit}{because}. Mend "
        "the set, lower max_new_tokens if they are too long, or take it out"
    )


def _keep(
    found: RawPrompt,
    wanted: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    seen: dict[str, Prompt],
    max_tokens: int | None,
    entry: dict[str, Any],
) -> str | None:
    """Add a prompt, or return the reason why not."""
    example_id = _id(found)
    if example_id in seen:
        return "duplicate"
    try:
        ids = (
            chat_ids(tokenizer, found.messages)
            if found.messages
            else [int(token) for token in tokenizer(found.text)["input_ids"]]
        )
    except TemplateRefusedError as error:
        entry.setdefault("refused_because", str(error))
        return "refused"
    if not ids:
        return "near_empty"
    if max_tokens is not None and len(ids) > max_tokens:
        return "over_long"
    seen[example_id] = Prompt(
        example_id, short_name(wanted.name), wanted.split, ids, found.messages, found.follow_ups
    )
    return None


def _id(found: RawPrompt) -> str:
    text = found.text
    if found.messages:
        turns = [[message["role"], message["content"]] for message in found.messages]
        text = json.dumps([turns, list(found.follow_ups)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _problem(found: RawPrompt) -> str | None:
    """Why a prompt is unusable whatever the tokenizer: not Unicode, or nothing to go on."""
    texts = [message["content"] for message in found.messages] or [found.text]
    try:
        "".join([*texts, *found.follow_ups]).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return "undecodable"
    return None if any(map(str.isalnum, texts[-1])) else "near_empty"


def _stream(wanted: PromptSet, seed: int, has_template: bool) -> Iterator[RawPrompt | str]:
    """The first `count` prompts of a set, or what is wrong with them, before tokenizing."""

    def every() -> Iterator[RawPrompt | str]:
        form = None
        for number, row in enumerate(_rows(wanted, seed), start=1):
            if row is None:
                yield "undecodable"
                continue
            form = form or form_of(wanted, row)
            require_columns(columns_of(form), row, f"prompt set {wanted.name!r}, row {number},")
            yield from prompts_in(
                row, form, chat=uses_chat(wanted, form, has_template), turns=wanted.turns
            )

    return islice(every(), wanted.count or None)


def _rows(wanted: PromptSet, seed: int) -> Iterator[PromptRow]:
    try:
        if wanted.name == LIBRARY:
            texts = library_prompts(wanted.split, wanted.count, seed=seed)
        elif wanted.name in EMBEDDED and not wanted.count:
            raise ConfigError(f"{wanted.name!r} is written from a seed without end: give a `count`")
        elif wanted.name in EMBEDDED:
            texts = toy.prompts(wanted.name, wanted.split, wanted.count, seed=seed)
        else:
            return read_rows(wanted, seed)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return iter({"prompt": text} for text in texts)
