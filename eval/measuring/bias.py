"""The bias of a verifier that is not lossless: how far it moves the distribution of a token.

A biased verifier is judged in the positions that it decoded: at each of them the total variation
between the distribution of the emitted token and the target's, given the tokens before it, which
the verifier declares (`VerifierSpec.bias_at`). Over a sequence these distances add up at most. It
is measured apart from decoding, untimed: the finished sequence is scored once more by both models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdata.sampling import SamplingConfig
from specdata.texts import along_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.rounds import Generation

POSITIONS = 16
"""Most positions of one generation, evenly spaced, whose distributions are kept."""


def measure_bias(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    bias_at: Callable[[Tensor, Tensor], float],
    sampling: SamplingConfig,
    prompt_ids: Tensor,
    out: Generation,
) -> tuple[float, int]:
    """Total variation at the positions of one generation of chains.

    Args:
        target: the target.
        draft: the draft.
        bias_at: of p and q (V,) at a drafted position: the verifier's that decoded it.
        sampling: the distribution of both models.
        prompt_ids: (T,) int64.
        out: what was decoded.

    Returns:
        The sum over at most `POSITIONS` emitted tokens, evenly spaced, and how many they are.
    """
    # The token after a whole accepted chain stood at no drafted position: it is the target's own.
    drafted = [place < each.drafted for each in out.rounds for place in range(each.emitted)]
    count = min(POSITIONS, len(drafted))
    places = [index * len(drafted) // count for index in range(count)]
    text = {"prompt_ids": prompt_ids.tolist(), "completion_ids": out.tokens.tolist()}
    (laws,) = along_pair(
        (target, draft),
        [text],
        sampling,
        lambda p, q, *_: {"p": p.double(), "q": q.double()},
        places=[torch.tensor(places)],
    )
    total = sum(
        bias_at(p, q)
        for place, p, q in zip(places, laws["p"], laws["q"], strict=True)
        if drafted[place]
    )
    return total, count
