"""Drafts in the project's decoder: what a drafted token costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.distill_figures.data import Data
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.runtime.engines import Engine
from specdata.models import load_model
from specdata.sampling import generator_for

if TYPE_CHECKING:
    pass

ENGINE: Engine = "captured"
TIMED_LENGTH = 4


def draft_costs(
    data: Data,
    drafts: Mapping[str, Path],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
) -> dict[str, dict[str, float]]:
    """The cost of a token of each draft against one of the first draft, by the clock.

    The drafts take turns on every prompt, and medians over rounds are compared, so that whatever
    else the machine does matters little. The target's forward takes many times as long and is
    interrupted more often, so it is not compared with.

    Args:
        data: names the pair.
        drafts: name -> folder.
        prompts: token ids.
        max_new_tokens: of each generation.

    Returns:
        Name -> `draft_seconds`, and `relative`, the quotient with the first draft's.
    """
    target = load_model(str(data.target), dtype="float32")
    decoders = {
        name: SpeculativeDecoder.from_config(
            target,
            load_model(str(folder), dtype="float32"),
            DecodeConfig(length=TIMED_LENGTH),
            engine=ENGINE,
        )
        for name, folder in drafts.items()
    }
    rounds: dict[str, list[Any]] = {name: [] for name in drafts}
    for decoder in decoders.values():
        decoder.warm_up()
    for number, ids in enumerate(prompts):
        for name, decoder in decoders.items():
            made = decoder.generate(
                torch.tensor(ids),
                max_new_tokens=max_new_tokens,
                generator=generator_for(0, "cost", number),
            )
            rounds[name] += [each for each in made.rounds if each.drafted == TIMED_LENGTH]
    seconds = {
        name: _median([each.draft_seconds for each in own]) / TIMED_LENGTH
        for name, own in rounds.items()
    }
    first = next(iter(seconds.values()))
    return {
        name: {"draft_seconds": each, "relative": each / first} for name, each in seconds.items()
    }


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
