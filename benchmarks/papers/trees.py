"""The search for a draft tree (MCSD, arXiv:2401.06706, section 4.3), along held-out text.

A k-configuration k_1 x k_2 x ... gives every node at depth d - 1 k_d children. The search compares
all with k_d in {1, 2, 4, 8, 16, 32} that widen nowhere (the monotonic rule) and whose product, the
paths of the tree, is within a budget. None of them is decoded: the target's own text decides.

Let x be text that was sampled from p. Under recursive rejection the residual after any number of
rejections is (p - t q)+, normalised, for some t: 0 at first, and t + m(t)/z after a rejection,
where m(t) = sum_x (p - t q)+ and z is the mass of q that is still drawn from (1 with replacement,
`rrs`; without, `rrs_wor`, that of the tokens not yet drawn). What is left of the text's token after
k rejections is (p(x) - t q(x))+, so one of the first k candidates is accepted and is that token
with probability A_k = min(1, t q(x)/p(x)) given the text. With replacement that is exact. Without,
t depends on which tokens were drawn and rejected: they are drawn from norm((q - p)+), once a
position, by a seeded generator. At temperature 0 candidates are the draft's k likeliest tokens:
A_k is 1 where the text's token is among them, else 0.

A round that starts at some position accepts at least d tokens of the text with probability
v_d = A_{k_1} A_{k_2} ... A_{k_d}, each at its own position. Every lossless verifier continues as p
does from where it stands, so the next round starts d + 1 tokens on with probability
v_d - v_{d+1}, and the expected number of rounds of a text follows from left to right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.papers.tables import Record
from eval.measuring.intervals import Interval, resamples
from specdata.sampling import SamplingConfig, generator_for
from specdata.terminal import progress
from specdata.texts import TextBatch, pair_columns

Reals = NDArray[np.float64]
Siblings = Literal["iid", "distinct"]
WIDTHS = (1, 2, 4, 8, 16, 32)
DEEPEST = 8
"""Most levels of a tree."""
NOTHING = 1e-12
"""A mass that is only left by rounding."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of candidates along R rollouts of at most N tokens; 0 in the padding.

    Of each its prompt and its tokens (R,), and by k (R, N) A_k, the chance that one of k candidates
    is accepted and is the text's.
    """

    prompts: Sequence[str]
    lengths: NDArray[np.int64]
    of: Mapping[int, Reals]

    def rounds(self, widths: Sequence[int]) -> Reals:
        """(R,) rounds that each text takes in expectation."""
        reached = np.ones_like(self.of[1])
        prefix_acceptance = []  # v_d of a round that starts at each position
        for depth, width in enumerate(widths):
            later = np.zeros_like(reached)
            later[:, : max(0, later.shape[1] - depth)] = self.of[width][:, depth:]
            reached = reached * later
            prefix_acceptance.append(reached)
        return expected_rounds(np.stack(prefix_acceptance), self.lengths)


def k_configurations(budget: int, depth: int = DEEPEST) -> Iterator[tuple[int, ...]]:
    """Every k-configuration of `WIDTHS` that widens nowhere, of at most `budget` paths."""

    def continued(widths: tuple[int, ...], paths: int) -> Iterator[tuple[int, ...]]:
        if widths:
            yield widths
        if len(widths) < depth:
            for width in WIDTHS:
                if width <= (widths[-1] if widths else budget) and paths * width <= budget:
                    yield from continued((*widths, width), paths * width)

    yield from continued((), 1)


def expected_rounds(prefix_acceptance: Reals, lengths: NDArray[np.int64]) -> Reals:
    """(R,) rounds that texts take in expectation.

    Of (D, R, N) v_d of rounds that start at each position, and (R,) tokens of each text; those that
    are accepted beyond it end it.
    """
    depth, rollouts, width = prefix_acceptance.shape
    reached = np.concatenate([np.ones((1, rollouts, width)), prefix_acceptance])
    # Of a round at a position: that it accepts d tokens and no more, d = 0 .. D.
    ends = reached - np.concatenate([prefix_acceptance, np.zeros((1, rollouts, width))])
    starts = np.zeros((rollouts, width + depth + 1))  # the chance that a round starts here
    starts[:, 0] = 1.0
    for position in range(width):
        starts[:, position] *= position < lengths
        begins = starts[:, position]
        starts[:, position + 1 : position + depth + 2] += begins[:, None] * ends[:, :, position].T
    return np.asarray(starts[:, :width].sum(axis=1))


def scales(p: Tensor, q: Tensor, uniforms: Tensor | None, most: int) -> Tensor:
    """The t of the residual (p - t q)+ after k = 1 .. `most` candidates: (C, most), rising.

    Of (C, V) p and q, float64; (C, most - 1) uniforms in [0, 1) draw the candidates that are
    rejected without replacement, None is for candidates drawn with replacement.
    """
    remaining, t = q.clone(), torch.zeros_like(q[:, :1])
    scales_of = []
    for k in range(most):
        residual = (p - t * q).clamp(min=0.0)
        mass, left = (each.sum(dim=-1, keepdim=True) for each in (residual, remaining))
        can = (mass > NOTHING) & (left > NOTHING)
        t = torch.where(can, t + mass / left.clamp(min=NOTHING), t)
        scales_of.append(t)
        if uniforms is not None and k + 1 < most:
            rejected = (mass * remaining - left * residual).clamp(min=0.0).cumsum(dim=-1)
            point = uniforms[:, k, None] * rejected[:, -1:]
            drawn = torch.searchsorted(rejected, point, right=True).clamp(max=q.shape[-1] - 1)
            remaining.scatter_(-1, drawn, 0.0)
    return torch.cat(scales_of, dim=-1)


def accepted(p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor | None, most: int) -> Tensor:
    """A_k at C positions for k = 1 .. `most`, given the text's (C,) tokens: (C, most), rising.

    Of (C, V) p and q; uniforms are as for `scales`.
    """
    p, q = (each.double() / each.double().sum(dim=-1, keepdim=True) for each in (p, q))
    p_x, q_x = (each.gather(-1, tokens.unsqueeze(-1)) for each in (p, q))
    q_over_p = torch.where(p_x > 0, q_x / p_x, 0.0)  # p is 0 there by rounding only
    return (scales(p, q, uniforms, most) * q_over_p).clamp(max=1.0)


def acceptance_along(
    texts: Sequence[Mapping[str, Any]],
    *,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    siblings: Siblings,
    most: int,
    seed: int,
) -> Acceptance:
    """Run both models over rollouts of the target, at least one.

    `sampling` is how they were sampled, and how the draft's candidates are; `most` is the largest
    width. The seed is that of the rejected candidates; each rollout's own is made of it.
    """

    def uniforms(row: Mapping[str, Any]) -> Tensor:
        key = (seed, "trees", row["example_id"], row["sample"], row.get("turn", 0))
        shape = (len(row["completion_ids"]), most - 1)
        return torch.rand(shape, generator=generator_for(*key), dtype=torch.float64)

    greedy = sampling.temperature == 0.0
    drawn_of = [uniforms(row) for row in texts] if siblings == "distinct" and not greedy else []

    def columns(p: Tensor, q: Tensor, batch: TextBatch, chunk: slice) -> dict[str, Tensor]:
        if greedy:  # q is the draft's own distribution
            tokens = batch.tokens[chunk, None].to(q.device)
            rank = (q > q.gather(-1, tokens)).sum(dim=-1, keepdim=True)
            return {"accepted": (rank < torch.arange(1, most + 1, device=q.device)).double()}
        drawn = None
        if drawn_of:
            drawn = torch.cat([drawn_of[each] for each in batch.examples])[chunk].to(p.device)
        return {"accepted": accepted(p, q, batch.tokens[chunk].to(p.device), drawn, most)}

    with progress(len(texts), "held-out rollouts", "rollout") as bar:
        drawn_by = SamplingConfig() if greedy else sampling
        columns_of = pair_columns((target, draft), texts, drawn_by, columns, report=bar.update)
    lengths = np.array([len(row["completion_ids"]) for row in texts], dtype=np.int64)
    of_most = np.zeros((len(texts), int(lengths.max()), most))
    for row, values in zip(of_most, columns_of, strict=True):
        row[: len(values["accepted"])] = values["accepted"].numpy()
    of = {k: of_most[..., k - 1] for k in WIDTHS if k <= most}
    return Acceptance([row["example_id"] for row in texts], lengths, of)


def search(acceptance: Acceptance, budget: int, ratio: float) -> list[Record]:
    """Every k-configuration of at most `budget` paths, and what it is expected to emit.

    `ratio` is t_draft / t_target; a round is taken to cost one forward of the target and one of the
    draft for each level. Records of `widths`, such as 4x2x1x1, `paths` (leaves), `nodes` (N),
    `block_efficiency`, and `speedup` over plain decoding.
    """
    _, group = np.unique(acceptance.prompts, return_inverse=True)
    weights = resamples(int(group.max()) + 1)
    emitted = weights @ np.bincount(group, acceptance.lengths)
    records = []
    for widths in k_configurations(budget):
        tokens = Interval.of(emitted / (weights @ np.bincount(group, acceptance.rounds(widths))))
        record = {"widths": "x".join(map(str, widths)), "paths": int(np.prod(widths))}
        record |= {"nodes": int(np.cumprod(widths).sum()), "block_efficiency": tokens.stored()}
        records.append(record | {"speedup": tokens.value / (1.0 + ratio * len(widths))})
    return records
