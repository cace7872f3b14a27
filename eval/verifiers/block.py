"""Block verification: a chain is accepted up to the longest prefix that passes its test."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.persistent_residual import PersistentResidual, scaled_residual
from eval.verifiers.rule import Outcome, Rng
from specdata.block_verification import longest_prefix, prefix_ratios
from specdata.errors import NotFiniteError


def block(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Block verification, as published: a joint test of prefixes, longest first.

    Implements Sun et al. 2025 (ICLR, arXiv:2403.10444v2), Algorithm 2. Paper symbols: M_b is the
    target p, M_s the draft q. With r_0 = 1 and r_i = min(1, r_{i-1} p(x_i)/q(x_i)), the accepted
    length is the largest i whose test passes, and the next token has the distribution
    norm((r_i p - q)+). Lossless. P(tau >= i | x^i) = r_i, so E[tau] = sum_i E_q[r_i], at least that
    of token verification.
    """
    tau, ratio = _verified(tree, target, rng, cap=1.0)
    if tau == len(tree):
        return Outcome(tau, target[tau])
    return Outcome(tau, scaled_residual(ratio, target[tau], tree.distribution_of(tau + 1)))


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
    tau, ratio = _verified(tree, target, rng, cap=sys.float_info.max)
    length = len(tree)
    if tau == length:
        return Outcome(tau, target[tau])
    distribution = scaled_residual(ratio, target[tau], tree.distribution_of(tau + 1))
    return Outcome(tau, distribution, PersistentResidual(ratio, (tree.planned or length) - tau))


def _verified(tree: DraftTree, target: Tensor, rng: Rng, cap: float) -> tuple[int, float]:
    """tau, how many tokens are accepted, and r_tau."""
    ps, qs = tree.chances(target, tree.parent_list)
    if any(map(math.isnan, ps)):
        raise NotFiniteError

    def later() -> Tensor:
        rows = torch.tensor(tree.distribution_indices[1:])
        return tree.distributions[rows.to(target.device, non_blocking=True)]

    ratios = prefix_ratios(ps, qs, cap)
    tau = longest_prefix(ratios, target, later, rng.bernoulli)
    return tau, ratios[tau]
