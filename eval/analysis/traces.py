"""What stopping rules would have read along labelled rollouts, and how the drafted tokens fare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eval.analysis.expectation import Traces
from eval.drafting.stopping.recorded import RecordedTokens, pad
from heads import BaseHead
from heads.inputs import HeadInputs, logits_of_states
from heads.probe import check_head, warn_of_other_sampling
from specdata.lm_head import LMHead, find_lm_head, hidden_states
from specdata.probability import SamplingConfig, entropy, probabilities
from specdata.terminal import progress


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    draft: PreTrainedModel | None = None,
    sampling: SamplingConfig | None = None,
    head: BaseHead | None = None,
) -> Traces:
    """The traces of labelled rollouts.

    Args:
        rows: labels, at least one.
        draft: the draft that made them; without it entropies and a head are not recorded.
        sampling: how its tokens were drawn; needed with a draft.
        head: an acceptance head of this draft, whose outputs are recorded.

    Raises:
        ConfigError: if the head is of another draft.
    """
    entropies, logits = list[list[float]](), list[list[float]]()
    if draft is not None:
        assert sampling is not None
        if head is not None:
            check_head(draft, head)
            warn_of_other_sampling(head, sampling)
        # Found out once, not for each row: it is done by trying.
        lm_head, to_logits = find_lm_head(draft), logits_of_states(draft)
        for row in _counted(rows):
            entropies.append(_entropies(lm_head, row, sampling))
            if head is not None:
                logits.append(_head_logits(draft, head, to_logits, row))
    tokens = RecordedTokens(
        lengths=np.array([len(row) for row in rows["draft_ids"]], dtype=np.int64),
        q=np.exp(pad(rows["log_q"])),
        q_max=np.exp(pad(rows["log_q_max"])).clip(max=1.0),
        entropy=pad(entropies) if entropies else None,
        head_logits=pad(logits) if logits else None,
        rejection_weight=head.rejection_weight if head is not None else 1.0,
    )
    return Traces(tokens, pad(rows["accept_prob"]))


@torch.inference_mode()
def _entropies(lm_head: LMHead, row: dict[str, Any], sampling: SamplingConfig) -> list[float]:
    """Entropies in nats of the n distributions that a rollout's drafted tokens were drawn from."""
    known = row["prompt_ids"] + row["completion_ids"]
    ids = torch.tensor([known[:-1]], device=lm_head.model.device)
    states = lm_head.states(ids)[0, len(row["prompt_ids"]) - 1 :]
    values: list[float] = entropy(probabilities(lm_head.logits(states), sampling)).tolist()
    return values


@torch.inference_mode()
def _head_logits(
    draft: PreTrainedModel,
    head: BaseHead,
    to_logits: Callable[[Tensor], Tensor],
    row: dict[str, Any],
) -> list[float]:
    """The n raw logits that a head gives the drafted tokens Y_i of a labelled rollout.

    Y_i follows the rollout's own tokens X_<i, as in the labels.
    """
    known = row["prompt_ids"] + row["completion_ids"]
    first = len(row["prompt_ids"])
    ids = torch.tensor([known[:-1]], device=draft.device)
    cache = DynamicCache(config=draft.config)
    before = hidden_states(draft, ids, past_key_values=cache)[0, first - 1 :]
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
        states=torch.stack([before, torch.cat(after[::-1])], dim=1),
        logits=to_logits,
        sampling=head.sampling_config,
    )
    values: list[float] = head.logits(inputs)[:, 1].tolist()
    return values


def _counted(rows: datasets.Dataset) -> Iterator[dict[str, Any]]:
    with progress(len(rows), "held-out rollouts", "rollout") as bar:
        for row in rows:
            yield row
            bar.update()
