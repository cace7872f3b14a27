"""Block verification: a chain is accepted up to the longest prefix that passes its test."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.persistent_residual import PersistentResidual, scaled_residual
from eval.verifiers.rule import Outcome, Rng
from specdata.errors import NotFiniteError


def block(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Block verification, as published: a joint test of prefixes, longest first.

    Implements Sun et al. 2025 (ICLR, arXiv:2403.10444v2), Algorithm 2. Paper symbols: M_b is the
    target p, M_s the draft q. With r_0 = 1 and r_i = min(1, r_{i-1} p(x_i)/q(x_i)), the accepted
    length is the largest i whose test passes, and the next token has the distribution
    norm((r_i p - q)+). Lossless. P(tau >= i | x^i) = r_i, so E[tau] = sum_i E_q[r_i], at least that
    of token verification.

    The tests are independent, so they may be drawn from the longest prefix down; the first that
    passes makes the shorter ones unnecessary.
    """
    ratios = _prefix_ratios(tree, target, cap=1.0)
    length, tau = len(tree), _longest(ratios, tree, target, rng)
    if tau == length:
        return Outcome(tau, target[tau])
    return Outcome(tau, scaled_residual(ratios[tau], target[tau], tree.distribution_of(tau + 1)))


def greedy_block(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Greedy block verification: the same tests with joint ratios that are not capped at 1.

    Implements Sun et al. 2024 (arXiv:2403.10444v1), Algorithm 3. Paper symbols: M_b is the target
    p, M_s the draft q; p_remain / p_rej there is m / (m + 1 - r) here. A round accepts as much as
    any verifier can, E[tau] = sum_l sum_{x^l} min(p(x^l), q(x^l)). A rejection leaves a residual
    that persists over the rest of the block's planned length, in which the target is modified.
    Lossless over rounds if that residual persists and the planned length does not depend on
    the drafted tokens (where an end token cuts the chain short, `DraftTree.planned` holds the
    length that was planned).
    """
    ratios = _prefix_ratios(tree, target, cap=sys.float_info.max)
    length, tau = len(tree), _longest(ratios, tree, target, rng)
    if tau == length:
        return Outcome(tau, target[tau])
    distribution = scaled_residual(ratios[tau], target[tau], tree.distribution_of(tau + 1))
    return Outcome(
        tau, distribution, PersistentResidual(ratios[tau], (tree.planned or length) - tau)
    )


def _prefix_ratios(tree: DraftTree, target: Tensor, cap: float) -> list[float]:
    """r_0 .. r_L with r_i = min(cap, r_{i-1} p(x_i)/q(x_i))."""
    ps, qs = tree.chances(target, tree.parent_list)
    if any(map(math.isnan, ps)):
        raise NotFiniteError
    ratios = [1.0]
    for p, q in zip(ps, qs, strict=True):
        # r p is formed first: 0 / q stays 0 where p / q would overflow.
        ratios.append(min(cap, ratios[-1] * p / q))
    return ratios


def _longest(ratios: list[float], tree: DraftTree, target: Tensor, rng: Rng) -> int:
    """tau, the longest prefix that passes: h_L = min(1, r_L), h_i = m_i / (m_i + 1 - r_i)."""
    length, masses = len(tree), list[float]()
    for tau in range(length, 0, -1):
        ratio = ratios[tau]
        if ratio >= 1.0:
            return tau
        if ratio <= 0.0:
            continue
        passes = ratio
        if tau < length:
            if not masses:  # m_i = sum (r_i p - q)+, all read from the device at once
                scales = torch.tensor(ratios[1:length], dtype=target.dtype).unsqueeze(1)
                rows = torch.tensor(tree.distribution_indices[1:])
                q = tree.distributions[rows.to(target.device, non_blocking=True)]
                scaled = scales.to(target.device, non_blocking=True) * target[1:length]
                masses = (scaled - q).clamp(min=0.0).sum(dim=-1).tolist()
            passes = masses[tau - 1] / (masses[tau - 1] + 1.0 - ratio)
        if rng.bernoulli(passes):
            return tau
    return 0
