"""Stage 1b: what one draft would have proposed along the target's text, and how it would fare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdata.models import known_ids
from specdata.probability import (
    SamplingConfig,
    accept_probability,
    inverse_cdf,
    overlap,
    probabilities,
    to_vocabulary,
)
from specdata.schema import LABELS, Label, Rollout
from specdata.seeds import generator_for
from specdata.tables import fill_table

# Positions whose laws over the vocabulary are held at once.
CHUNK = 256


def make_labels(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rollouts: datasets.Dataset,
    folder: Path,
    *,
    sampling: SamplingConfig,
    seed: int,
    shard_size: int,
    settings: Mapping[str, Any],
    report: Callable[[int], object],
) -> int:
    """Label every position of every rollout, under the sampler that serving will use.

    One teacher-forced pass of each model a rollout; see `fill_table` for resume and errors.

    Returns:
        Number of labelled rollouts.
    """
    shards = [
        partial(_label_rows, target, draft, rollouts, start, shard_size, sampling, seed)
        for start in range(0, len(rollouts), shard_size)
    ]
    return fill_table(folder, LABELS, settings, shards, report)


def _label_rows(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rollouts: datasets.Dataset,
    start: int,
    count: int,
    sampling: SamplingConfig,
    seed: int,
) -> list[Label]:
    rows: list[Rollout] = rollouts.select(range(start, min(start + count, len(rollouts)))).to_list()
    return [label(target, draft, row, sampling, seed) for row in rows]


@torch.inference_mode()
def label(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    row: Rollout,
    sampling: SamplingConfig,
    seed: int,
) -> Label:
    """Label one rollout: Y_i ~ q(. | prompt, X_<i) and min(1, p(Y_i)/q(Y_i)) at each position i.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 4.1. Memory grows with `CHUNK` x V, not
    with the length times V, beyond the logits of one forward.
    """
    length = len(row["completion_ids"])
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
    # Position t of a forward predicts token t + 1, so these rows are the laws of X_1 .. X_n.
    logits = [
        model(input_ids=known_ids(ids[:, :-1], model), logits_to_keep=length).logits[0, -length:]
        for model in (target, draft)
    ]
    logits[1] = to_vocabulary(logits[1], logits[0].shape[-1])
    generator = generator_for(seed, "label", row["example_id"], row["sample"])
    uniforms = torch.rand(length, generator=generator, dtype=torch.float64).to(target.device)
    columns: dict[str, list[Tensor]] = {name: [] for name in LABELS.names[-5:]}
    for begin in range(0, length, CHUNK):
        here = slice(begin, begin + CHUNK)
        p, q = (probabilities(part[here], sampling) for part in logits)
        drafted = inverse_cdf(q, uniforms[here])
        at = drafted.unsqueeze(-1)
        p_at, q_at = p.gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
        columns["draft_ids"].append(drafted)
        columns["accept_prob"].append(accept_probability(p_at, q_at))
        # A drafted token that the target gives 0 has log p = -inf; parquet stores it as such.
        columns["log_p"].append(p_at.log())
        columns["log_q"].append(q_at.log())
        columns["overlap"].append(overlap(p, q))
    lists = {name: torch.cat(parts).tolist() for name, parts in columns.items()}
    return cast(Label, {**row, **lists})


def mean_of(rows: Sequence[Sequence[float]]) -> float:
    """Mean over all positions of all rows."""
    return sum(map(sum, rows)) / max(1, sum(map(len, rows)))
