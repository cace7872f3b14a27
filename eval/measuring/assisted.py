"""The outside baseline: transformers' own assisted generation, observed but not changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from eval.rounds import Generation, Round
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.probability import SamplingConfig


class _Observer:
    """Notes, at each forward of the target, the committed length and what was drafted."""

    def __init__(self, prompt: int) -> None:
        self.committed: list[int] = []
        self.drafted: list[int] = []
        self.forwards: list[int] = []
        self.read: list[Tensor] = []
        self._draft_forwards = 0
        self._prompt = prompt

    def on_target(self, _module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        # All but the last committed token are in the cache, except before the first forward.
        cached = int(kwargs["past_key_values"].get_seq_length())
        committed = cached + 1 if self.committed else self._prompt
        self.drafted.append(cached + kwargs["input_ids"].shape[1] - committed)
        self.read.append(kwargs["input_ids"])
        self.committed.append(committed)
        self.forwards.append(self._draft_forwards)
        self._draft_forwards = 0

    def on_draft(self, _module: torch.nn.Module, _args: Any, _kwargs: dict[str, Any]) -> None:
        self._draft_forwards += 1

    def drafted_at(self, place: int) -> int | None:
        """The token that the last round drafted there, if it drafted so many.

        An end token of the target's own never equals it: it would be drawn from a residual in which
        what was rejected has no probability.
        """
        read, drafted = self.read[-1], self.drafted[-1]
        return int(read[0, read.shape[1] - drafted + place]) if place < drafted else None

    def rounds(self, total: int, over: bool) -> tuple[Round, ...]:
        """One record a forward; the share of draft and target in the time is not known."""
        ends = [*self.committed[1:], total]
        records = []
        for start, end, drafted, forwards, read in zip(
            self.committed, ends, self.drafted, self.forwards, self.read, strict=True
        ):
            emitted = end - start
            # An accepted end token leaves no room for the bonus token.
            accepted = min(drafted, emitted if over and end == total else emitted - 1)
            tokens = tuple(read[0, read.shape[1] - drafted :].tolist())
            records.append(
                Round(drafted, drafted, accepted, emitted, forwards, 0.0, 0.0, 0.0, tokens)
            )
        return tuple(records)


@contextmanager
def _observed(
    target: PreTrainedModel, draft: PreTrainedModel, observer: _Observer
) -> Iterator[None]:
    hooks = [
        target.register_forward_pre_hook(observer.on_target, with_kwargs=True),
        draft.register_forward_pre_hook(observer.on_draft, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _assisting(draft: PreTrainedModel, length: int, threshold: float) -> Iterator[None]:
    """The draft's own generation configuration decides how it drafts."""
    before = draft.generation_config
    config = GenerationConfig(**before.to_diff_dict())
    config.num_assistant_tokens = length
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = threshold
    draft.generation_config = config
    try:
        yield
    finally:
        draft.generation_config = before


def check_same_size(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise ConfigError where transformers would take padding for another tokenizer."""
    sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "transformers' assisted generation needs equal vocabulary sizes, target and draft have "
            f"{sizes[0]} and {sizes[1]} (padding): leave methods with decoder assisted out"
        )


def assisted_generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    length: int,
    sampling: SamplingConfig,
    max_new_tokens: int,
    seed: int,
    threshold: float = 0.0,
) -> Generation:
    """`generate(assistant_model=...)` with a constant limit on drafted tokens.

    Where scikit-learn is installed, transformers itself moves the threshold during a call.

    Args:
        target: the target.
        draft: the draft; its generation configuration is restored afterwards.
        prompt_ids: (T,) int64.
        length: drafted tokens a round, at most.
        sampling: the distribution of both models.
        max_new_tokens: budget.
        seed: of torch's global generator, which `generate` draws from; restored afterwards.
        threshold: `assistant_confidence_threshold`: a draft ends with the first token to which the
            draft gave less probability; 0 always drafts `length` tokens.
    """
    check_same_size(target, draft)
    observer = _Observer(len(prompt_ids))
    # A configuration of our own: the model's may hold penalties that no other method applies.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=target.generation_config.eos_token_id,
        pad_token_id=target.generation_config.pad_token_id,
        bos_token_id=target.generation_config.bos_token_id,
        do_sample=sampling.temperature > 0.0,
        **(asdict(sampling) if sampling.temperature > 0.0 else {}),
    )
    ids = prompt_ids.unsqueeze(0).to(target.device)
    devices = [target.device] if target.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        _assisting(draft, length, threshold),
        _observed(target, draft, observer),
    ):
        torch.manual_seed(seed)
        begun = time.perf_counter()
        sequence = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            generation_config=config,
        )[0]
        if sequence.device.type == "cuda":
            torch.cuda.synchronize(sequence.device)
        seconds = time.perf_counter() - begun
    tokens = sequence[len(prompt_ids) :].cpu()
    ended = int(tokens[-1]) in end_ids(target)
    last = len(sequence) - observer.committed[-1]
    rounds = observer.rounds(
        len(sequence), over=ended and observer.drafted_at(last - 1) == tokens[-1]
    )
    return Generation(tokens, rounds, "eos" if ended else "length", seconds)
