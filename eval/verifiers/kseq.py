"""K-SEQ: independent tests of K candidates at the strictest rate that leaves p reachable."""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq
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
    """The smallest rho in [1, K] for which K-SEQ is lossless, rounded up; p and q (V,) float64.

    With beta(rho) = sum_x min(q, p/rho), a rho is valid if 1 - (1 - beta)^K <= rho beta. The
    difference of the two sides decreases in rho, from >= 0 at 1 to <= 0 at K.
    """

    def excess(rho: float) -> float:
        beta = min(1.0, float(torch.minimum(q, p / rho).sum()))
        return any_accepted(beta, k) - rho * beta

    if excess(1.0) <= 0.0:
        return 1.0
    if excess(k) >= 0.0:
        return float(k)
    rho: float = brentq(excess, 1.0, k, xtol=1e-15, rtol=1e-15)
    step = math.ulp(rho)
    while excess(rho) > 0.0:
        rho, step = min(rho + step, float(k)), 2 * step
    return rho


def any_accepted(beta: float, k: int) -> float:
    """1 - (1 - beta)^K: some of K independent tests succeeds."""
    return 1.0 if beta >= 1.0 else -math.expm1(k * math.log1p(-beta))
