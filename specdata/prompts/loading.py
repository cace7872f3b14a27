"""Prompts: sets of them read, rendered as the target wants them, tokenized, and accounted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE
from specdata.prompts.chat_templates import Message, TemplateRefusedError, chat_ids
from specdata.prompts.config import PromptSet
from specdata.prompts.forms import RawPrompt, is_unicode
from specdata.prompts.reading import (
    check_names,
    check_split,
    is_remote,
    raw_prompts,
    short_name,
    source_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONS = ("duplicate", "near_empty", "over_long", "undecodable", "no_user_turn", "refused")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        example_id: a hash of its text, or of its messages and follow-ups.
        dataset: name of its prompt set, as reports show it.
        split: "train", "dev" or "test".
        ids: its T token ids.
        messages: the conversation that a chat template rendered; empty for plain text.
        follow_ups: the user's later turns, which depend on the model's answers
            (`chat_templates.next_turn` renders the next).
        reference: the text that an answer is scored against, if its row has one.
    """

    example_id: str
    dataset: str
    split: str
    ids: list[int]
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts, and an account of what was read, kept and dropped.

    Attributes:
        prompts: in the order of the sets.
        report: for each set JSON values: its name, split, source and licence, and how many prompts
            were asked for, read, kept and dropped for each of `REASONS`.
    """

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

    A prompt is dropped, and counted under its reason (`REASONS`), if it equals an earlier one (of
    any set), has no letter or digit, is longer than `max_tokens`, is not valid Unicode, is a
    conversation without a user's turn, or is refused by the chat template (which may, for example,
    not take a system message).

    Args:
        sets: what to read; `count` prompts of each are read, so fewer may be kept.
        tokenizer: the target's.
        seed: decides the embedded prompts, and the order of catalogued sets.
        max_tokens: longest prompt, such as the target's positions less `max_new_tokens`.

    Returns:
        The prompts that are kept, in order, and an account of each set.

    Raises:
        ConfigError: for an unknown, absent or unreadable set, a missing column or chat template,
            fewer prompts than `count`, or a set of which nothing can be kept.
    """
    check_names(sets)
    seen: dict[str, Prompt] = {}
    report = []
    for wanted in sets:
        account = _new_account(wanted)
        for prompt in raw_prompts(wanted, seed, bool(tokenizer.chat_template)):
            account["read"] += 1
            reason: str | None
            if isinstance(prompt, str):
                reason = prompt
            else:
                reason = _keep(prompt, wanted, tokenizer, seen, max_tokens, account)
            if reason:
                account["dropped"][reason] += 1
            else:
                account["kept"] += 1
        _check_account(account, max_tokens)
        report.append(account)
    return LoadedPrompts(list(seen.values()), report)


def check_sets(sets: Sequence[PromptSet], seed: int, *, here_alone: bool = False) -> None:
    """Find before any model is loaded what `load_prompts` would refuse.

    Args:
        sets: what would be read.
        seed: as in `load_prompts`.
        here_alone: of sets that are not on this machine, check names and splits only.

    Raises:
        ConfigError: as `load_prompts`.
    """
    check_names(sets)
    for wanted in sets:
        check_split(wanted)
        if here_alone and is_remote(wanted):
            continue
        account = _new_account(wanted)
        account["read"] = account["kept"] = sum(
            1 for _ in raw_prompts(wanted, seed, has_template=True)
        )
        _check_account(account, None)


def dropped(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each set of a report that lost prompts, with the reasons."""
    return [
        f"prompts of {account['name']}/{account['split']}: {account['kept']} of {account['read']} "
        "kept; "
        + ", ".join(f"{count} {reason}" for reason, count in account["dropped"].items() if count)
        for account in report
        if account["kept"] < account["read"]
    ]


def _new_account(wanted: PromptSet) -> dict[str, Any]:
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


def _check_account(account: Mapping[str, Any], max_tokens: int | None) -> None:
    what = f"prompt set {account['name']!r} (split {account['split']!r})"
    if not account["read"]:
        raise ConfigError(f"{what} is empty: it must hold prompts")
    if account["read"] < account["asked"]:
        raise ConfigError(
            f"{what} must hold {account['asked']} prompts, it has {account['read']}: lower "
            "`count` (0 takes all)"
        )
    if account["kept"] or account["dropped"]["duplicate"]:
        return
    reasons = ", ".join(f"{count} {name}" for name, count in account["dropped"].items() if count)
    limit = f" (at most {max_tokens} tokens fit beside the completion)" if max_tokens else ""
    because = f". {account['refused_because']}" if "refused_because" in account else ""
    raise ConfigError(
        f"{what}: none of its {account['read']} prompts can be used: {reasons}{limit}{because}. "
        "Mend the set, lower max_new_tokens if they are too long, or take it out"
    )


def _keep(
    prompt: RawPrompt,
    wanted: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    seen: dict[str, Prompt],
    max_tokens: int | None,
    account: dict[str, Any],
) -> str | None:
    """Add a prompt, or return the reason why not."""
    texts = [message["content"] for message in prompt.messages] or [prompt.text]
    if not is_unicode("".join([*texts, *prompt.follow_ups])):
        return "undecodable"
    if not any(map(str.isalnum, texts[-1])):
        return "near_empty"
    identity = prompt.text
    if prompt.messages:
        turns = [[message["role"], message["content"]] for message in prompt.messages]
        identity = json.dumps([turns, list(prompt.follow_ups)])
    example_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if example_id in seen:
        return "duplicate"
    try:
        ids = (
            chat_ids(tokenizer, prompt.messages)
            if prompt.messages
            else tokenizer(prompt.text)["input_ids"]
        )
    except TemplateRefusedError as error:
        account.setdefault("refused_because", str(error))
        return "refused"
    if not ids:
        return "near_empty"
    if max_tokens is not None and len(ids) > max_tokens:
        return "over_long"
    seen[example_id] = Prompt(
        example_id,
        short_name(wanted.name),
        wanted.split,
        ids,
        prompt.messages,
        prompt.follow_ups,
        prompt.reference,
    )
    return None
