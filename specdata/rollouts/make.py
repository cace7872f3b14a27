"""Stage 1a: what the target answers, stored; `generation.py` and `vllm.py` do the sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdata.errors import ConfigError, at_least_one
from specdata.probability import SamplingConfig
from specdata.prompts.chat_templates import Message, next_turn
from specdata.prompts.loading import Prompt, PromptSet
from specdata.rollouts.sampling import Backend, Completion, Request
from specdata.rollouts.vllm import VllmConfig
from specdata.storage.dataset import fill_dataset
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Rollout

BACKENDS = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Which prompts are completed, how far, and by what."""

    sets: list[PromptSet] = field(metadata={"help": "prompt sets to complete"})
    max_new_tokens: int = field(default=128, metadata={"help": "longest completion, in tokens"})
    samples: int = field(default=1, metadata={"help": "completions of each prompt"})
    shard_size: int = field(
        default=64, metadata={"help": "prompts of one shard, which is made or lost as a whole"}
    )
    batch_size: int = field(default=64, metadata={"help": "completions decoded together"})
    backend: str = field(
        default="transformers",
        metadata={"help": "transformers (in this process) or vllm (a server in its own)"},
    )
    vllm: VllmConfig = field(
        default_factory=VllmConfig, metadata={"help": "the server of backend vllm"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "rollouts", "max_new_tokens", "samples", "shard_size", "batch_size")
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"rollouts.backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}"
            )

    def decisive(self) -> dict[str, Any]:
        """What the rows depend on; the address of a server, say, may change on resume."""
        settings = asdict(self)
        del settings["vllm"]
        if self.backend == "vllm":
            del settings["batch_size"]
        return settings


def check_samples(config: RolloutConfig, sampling: SamplingConfig) -> None:
    """Raise ConfigError for several samples of a distribution that always gives the same one."""
    if config.samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"rollouts.samples is {config.samples}, but at temperature 0 every sample of a prompt "
            "is the same: set samples to 1, or a temperature above 0"
        )


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What later turns of a conversation need.

    Args:
        tokenizer: the target's, with its chat template.
        longest: tokens a prompt may have; a conversation ends before a turn that exceeds it.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int


def make_rollouts(
    backend: Backend,
    prompts: Sequence[Prompt],
    folder: Path,
    config: RolloutConfig,
    *,
    dialogue: Dialogue | None = None,
    settings: Settings,
    report: Callable[[int], object],
) -> int:
    """Complete every prompt, turn after turn, and store the table (see `fill_dataset`).

    Prompts are grouped by length, so that little of a batch is padding. A shard is completed by
    itself: neither the number of processes nor an interruption changes its batches.

    Args:
        backend: what completes.
        prompts: what is completed; the order does not matter.
        folder: the table's folder.
        config: sizes.
        dialogue: needed where prompts have follow-ups.
        settings: everything that decides the rows; stored in the manifest, compared on resume.
        report: called with the number of rows done.

    Returns:
        Number of completions in the table.
    """
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.example_id))
    groups = [
        ordered[start : start + config.shard_size]
        for start in range(0, len(ordered), config.shard_size)
    ]
    shards = [partial(complete_group, backend, group, config.samples, dialogue) for group in groups]
    return fill_dataset(folder, ROLLOUTS, settings, shards, report)


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
        return Rollout(
            example_id=self.prompt.example_id,
            dataset=self.prompt.dataset,
            split=self.prompt.split,
            sample=self.place[1],
            turn=self.place[2],
            prompt_ids=self.ids,
            completion_ids=completion.ids,
            finish=completion.finish,
        )

    def next(self, completion: Completion, dialogue: Dialogue) -> _Turn | None:
        """The next turn, unless this was the last one or the conversation has builder too long."""
        index, sample, turn = self.place
        if turn == len(self.prompt.follow_ups):
            return None
        answer = dialogue.tokenizer.decode(completion.ids, skip_special_tokens=True)
        messages, ids = next_turn(
            dialogue.tokenizer, self.messages, answer, self.prompt.follow_ups[turn]
        )
        if len(ids) > dialogue.longest:
            return None
        return _Turn((index, sample, turn + 1), self.prompt, messages, ids)


def complete_group(
    backend: Backend, group: Sequence[Prompt], samples: int, dialogue: Dialogue | None
) -> list[Rollout]:
    """All samples and turns of some prompts, in this order: prompt, sample, turn."""
    turns = [
        _Turn((index, sample, 0), prompt, prompt.messages, prompt.ids)
        for index, prompt in enumerate(group)
        for sample in range(samples)
    ]
    rows: dict[tuple[int, int, int], Rollout] = {}
    while turns:
        completions = backend.complete([turn.request() for turn in turns])
        pairs = list(zip(turns, completions, strict=True))
        rows.update((turn.place, turn.row(completion)) for turn, completion in pairs)
        turns = []
        if dialogue:
            later = (turn.next(completion, dialogue) for turn, completion in pairs)
            turns = [turn for turn in later if turn]
    return [rows[place] for place in sorted(rows)]


def turns_asked(prompts: Sequence[Prompt], samples: int) -> int:
    """Completions if every conversation is held to its end."""
    return samples * sum(1 + len(prompt.follow_ups) for prompt in prompts)
