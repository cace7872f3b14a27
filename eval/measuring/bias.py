"""The bias of a verifier that is not lossless: how far it moves the distribution of a token.

A biased verifier is judged in the positions that it decoded: at each of them the total variation
between the distribution of the emitted token and the target's, given the tokens before it. Over a
sequence these distances add up at most. It is measured apart from decoding, untimed: the finished
sequence is scored once more by both models, and the verifier is enumerated, not sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eval.drafts import DraftTree
from specdata.sampling import SamplingConfig
from specdata.texts import along_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.rounds import Generation, Round
    from eval.verifiers.rule import Verifier

POSITIONS = 16
"""Most positions of one generation at which the verifier is enumerated, evenly spaced: each takes
0.1 to 0.5 s on a CPU core, with 2048 to 128,000 tokens of vocabulary."""
TAIL = 1e-4
"""Draft probability that is not enumerated; it changes a total variation by at most as much."""


def emitted_distribution(
    verifier: Verifier, target: Tensor, draft: Tensor, *, tail: float = 0.0
) -> Tensor:
    """The distribution of the token emitted at one position, over the draws of draft and verifier.

    Every token that the draft may propose there is enumerated, and every outcome of the verifier.
    Exact for rules that decide position by position (`eval.verifiers.rule.walk`); for one that
    sees the whole draft it holds for drafts of one token.

    Args:
        verifier: takes chains.
        target: (V,) p, the target's distribution at this position.
        draft: (V,) q, the distribution that the drafted token comes from.
        tail: the least likely drafted tokens, of at most this probability together, count as if
            the verifier emitted a token of p for them.

    Returns:
        (V,) float64.
    """
    rows = target.expand(2, -1)
    emitted = torch.zeros(target.shape, dtype=torch.float64)
    order = draft.sort(descending=True, stable=True)
    cumulative = order.values.double().cumsum(0)
    root = torch.zeros(1, dtype=torch.int64)
    for rank, token in enumerate(order.indices.tolist()):
        chance = float(draft[token])
        before = float(cumulative[rank - 1]) if rank else 0.0
        if chance == 0.0 or before >= 1.0 - tail:
            break
        tree = DraftTree(torch.tensor([token]), root, draft.unsqueeze(0), root, "chain")
        for weight, end in verifier.outcomes(tree, rows):
            if end.node:
                emitted[token] += chance * weight
            else:
                emitted += chance * weight * end.distribution.double().cpu()
    return emitted + (1.0 - emitted.sum()).clamp(min=0.0) * target.double().cpu()


def variation(verifier: Verifier, target: Tensor, draft: Tensor, *, tail: float = 0.0) -> float:
    """Total variation between the emitted token's distribution and p, in [0, 1].

    Arguments as in `emitted_distribution`: `target` and `draft` are (V,).
    """
    emitted = emitted_distribution(verifier, target, draft, tail=tail)
    return 0.5 * float((emitted - target.double().cpu()).abs().sum())


def drafted_positions(rounds: Sequence[Round]) -> list[bool]:
    """True if each emitted token stood at a drafted position, for chains.

    The bonus token after a whole accepted chain did not: it is drawn from the target itself.
    """
    return [place < record.drafted for record in rounds for place in range(record.emitted)]


def measure_bias(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    verifier: Verifier,
    sampling: SamplingConfig,
    prompt_ids: Tensor,
    out: Generation,
) -> tuple[float, int]:
    """Total variation at the positions of one generation of chains.

    Args:
        target: the target.
        draft: the draft.
        verifier: the acceptance rule that decoded it.
        sampling: the distribution of both models.
        prompt_ids: (T,) int64.
        out: what was decoded.

    Returns:
        The sum over at most `POSITIONS` emitted tokens, evenly spaced, and how many they are.
    """
    drafted = drafted_positions(out.rounds)
    count = min(POSITIONS, len(drafted))
    places = [index * len(drafted) // count for index in range(count)]
    text = {"prompt_ids": prompt_ids.tolist(), "completion_ids": out.tokens.tolist()}
    (laws,) = along_pair(
        (target, draft),
        [text],
        sampling,
        lambda p, q, *_: {"p": p, "q": q},
        places=[torch.tensor(places)],
    )
    total = sum(
        variation(verifier, p, q, tail=TAIL)
        for place, p, q in zip(places, laws["p"], laws["q"], strict=True)
        if drafted[place]
    )
    return total, count
