"""What is recorded of the places of a rollout, for replay: outcomes and who foresaw them.

The coins of a labelled rollout are thrown once, from the seed, with the stored min(1, p/q).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from heads import AcceptanceHead
from specdata.models import known_ids
from specdata.seeds import generator_for


@dataclass(slots=True)
class AcceptanceTrace:
    """What is recorded of one rollout, a value for each place.

    Args:
        accepted: whether the draft's token was accepted.
        accept: its acceptance probability, what a perfect head would say.
        chance: the draft's probability of it.
        q_max: the largest probability of its distribution.
        head: what the acceptance head says; empty without a head.
    """

    accepted: list[bool]
    accept: list[float]
    chance: list[float]
    q_max: list[float]
    head: list[float] = field(default_factory=list)


@torch.inference_mode()
def head_probabilities(
    draft: PreTrainedModel, head: AcceptanceHead, row: dict[str, Any]
) -> list[float]:
    """The head's acceptance probability of each Y_i, after the draft consumed X_<i and Y_i."""
    known = row["prompt_ids"] + row["completion_ids"]
    first = len(row["prompt_ids"])
    ids = torch.tensor([known[:-1]], device=draft.device)
    cache = draft.base_model(input_ids=known_ids(ids, draft), use_cache=True).past_key_values
    says = []
    # From the end, so that cropping the cache is all there is between two places.
    for place in reversed(range(len(row["draft_ids"]))):
        if (surplus := cache.get_seq_length() - first - place) > 0:
            cache.crop(-surplus)
        token = torch.tensor([[row["draft_ids"][place]]], device=draft.device)
        output = draft.base_model(
            input_ids=known_ids(token, draft), past_key_values=cache, use_cache=True
        )
        says.append(float(head.probability(output.last_hidden_state[0, -1])))
    return says[::-1]


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    seed: int,
    draft: PreTrainedModel | None = None,
    head: AcceptanceHead | None = None,
) -> list[AcceptanceTrace]:
    """Throw the coins, and let the head judge each place."""
    made = []
    for row in tqdm(rows, desc="rollouts", unit="rollout", file=sys.stderr):
        generator = generator_for(seed, "replay", row["example_id"], row["sample"])
        accept = torch.tensor(row["accept_prob"], dtype=torch.float64)
        coins = torch.rand(len(accept), generator=generator, dtype=torch.float64)
        one = AcceptanceTrace(
            (coins < accept).tolist(),
            accept.tolist(),
            np.exp(row["log_q"]).tolist(),
            np.exp(row["log_q_max"]).tolist(),
        )
        if draft is not None and head is not None:
            one.head = head_probabilities(draft, head, row)
        made.append(one)
    return made
