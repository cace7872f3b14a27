"""The outside baseline: transformers' own generation, alone and assisted, only observed."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.rounds import Generation, Round
from eval.runtime.transformers_models import check_assisted
from specdata.cache import NAMES, counts_tokens
from specdata.errors import ConfigError
from specdata.generation import plain_generation
from specdata.models import end_ids, positions
from specdata.probability import SamplingConfig
from specdata.sampling import seed_for


class _Observer:
    """Hooks that note, at each forward of the target, the committed length and what was drafted."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.count = 0
        self.committed: list[int] = []
        self.drafted: list[int] = []
        self.forwards: list[int] = []
        self.draft_forwards = 0

    def on_target(self, _module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        # All but the last committed token are in the cache, except before the first forward. One
        # of recurrent states alone does not say how many, and drops none.
        cache: Any = next((kwargs[name] for name in NAMES if name in kwargs), None)
        counted = cache is None or not counts_tokens(cache)
        cached = self.count if counted else int(cache.get_seq_length())
        self.read: Tensor = kwargs["input_ids"]
        self.count += self.read.shape[1]
        self.committed.append(cached + 1 if self.committed else self.prompt)
        self.drafted.append(cached + self.read.shape[1] - self.committed[-1])
        self.forwards.append(self.draft_forwards)
        self.draft_forwards = 0

    def on_draft(self, _module: torch.nn.Module, _args: Any, _kwargs: dict[str, Any]) -> None:
        self.draft_forwards += 1

    def rounds(self, sequence: Tensor, *, ended: bool) -> tuple[Round, ...]:
        """One record a forward; the share of draft and target in the time is not known.

        The sequence is (T + n,), prompt and new tokens; `ended` if the last is an end token.
        """
        emitted = np.diff([*self.committed, len(sequence)]).tolist()
        # All but the bonus token were accepted.
        accepted = [min(each) for each in zip(self.drafted, (n - 1 for n in emitted), strict=True)]
        last, place = self.read[0, self.read.shape[1] - self.drafted[-1] :], emitted[-1] - 1
        # An accepted end token leaves no room for one. An end token of the target's own never
        # equals the drafted one: it is drawn from a residual without what was rejected.
        if ended and place < len(last) and last[place] == sequence[-1]:
            accepted[-1] += 1
        records = zip(self.drafted, accepted, emitted, self.forwards, strict=True)
        return tuple(
            Round(drafted, drafted, accepted, emitted, forwards, 0.0, 0.0, 0.0)
            for drafted, accepted, emitted, forwards in records
        )


def assisted_generate(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompt_ids: Tensor,
    *,
    length: int,
    sampling: SamplingConfig,
    max_new_tokens: int,
    seed: int,
    threshold: float = 0.0,
    lookup: int = 0,
) -> Generation:
    """`generate(assistant_model=...)` with a constant limit, `length`, on drafted tokens.

    Without a draft the target decodes alone, or proposes `lookup` tokens that follow in the text
    what was written last (`prompt_lookup_num_tokens`). Both generation configurations, and torch's
    global generator, which `generate` draws from, are restored afterwards. A draft ends with the
    first token to which it gave less probability than the threshold
    (`assistant_confidence_threshold`), which transformers itself moves during a call where
    scikit-learn is installed; 0 always drafts `length` tokens. Where the draft has no positions
    left, the target goes on alone.
    """
    readable = sys.maxsize if draft is None else positions(draft.config) + 1 - len(prompt_ids)
    if readable < max_new_tokens:
        one = partial(assisted_generate, target, length=length, sampling=sampling)
        if readable < 1:
            return one(None, prompt_ids, max_new_tokens=max_new_tokens, seed=seed)
        first = one(draft, prompt_ids, max_new_tokens=readable, seed=seed, threshold=threshold)
        if first.finish == "eos":
            return first
        text, left = torch.cat([prompt_ids, first.tokens]), max_new_tokens - readable
        rest = one(None, text, max_new_tokens=left, seed=seed_for(seed, "alone"))
        tokens, rounds = torch.cat([first.tokens, rest.tokens]), (*first.rounds, *rest.rounds)
        return Generation(tokens, rounds, rest.finish, first.seconds + rest.seconds)
    if draft is not None or lookup:
        check_assisted(target)
    models = [target] if draft is None else [target, draft]
    sizes = [model.config.get_text_config().vocab_size for model in models]
    if sizes[0] != sizes[-1]:  # transformers would take padding for another tokenizer
        raise ConfigError(
            "transformers' assisted generation needs equal vocabulary sizes, target and draft have "
            f"{sizes[0]} and {sizes[1]} (padding): leave methods with decoder assisted out"
        )
    observer = _Observer(len(prompt_ids))
    ids = prompt_ids.unsqueeze(0).to(target.device)
    devices = [target.device] if target.device.type == "cuda" else []
    with ExitStack() as closing:
        settings = plain_generation(
            target,
            sampling,
            max_new_tokens=max_new_tokens,
            prompt_lookup_num_tokens=lookup or None,
        )
        config = closing.enter_context(settings)
        hooks = [target.register_forward_pre_hook(observer.on_target, with_kwargs=True)]
        if draft is not None:
            # The draft's own generation configuration decides how it drafts.
            drafts = plain_generation(
                draft,
                sampling,
                num_assistant_tokens=length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=threshold,
            )
            closing.enter_context(drafts)
            hooks.append(draft.register_forward_pre_hook(observer.on_draft, with_kwargs=True))
        for hook in hooks:
            closing.callback(hook.remove)
        closing.enter_context(torch.random.fork_rng(devices))
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
    ended = int(tokens[-1]) in end_ids(target.generation_config)
    rounds = observer.rounds(sequence, ended=ended)
    return Generation(tokens, rounds, "eos" if ended else "length", seconds)
