"""The bias of a verifier that is not lossless: how far it moves the distribution of a token.

A biased verifier is judged in the positions that it decoded: at each of them the total variation
between the distribution of the emitted token and the target's, given the tokens before it, which
the verifier declares (`VerifierSpec.bias_at`). Over a sequence these distances add up at most. It
is measured apart from decoding, untimed: the finished sequence is scored once more by both models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdata.sampling import SamplingConfig
from specdata.texts import along_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.rounds import Generation


def measure_bias(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    bias_at: Callable[[Tensor, Tensor], float],
    sampling: SamplingConfig,
    prompt_ids: Sequence[int],
    out: Generation,
) -> float:
    """Total variation at the positions of one generation of chains, summed over its tokens.

    `bias_at` is that of the verifier that decoded it, of p and q (V,) at a drafted position.
    """

    def variations(p: Tensor, q: Tensor, *_: object) -> dict[str, Tensor]:
        values = [bias_at(p_row, q_row) for p_row, q_row in zip(p, q, strict=True)]
        return {"variation": torch.tensor(values, dtype=torch.float64)}

    # The token after a whole accepted chain stood at no drafted position: it is the target's own.
    drafted = [place < each.drafted for each in out.rounds for place in range(each.emitted)]
    text = {"prompt_ids": prompt_ids, "completion_ids": out.tokens.tolist()}
    (columns,) = along_pair((target, draft), [text], sampling, variations)
    return float(columns["variation"] @ torch.tensor(drafted).double())
