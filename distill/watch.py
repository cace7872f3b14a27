"""What is measured of a draft while it trains, on rollouts that are not trained on."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from specdata.models import known_ids
from specdata.probability import overlap, probabilities, to_vocabulary
from specdata.sampling import SamplingConfig


@torch.inference_mode()
def mean_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, rollouts: Dataset, sampling: SamplingConfig
) -> float:
    """Mean of sum_x min(p, q) over all completion positions, both distributions as in serving."""
    total = 0.0
    for row in rollouts:
        length = len(row["completion_ids"])
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
        # Position t predicts token t + 1: the last position predicts beyond the completion.
        p_logits, q_logits = (
            model(input_ids=known_ids(ids[:, :-1], model), logits_to_keep=length).logits[0]
            for model in (target, draft)
        )
        q_logits = to_vocabulary(q_logits, p_logits.shape[-1])
        p, q = probabilities(p_logits, sampling), probabilities(q_logits, sampling)
        total += overlap(p, q).sum().item()
    return total / positions(rollouts)


def positions(rollouts: Dataset) -> int:
    """Completion tokens of rollouts."""
    return sum(map(len, rollouts["completion_ids"]))
