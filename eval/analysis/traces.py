"""Acceptance traces of labelled rollouts, for replay: what was accepted, and how well predicted.

Whether a token is accepted is drawn once for each rollout, from the seed, with the stored
probability min(1, p/q); every rule that is replayed meets the same outcomes.
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
    """Values at each of the n positions of one rollout.

    Args:
        accepted: whether the draft's token was accepted.
        accept_prob: its acceptance probability min(1, p/q), which a perfect head would predict.
        q: the draft's probability of it.
        q_max: the largest probability of the draft's distribution.
        head: acceptance probability predicted by the head; empty without a head.
    """

    accepted: list[bool]
    accept_prob: list[float]
    q: list[float]
    q_max: list[float]
    head: list[float] = field(default_factory=list)


@torch.inference_mode()
def head_probabilities(
    draft: PreTrainedModel, head: AcceptanceHead, row: dict[str, Any]
) -> list[float]:
    """The head's prediction for each drafted token Y_i, after the draft consumed X_<i and Y_i.

    Args:
        draft: the draft.
        head: an acceptance head of this draft.
        row: a row of labels.

    Returns:
        n probabilities.
    """
    known = row["prompt_ids"] + row["completion_ids"]
    first = len(row["prompt_ids"])
    ids = torch.tensor([known[:-1]], device=draft.device)
    cache = draft.base_model(input_ids=known_ids(ids, draft), use_cache=True).past_key_values
    predicted = []
    # From the end, so that the cache only has to be cropped between two positions.
    for position in reversed(range(len(row["draft_ids"]))):
        if (surplus := cache.get_seq_length() - first - position) > 0:
            cache.crop(-surplus)
        token = torch.tensor([[row["draft_ids"][position]]], device=draft.device)
        output = draft.base_model(
            input_ids=known_ids(token, draft), past_key_values=cache, use_cache=True
        )
        predicted.append(float(head.probability(output.last_hidden_state[0, -1])))
    return predicted[::-1]


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    seed: int,
    draft: PreTrainedModel | None = None,
    head: AcceptanceHead | None = None,
) -> list[AcceptanceTrace]:
    """The trace of every rollout.

    Args:
        rows: labels.
        seed: of the outcomes; each rollout has a generator of its own.
        draft: needed with `head` only.
        head: an acceptance head of this draft, whose predictions are recorded.
    """
    traces = []
    for row in tqdm(rows, desc="rollouts", unit="rollout", file=sys.stderr):
        generator = generator_for(seed, "replay", row["example_id"], row["sample"])
        accept_prob = torch.tensor(row["accept_prob"], dtype=torch.float64)
        uniforms = torch.rand(len(accept_prob), generator=generator, dtype=torch.float64)
        trace = AcceptanceTrace(
            (uniforms < accept_prob).tolist(),
            accept_prob.tolist(),
            np.exp(row["log_q"]).tolist(),
            np.exp(row["log_q_max"]).tolist(),
        )
        if draft is not None and head is not None:
            trace.head = head_probabilities(draft, head, row)
        traces.append(trace)
    return traces
