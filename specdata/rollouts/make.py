"""Stage 1: the target's completions of the prompts, stored as a dataset.

A backend does the sampling: `backend.py` in this process, `vllm.py` by a server.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from specdata.config import RolloutConfig
from specdata.prompts.chat_templates import Message, TemplateRefusedError, chat_ids
from specdata.prompts.prompt import Prompt
from specdata.prompts.stored import Prompts
from specdata.rollouts.backend import Backend, Completion, Report, Request
from specdata.storage.dataset import fill_dataset
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, TARGET_STATES, TARGET_TAPS, Rollout
from specdata.target_states import taps_to_bytes, to_bytes


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The target's tokenizer, with its chat template, for the later turns of a conversation.

    A conversation ends before a turn whose prompt has more tokens than the `longest`, has a token
    that the target, of that `vocabulary`, has no row for, or is refused by the template.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int
    vocabulary: int = sys.maxsize


def make_rollouts(
    backend: Backend,
    prompts: Sequence[Prompt],
    folder: Path,
    config: RolloutConfig,
    *,
    dialogue: Dialogue | None = None,
    settings: Settings,
    report: Report = lambda ended: None,
) -> int:
    """Complete every prompt, turn after turn, and store the dataset (see `fill_dataset`).

    Prompts are grouped by length, so that little of a batch is padding. A shard is completed by
    itself: neither the number of processes nor an interruption changes its batches. `dialogue` is
    needed where prompts have follow-ups. Returns the number of completions in the dataset.
    """
    prompts = Prompts.of(prompts)
    ordered, size = prompts.by_length(), config.shard_size
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    shards = [
        partial(complete_group, backend, prompts, group, config.samples, dialogue, report)
        for group in groups
    ]
    stored = [TARGET_STATES] * config.store_states + [TARGET_TAPS] * bool(config.store_taps)
    schema = pa.schema([*ROLLOUTS, *(field for each in stored for field in each)])
    return fill_dataset(folder, schema, settings, shards, report)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One prompt of a conversation that is being held; `place` sorts the rows."""

    place: tuple[int, int, int]  # prompt within the group, sample, turn
    prompt: Prompt
    messages: tuple[Message, ...]
    ids: list[int]

    def request(self) -> Request:
        _, sample, turn = self.place
        key = (self.prompt.example_id, sample)
        return Request(self.ids, (*key, turn) if turn else key)

    def row(self, completion: Completion) -> Rollout:
        row = Rollout(
            example_id=self.prompt.example_id,
            dataset=self.prompt.dataset,
            split=self.prompt.split,
            sample=self.place[1],
            turn=self.place[2],
            prompt_ids=self.ids,
            completion_ids=completion.ids,
            finish=completion.finish,
        )
        if completion.states is not None:
            row["target_states"] = to_bytes(completion.states)
        if completion.taps is not None:
            row["taps"], tapped = completion.taps
            row["target_taps"] = taps_to_bytes(tapped, len(row["taps"]))
        return row

    def next(self, completion: Completion, dialogue: Dialogue) -> _Turn | None:
        """The next turn, unless it was the last, is too long, or the template refuses it."""
        index, sample, turn = self.place
        if turn == len(self.prompt.follow_ups):
            return None
        # The answer is rendered from its text, as a server would that is sent the conversation.
        answer = dialogue.tokenizer.decode(completion.ids, skip_special_tokens=True)
        answered = {"role": "assistant", "content": answer}
        asked = {"role": "user", "content": self.prompt.follow_ups[turn]}
        messages = (*self.messages, answered, asked)
        try:
            ids = chat_ids(dialogue.tokenizer, messages, self.prompt.variables)
        except TemplateRefusedError:  # of an empty answer, say
            return None
        if len(ids) > dialogue.longest or max(ids) >= dialogue.vocabulary:
            return None
        return _Turn((index, sample, turn + 1), self.prompt, messages, ids)


def complete_group(
    backend: Backend,
    prompts: Sequence[Prompt],
    group: Sequence[int],
    samples: int,
    dialogue: Dialogue | None,
    report: Report,
) -> list[Rollout]:
    """Complete all samples and turns of a group of the prompts; rows by prompt, sample and turn."""
    turns = [
        _Turn((index, sample, 0), prompt, prompt.messages, prompt.ids)
        for index, prompt in enumerate(prompts[place] for place in group)
        for sample in range(samples)
    ]
    rows: dict[tuple[int, int, int], Rollout] = {}
    while turns:
        completions = backend.complete([turn.request() for turn in turns], report)
        pairs = list(zip(turns, completions, strict=True))
        rows.update((turn.place, turn.row(completion)) for turn, completion in pairs)
        turns = []
        if dialogue:
            later = (turn.next(completion, dialogue) for turn, completion in pairs)
            turns = [turn for turn in later if turn]
    return [rows[place] for place in sorted(rows)]


def turns_asked(prompts: Sequence[Prompt], samples: int) -> int:
    """Completions if every conversation is held to its end."""
    return samples * Prompts.of(prompts).turns
