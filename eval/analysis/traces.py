"""Acceptance traces of labelled rollouts, for replay: what was accepted, and how well predicted.

Whether a token is accepted is drawn once for each rollout, from the seed, with the stored
probability min(1, p/q); every rule that is replayed meets the same outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from heads import AcceptanceHead
from heads.inputs import HeadInputs, logits_of_states
from specdata.lm_head import hidden_states
from specdata.seeds import generator_for
from specdata.terminal import progress


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
    """The head's acceptance probability of each drafted token Y_i of a labelled rollout.

    Y_i follows the rollout's own tokens X_<i, as in the labels.

    Args:
        draft: the draft that the head was trained for.
        head: the acceptance head.
        row: a labelled rollout.

    Returns:
        n probabilities.
    """
    known = row["prompt_ids"] + row["completion_ids"]
    first = len(row["prompt_ids"])
    ids = torch.tensor([known[:-1]], device=draft.device)
    cache = DynamicCache(config=draft.config)
    before = hidden_states(draft, ids, past_key_values=cache)[:, first - 1 :]
    drafted = torch.tensor([row["draft_ids"]], device=draft.device)
    after = []
    # From the end, so that cropping the cache is all there is between two positions.
    for position in reversed(range(drafted.shape[1])):
        if (surplus := cache.get_seq_length() - first - position) > 0:
            cache.crop(-surplus)
        token = drafted[:, position : position + 1]
        after.append(hidden_states(draft, token, past_key_values=cache)[0])
    # One row a drafted token: the token before it, and the drafted one.
    inputs = HeadInputs.from_batch(
        head.reads,
        input_ids=torch.stack([ids[0, first - 1 :], drafted[0]], dim=1),
        states=torch.stack([before[0], torch.cat(after[::-1])], dim=1),
        logits=logits_of_states(draft),
        sampling=head.sampling_config,
    )
    accepted: list[float] = head.probability(inputs)[:, 1].tolist()
    return accepted


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
    return [_trace(row, seed, draft, head) for row in _counted(rows)]


def _counted(rows: datasets.Dataset) -> Iterator[dict[str, Any]]:
    with progress(len(rows), "rollouts", "rollout") as bar:
        for row in rows:
            yield row
            bar.update()


def _trace(
    row: dict[str, Any], seed: int, draft: PreTrainedModel | None, head: AcceptanceHead | None
) -> AcceptanceTrace:
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
    return trace
