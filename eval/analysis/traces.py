"""What stopping rules would have read along labelled rollouts, and how the drafted tokens fare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eval.analysis.expectation import Traces
from eval.drafting.stopping.recorded import RecordedTokens, pad
from heads import AcceptanceHead
from heads.inputs import HeadInputs, logits_of_states
from specdata.lm_head import hidden_states
from specdata.probability import SamplingConfig, entropy, probabilities
from specdata.terminal import progress


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    draft: PreTrainedModel | None = None,
    sampling: SamplingConfig | None = None,
    head: AcceptanceHead | None = None,
) -> Traces:
    """The traces of labelled rollouts.

    Args:
        rows: labels, at least one.
        draft: the draft that made them; without it entropies and a head are not recorded.
        sampling: how its tokens were drawn; needed with a draft.
        head: an acceptance head of this draft, whose outputs are recorded.
    """
    entropies, logits = list[list[float]](), list[list[float]]()
    if draft is not None:
        assert sampling is not None
        for row in _counted(rows):
            states = _StatesOfRow.of(draft, row)
            entropies.append(states.entropy(draft, sampling))
            if head is not None:
                logits.append(states.head_logits(draft, head))
    tokens = RecordedTokens(
        lengths=np.array([len(row) for row in rows["draft_ids"]], dtype=np.int64),
        q=np.exp(pad(rows["log_q"])),
        q_max=np.exp(pad(rows["log_q_max"])).clip(max=1.0),
        entropy=pad(entropies) if entropies else None,
        head_logits=pad(logits) if logits else None,
        rejection_weight=head.rejection_weight if head is not None else 1.0,
    )
    return Traces(tokens, pad(rows["accept_prob"]))


class _StatesOfRow:
    """The draft's last hidden states before and after each drafted token Y_i of a rollout.

    Y_i follows the rollout's own tokens X_<i, as in the labels.

    Attributes:
        known: (n,) the token before each drafted one.
        drafted: (n,) the drafted tokens.
        before: (n, H) the state that Y_i was drawn from.
        after: (n, H) the state once the draft consumed Y_i.
    """

    def __init__(self, known: Tensor, drafted: Tensor, before: Tensor, after: Tensor) -> None:
        self.known, self.drafted = known, drafted
        self.before, self.after = before, after

    @classmethod
    @torch.inference_mode()
    def of(cls, draft: PreTrainedModel, row: dict[str, Any]) -> _StatesOfRow:
        """Run the draft over a labelled rollout."""
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
        return cls(ids[0, first - 1 :], drafted[0], before, torch.cat(after[::-1]))

    @torch.inference_mode()
    def entropy(self, draft: PreTrainedModel, sampling: SamplingConfig) -> list[float]:
        """Of the distribution that each token was drawn from, in nats."""
        q = probabilities(logits_of_states(draft)(self.before), sampling)
        values: list[float] = entropy(q).tolist()
        return values

    @torch.inference_mode()
    def head_logits(self, draft: PreTrainedModel, head: AcceptanceHead) -> list[float]:
        """The raw logit that a head gives each drafted token."""
        # One row a drafted token: the token before it, and the drafted one.
        inputs = HeadInputs.from_batch(
            head.reads,
            input_ids=torch.stack([self.known, self.drafted], dim=1),
            states=torch.stack([self.before, self.after], dim=1),
            logits=logits_of_states(draft),
            sampling=head.sampling_config,
        )
        values: list[float] = head.logits(inputs)[:, 1].tolist()
        return values


def _counted(rows: datasets.Dataset) -> Iterator[dict[str, Any]]:
    with progress(len(rows), "held-out rollouts", "rollout") as bar:
        for row in rows:
            yield row
            bar.update()
