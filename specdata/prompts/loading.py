"""Prompts: sets of them read, rendered as the target wants them, tokenized, and accounted for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.processes import is_main
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED
from specdata.prompts.chat_templates import (
    TemplateRefusedError,
    chat_text,
    require_template,
    text_ids,
    unread_settings,
)
from specdata.prompts.forms import RawPrompt, Unusable, is_unicode
from specdata.prompts.prompt import LoadedPrompts, Prompt, kept_report
from specdata.prompts.reading import (
    check_names,
    check_split,
    is_remote,
    prompt_inputs,
    raw_prompts,
    short_name,
    source_of,
)
from specdata.storage.files import fingerprint

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

REASONS = (
    *("duplicate", "near_empty", "over_long", "out_of_vocabulary"),
    *("undecodable", "media", "no_user_turn", "refused", "trained_on"),
)
RENDERED_AT_ONCE = 1024
"""Prompts that are tokenized together."""


_Rendered = tuple[Prompt, str]


def load_prompts(
    sets: Sequence[PromptSet],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int | None = None,
    vocabulary: int = sys.maxsize,
    template_variables: Mapping[str, Any] = {},
    trained_on: Collection[str] = (),
    folder: Path | None = None,
) -> LoadedPrompts:
    """Read, render and tokenize prompt sets, always in the same order.

    In a `folder` they are kept: one process makes them, the others and a later run map its file. A
    prompt is dropped, and counted under its reason (`REASONS`), if it equals an earlier one (of any
    set), is longer than `max_tokens`, has an id beyond the model's `vocabulary` (some tokenizers
    have more than it has rows), or was `trained_on` (ids), among others. The seed decides the
    embedded prompts, and the order of catalogued sets; `count` prompts of each are read, so fewer
    may be kept. The chat template is given `template_variables` beside what a row gives it.
    """
    check_names(sets)
    from specdata.prompts.stored import Prompts, kept_prompts, record_batch  # here: Arrow

    def read(write: Callable[[pa.RecordBatch], object]) -> list[dict[str, Any]]:
        reading = _Reading(
            seed,
            bool(tokenizer.chat_template),
            tokenizer,
            max_tokens,
            vocabulary,
            template_variables,
            trained_on,
            lambda prompts: write(record_batch(prompts)),
        )
        return [reading.read(dataset) for dataset in sets]

    if folder is None:
        batches: list[pa.RecordBatch] = []
        report = read(batches.append)
        return LoadedPrompts(Prompts.of_batches(batches), report)
    made_of = {
        **_made_of(sets, seed),
        "tokenizer": _fingerprint(tokenizer),
        "limits": [max_tokens, vocabulary],
        "variables": template_variables,
        "trained_on": sorted(trained_on),
    }
    return kept_prompts(folder, made_of, read)


def _made_of(sets: Sequence[PromptSet], seed: int) -> dict[str, Any]:
    """What decides the rows of prompt sets: their settings, and what their sources hold."""
    sources = {name: fingerprint(each) for name, each in prompt_inputs(sets).items()}
    return {"sets": [asdict(each) for each in sets], "sources": sources, "seed": seed}


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what a tokenizer makes of texts and conversations."""
    from specdata.models import vocabulary_fingerprint  # here: torch

    how = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(tokenizer)
    parts = [how, vocabulary_fingerprint(tokenizer), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_sets(
    sets: Sequence[PromptSet],
    seed: int,
    *,
    here_alone: bool = False,
    has_template: bool | None = None,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Find what `load_prompts` would refuse before any model is loaded; the account of each set.

    With `here_alone`, of sets that are not on this machine names and splits only are checked.
    `has_template` is None if it is not known whether the target has a chat template. Rows are read
    by the main process alone, the account of others is empty, and not again if the `folder` keeps
    what `load_prompts` made of them.
    """
    check_names(sets)
    for dataset in sets:
        check_split(dataset)
    if not is_main():
        return []
    if folder is not None and (report := kept_report(folder, _made_of(sets, seed))) is not None:
        return report
    reading = _Reading(seed, has_template)
    return [reading.read(each) for each in sets if not (here_alone and is_remote(each))]


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
    """Prompts that sets hold, told apart by their ids; without a tokenizer none are made of them.

    `write` takes those that are kept, some at once.
    """

    seed: int
    has_template: bool | None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_tokens: int | None = None
    vocabulary: int = sys.maxsize
    variables: Mapping[str, Any] = field(default_factory=dict)
    trained_on: Collection[str] = ()
    write: Callable[[Sequence[Prompt]], object] = lambda prompts: None
    seen: set[str] = field(default_factory=set)

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
        raw_rows = raw_prompts(dataset, self.seed, self.has_template is not False)
        rendered = ((raw, self._rendered(raw, dataset)) for raw in raw_rows)
        while batch := list(islice(rendered, RENDERED_AT_ONCE)):
            kept = []
            tokenized = self._tokenized([prompt for _, prompt in batch])
            for (raw, _), prompt in zip(batch, tokenized, strict=True):
                may_be_messages = may_be_messages and not getattr(raw, "messages", ())
                if isinstance(prompt, Prompt):
                    self.seen.add(prompt.example_id)
                    account["unread"].update(getattr(raw, "unread", ()))
                    if prompt.messages and self.tokenizer is not None and prompt.variables:
                        account["unread"].update(unread_settings(self.tokenizer, prompt.variables))
                    kept.append(prompt)
                    continue
                account["dropped"][prompt.reason] += 1
                if prompt.why:
                    account.setdefault(f"{prompt.reason}_because", prompt.why)
            account["read"] += len(batch)
            account["kept"] += len(kept)
            self.write(kept)
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

    def _rendered(self, raw: RawPrompt | Unusable, dataset: PromptSet) -> _Rendered | Unusable:
        """A prompt without its tokens and its text as the target wants it, or why there is none."""
        if isinstance(raw, Unusable):
            return raw
        texts = [message["content"] for message in raw.messages] or [raw.text]
        if not is_unicode("".join([*texts, *raw.follow_ups])):
            return Unusable("undecodable")
        if not any(map(str.isalnum, texts[-1])):
            return Unusable("near_empty")
        identity = raw.text
        if raw.messages:
            turns = [[*turn.values()][:2] + [*turn.items()][2:] for turn in raw.messages]
            beside = [raw.variables] if raw.variables else []
            identity = json.dumps([turns, list(raw.follow_ups), *beside], default=str)
        example_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
        if example_id in self.seen:
            return Unusable("duplicate")
        if example_id in self.trained_on:
            return Unusable("trained_on")
        if raw.messages and self.has_template is False:
            require_template(self.tokenizer)
        variables, text = {**self.variables, **raw.variables}, raw.text
        if raw.messages and self.tokenizer is not None:
            try:
                text = chat_text(self.tokenizer, raw.messages, variables)
            except TemplateRefusedError as error:
                return Unusable("refused", str(error))
        parts = raw.messages, raw.follow_ups, raw.reference, variables, raw.row
        return Prompt(example_id, short_name(dataset.name), dataset.split, [], *parts), text

    def _tokenized(self, batch: Sequence[_Rendered | Unusable]) -> Iterator[Prompt | Unusable]:
        """Prompts of one set, all texts or all conversations, or why the model cannot read them."""
        rendered = [each for each in batch if not isinstance(each, Unusable)]
        ids = iter([[0]] * len(rendered))
        if self.tokenizer is not None:
            is_chat = any(prompt.messages for prompt, _ in rendered)
            ids = iter(text_ids(self.tokenizer, [text for _, text in rendered], is_chat=is_chat))
        for each in batch:
            if isinstance(each, Unusable):
                yield each
            else:
                prompt = dataclasses.replace(each[0], ids=next(ids))
                yield self._wrong(prompt) or prompt

    def _wrong(self, prompt: Prompt) -> Unusable | None:
        """Why the model cannot read a prompt, or need not."""
        ids = prompt.ids
        if prompt.example_id in self.seen:  # since it was rendered
            return Unusable("duplicate")
        if not ids:
            return Unusable("near_empty")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            why = f"at most {self.max_tokens} tokens fit beside the completion"
            return Unusable("over_long", why)
        if (largest := max(ids)) >= self.vocabulary:
            assert self.tokenizer is not None
            token = self.tokenizer.convert_ids_to_tokens(largest)
            why = f"the tokenizer's {token!r} is id {largest}, and the model has rows for ids below"
            return Unusable("out_of_vocabulary", f"{why} {self.vocabulary}")
        return None


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
