"""Token verification: the test of speculative sampling, token by token."""

from __future__ import annotations

from torch import Tensor

from eval.verifiers.rule import Candidates, Rng
from specdata.probability import residual


def token(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Token verification: accept x with probability min(1, p(x)/q(x)), else draw from (p - q)+.

    Implements Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1, and Chen et al. 2023
    (arXiv:2302.01318), Algorithm 2. Lossless. Expected accepted length on a chain:
    sum_l sum_{x^l} prod_i min(p, q)(x_i | x^{i-1}).
    """
    if rng.bernoulli(candidates.p[0] / candidates.q[0]):
        return 0
    return residual(p, candidates.distributions[0])
