"""K-SEQ: independent tests of K candidates at the strictest rate that leaves p reachable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eval.verifiers.rule import Candidates, Rng, remembered
from specdata.probability import residual


def kseq(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """K-SEQ: accept each candidate with probability min(1, p/(rho q)), rho from `discount`.

    Implements Sun et al. 2023 (SpecTr, arXiv:2310.15141), Algorithm 3. Paper symbols: target q and
    draft p there. Lossless for iid candidates. Acceptance: 1 - (1 - beta(rho))^K = rho beta(rho)
    at the rho where both are equal.
    """
    p, tested, chances = _tests(p, candidates)
    for index, chance in enumerate(chances):
        if rng.bernoulli(chance):
            return index
    beta = min(1.0, float(tested.sum()))
    if beta == 0.0:
        return p
    return residual(p, tested * (any_accepted(beta, len(candidates.tokens)) / beta))


@remembered
def _tests(p: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor, list[float]]:
    """Target p and min(q, p/rho), (V,) float64, and the chance to accept each candidate."""
    # The residual is a small difference of large sums: normalised in float64.
    p, q = p.double(), candidates.distributions[0].double()
    p, q = p / p.sum(), q / q.sum()
    tested = torch.minimum(q, p / discount(p, q, len(candidates.tokens)))
    return p, tested, [float(tested[x]) / float(q[x]) for x in candidates.tokens]


def discount(p: Tensor, q: Tensor, k: int) -> float:
    """The smallest rho in [1, K] for which K-SEQ is lossless, rounded up.

    With beta(rho) = sum_x min(q, p/rho), a rho is valid if 1 - (1 - beta)^K <= rho beta. The
    difference f of the two sides decreases in rho and f(1) >= 0 >= f(K). Which of q and p/rho is
    smaller depends on rho only for tokens with ratio p/q in (1, K), so the others are summed once.
    For a given set of tokens with q < p/rho, beta = a + b/rho, and the root is a scalar problem.
    Solving it, and recomputing the set at its root until the set no longer changes, takes a few
    passes. p and q are (V,) float64.
    """
    if k == 1:
        return 1.0
    below, above = p <= q, p >= k * q
    middle = (~(below | above)).nonzero().squeeze(1)
    p_mid, q_mid = p.index_select(0, middle), q.index_select(0, middle)
    fixed_a, fixed_b = float((q * above).sum()), float((p * below).sum())
    rho, low, high, solved = 1.0, 1.0, float(k), -1
    while True:
        scaled = (p_mid < rho * q_mid).to(p)  # as 0 and 1: dot products beat masked sums
        count = int(scaled.sum())
        a = fixed_a + float(q_mid @ (1 - scaled))
        b = fixed_b + float(p_mid @ scaled)
        if count == solved:  # sets grow with rho: an equal count is an equal set, rho its root
            return rho
        if _excess(a, b, rho, k) > 0:
            low = max(low, rho)
        else:
            high = min(high, rho)
        if high - low <= 1e-15 * high:
            return high
        root = _root(a, b, low, high, k)
        inside = low < root < high
        rho, solved = (root, count) if inside else ((low + high) / 2, -1)


def _root(a: float, b: float, low: float, high: float, k: int) -> float:
    """The upper end of the root in [low, high] if beta were a + b/rho throughout."""
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        if _excess(a, b, middle, k) > 0:
            low = middle
        else:
            high = middle


def _excess(a: float, b: float, rho: float, k: int) -> float:
    """f(rho) for beta = a + b/rho."""
    beta = min(1.0, a + b / rho)
    return any_accepted(beta, k) - rho * beta


def any_accepted(beta: float, k: int) -> float:
    """1 - (1 - beta)^K: some of K independent tests succeeds."""
    return 1.0 if beta >= 1.0 else -math.expm1(k * math.log1p(-beta))
