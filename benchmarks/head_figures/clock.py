"""The same rules by the clock: decoding with the project's decoder, in turns on each prompt.

The clock is that of the processor, one thread: what else runs on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.drafting.stopping import StoppingRule
from eval.measuring.intervals import Interval, resamples
from specdata.models import load_model
from specdata.sampling import generator_for

if TYPE_CHECKING:
    from benchmarks.head_figures.data import Data
    from heads import BaseHead

ENGINE = "captured"
WARM_UP = 2


def clocked(
    data: Data,
    head: BaseHead,
    rules: Mapping[str, StoppingRule],
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Decode every prompt with every rule.

    Args:
        data: names the pair.
        head: for the rules that read one.
        rules: name -> rule; the first is what the others are compared with.
        prompts: (id, token ids).
        max_new_tokens: of each generation.
        repeats: seeds of each prompt.

    Returns:
        For each rule its setting, its tokens a second and a round, and the share of time saved
        against the first, with intervals over prompts.
    """
    target = load_model(data.target, dtype="float32")
    decoders = {
        name: SpeculativeDecoder.from_config(
            target, data.draft, DecodeConfig(stop=rule), head, engine=ENGINE
        )
        for name, rule in rules.items()
    }
    for decoder in decoders.values():
        decoder.warm_up()  # or drafts of a new length would be traced while the clock runs
    sums = {name: np.zeros((len(prompts), 3)) for name in rules}  # seconds, tokens, rounds
    order = list(decoders)
    for repeat in range(-1, repeats):  # the first time unmeasured
        for index, (key, ids) in enumerate(prompts if repeat >= 0 else prompts[:WARM_UP]):
            order = [*order[1:], order[0]]
            for name in order:
                begun = time.process_time()
                made = decoders[name].generate(
                    torch.tensor(ids),
                    max_new_tokens=max_new_tokens,
                    generator=generator_for(0, key, repeat),
                )
                seconds = time.process_time() - begun
                if repeat >= 0:
                    sums[name][index] += seconds, len(made.tokens), len(made.rounds)
    first = next(iter(rules))
    return {
        name: {
            "setting": rules[name].reported(),
            "tokens_per_second": float(total[1] / total[0]),
            "tokens_per_round": float(total[1] / total[2]),
            "saving": _saved(table, sums[first]),
        }
        for name, table in sums.items()
        for total in (table.sum(axis=0),)
    }


def _saved(table: Any, base: Any) -> dict[str, float]:
    """The share of the base's seconds a token that is saved: each (prompts, 3)."""
    drawn = resamples(len(table))
    ours, theirs = drawn @ table, drawn @ base
    saved = 1.0 - (ours[:, 0] / ours[:, 1]) / (theirs[:, 0] / theirs[:, 1])
    low, high = np.quantile(saved[1:], (0.025, 0.975))
    interval = Interval(float(saved[0]), float(low), float(high))
    return {"value": interval.value, "low": interval.low, "high": interval.high}
