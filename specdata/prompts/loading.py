"""Prompts: sets of them read, rendered as the target wants them, tokenized, and accounted for."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED
from specdata.prompts.chat_templates import (
    Message,
    TemplateRefusedError,
    chat_ids,
    require_template,
    text_ids,
)
from specdata.prompts.forms import RawPrompt, Unusable, is_unicode
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

REASONS = (
    *("duplicate", "near_empty", "over_long", "out_of_vocabulary"),
    *("undecodable", "media", "no_user_turn", "refused", "trained_on"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        example_id: a hash of its text, or of its messages and follow-ups.
        messages: the conversation that a chat template rendered; empty for plain text.
        follow_ups: the user's later turns, which depend on the model's answers.
        reference: the text that an answer is scored against, if its row has one.
        variables: what else the chat template was given: `tools`, and variables that it reads.
    """

    example_id: str
    dataset: str
    split: str
    ids: list[int]
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts, in the order of the sets, and an account of what was read, kept and dropped.

    The report has for each set JSON values: its name, split, source and licence, and how many
    prompts were asked for, read, kept and dropped for each of `REASONS`, and of how many kept ones
    the row had which key that is `unread`.
    """

    prompts: list[Prompt]
    report: list[dict[str, Any]]


def load_prompts(
    sets: Sequence[PromptSet],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int | None = None,
    vocabulary: int = sys.maxsize,
    template_variables: Mapping[str, Any] = {},
    trained_on: Collection[str] = (),
) -> LoadedPrompts:
    """Read, render and tokenize prompt sets, always in the same order.

    A prompt is dropped, and counted under its reason (`REASONS`), if it equals an earlier one (of
    any set), has no letter or digit, is longer than `max_tokens`, has an id beyond the model's
    `vocabulary` (some tokenizers have more than it has rows), is not valid Unicode, is a
    conversation without a user's turn, is refused by the chat template (which may, for example, not
    take a system message), or was `trained_on` (ids). The seed decides the embedded prompts, and
    the order of catalogued sets; `count` prompts of each are read, so fewer may be kept. The chat
    template is given `template_variables`, such as {"enable_thinking": False}, beside what a row
    gives it.
    """
    check_names(sets)
    has_template = bool(tokenizer.chat_template)
    reading = _Reading(
        seed, has_template, tokenizer, max_tokens, vocabulary, template_variables, trained_on
    )
    report = [reading.read(dataset) for dataset in sets]
    return LoadedPrompts(list(reading.seen.values()), report)


def check_sets(
    sets: Sequence[PromptSet],
    seed: int,
    *,
    here_alone: bool = False,
    has_template: bool | None = None,
) -> list[dict[str, Any]]:
    """Find what `load_prompts` would refuse before any model is loaded; the account of each set.

    With `here_alone`, of sets that are not on this machine names and splits only are checked.
    `has_template` is None if it is not known whether the target has a chat template.
    """
    check_names(sets)
    reading, report = _Reading(seed, has_template), []
    for dataset in sets:
        check_split(dataset)
        if not (here_alone and is_remote(dataset)):
            report.append(reading.read(dataset))
    return report


def check_kept(report: Sequence[Mapping[str, Any]], splits: Sequence[str]) -> None:
    """Refuse sets of which a split has no prompt left to train on. Raises ConfigError."""
    for split in splits:
        accounts = [account for account in report if account["split"] == split]
        if accounts and not any(account["kept"] for account in accounts):
            raise ConfigError(
                f"rollouts.sets must hold prompts of split {split} to train on, and all of "
                f"them were dropped: {'; '.join(dropped(accounts))} (a duplicate equals an "
                "earlier prompt, of any set). Give other prompts"
            )


@dataclass(slots=True)
class _Reading:
    """Prompts, by their ids, that sets hold; without a tokenizer nothing is known of tokens."""

    seed: int
    has_template: bool | None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_tokens: int | None = None
    vocabulary: int = sys.maxsize
    variables: Mapping[str, Any] = field(default_factory=dict)
    trained_on: Collection[str] = ()
    seen: dict[str, Prompt] = field(default_factory=dict)

    def read(self, dataset: PromptSet) -> dict[str, Any]:
        """Add the prompts of a set; returns the set's account."""
        account: dict[str, Any] = {
            "name": dataset.name,
            "split": dataset.split,
            "source": source_of(dataset) or "embedded",
            "licence": CATALOGUE[dataset.name].licence if dataset.name in CATALOGUE else None,
            "asked": dataset.count,
            "read": 0,
            "kept": 0,
            "dropped": dict.fromkeys(REASONS, 0),
            "unread": Counter(),
        }
        may_be_messages = self.has_template and dataset.chat is None
        may_be_messages = may_be_messages and dataset.name not in {*EMBEDDED, *CATALOGUE}
        for prompt in raw_prompts(dataset, self.seed, self.has_template is not False):
            account["read"] += 1
            may_be_messages = may_be_messages and not getattr(prompt, "messages", ())
            wrong = prompt if isinstance(prompt, Unusable) else self._keep(prompt, dataset)
            if wrong is None:
                account["kept"] += 1
                account["unread"].update(getattr(prompt, "unread", ()))
                continue
            account["dropped"][wrong.reason] += 1
            if wrong.why:
                account.setdefault(f"{wrong.reason}_because", wrong.why)
        if may_be_messages:
            account["as_text"] = True
        if not account["read"]:
            raise ConfigError(
                f"prompt set {account['name']!r} (split {account['split']!r}) is empty: it must "
                "hold prompts"
            )
        if not account["kept"] and not account["dropped"]["duplicate"]:
            raise ConfigError(
                f"{dropped([account])[0]}. Mend the set, lower max_new_tokens if they are too "
                "long, or take it out"
            )
        return account

    def _keep(self, prompt: RawPrompt, dataset: PromptSet) -> Unusable | None:
        """Add a prompt, or return the reason why not."""
        texts = [message["content"] for message in prompt.messages] or [prompt.text]
        if not is_unicode("".join([*texts, *prompt.follow_ups])):
            return Unusable("undecodable")
        if not any(map(str.isalnum, texts[-1])):
            return Unusable("near_empty")
        identity = prompt.text
        if prompt.messages:
            turns = [[*said.values()][:2] + [*said.items()][2:] for said in prompt.messages]
            given = [prompt.variables] if prompt.variables else []
            identity = json.dumps([turns, list(prompt.follow_ups), *given], default=str)
        example_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
        if example_id in self.seen:
            return Unusable("duplicate")
        if example_id in self.trained_on:
            return Unusable("trained_on")
        if prompt.messages and self.has_template is False:
            require_template(self.tokenizer)
        variables = {**self.variables, **prompt.variables}
        ids = self._ids(prompt, variables)
        if isinstance(ids, Unusable):
            return ids
        self.seen[example_id] = Prompt(
            example_id,
            short_name(dataset.name),
            dataset.split,
            ids,
            prompt.messages,
            prompt.follow_ups,
            prompt.reference,
            variables,
        )
        return None

    def _ids(self, prompt: RawPrompt, variables: Mapping[str, Any]) -> list[int] | Unusable:
        """A prompt's tokens, or why the model cannot read them."""
        if self.tokenizer is None:
            return [0]
        try:
            if prompt.messages:
                ids = chat_ids(self.tokenizer, prompt.messages, variables)
            else:
                ids = text_ids(self.tokenizer, prompt.text)
        except TemplateRefusedError as error:
            return Unusable("refused", str(error))
        if not ids:
            return Unusable("near_empty")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            why = f"at most {self.max_tokens} tokens fit beside the completion"
            return Unusable("over_long", why)
        if (largest := max(ids)) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            why = f"the tokenizer's {token!r} is id {largest}, and the model has rows for ids below"
            return Unusable("out_of_vocabulary", f"{why} {self.vocabulary}")
        return ids


def dropped(report: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each set of a report that lost prompts, with the reasons, or has too few.

    And for each with keys that are not read, and of texts, which could be a chat's messages.
    """
    lines = []
    for account in report:
        of = f"prompts of {account['name']}/{account['split']}"
        reasons = [f"{count} {reason}" for reason, count in account["dropped"].items() if count]
        if account["read"] < account["asked"]:
            reasons.append(f"it has no more ({account['asked']} were asked for)")
        if reasons:
            causes = [account[key] for name in REASONS if (key := f"{name}_because") in account]
            what = f"{', '.join(reasons)}{'. '.join(['', *causes])}"
            lines.append(f"{of}: {account['kept']} of {account['read']} kept; {what}")
        if account["unread"]:
            keys = ", ".join(f"{name} in {count}" for name, count in account["unread"].items())
            lines.append(f"{of}: nothing reads these keys of their rows: {keys}")
        if "as_text" in account:
            lines.append(
                f"{of}: the target has a chat template, and these texts are taken as they are; "
                "`chat: true` in each set makes them a user's messages"
            )
    return lines
