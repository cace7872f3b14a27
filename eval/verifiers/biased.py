"""Verifiers that accept more tokens at the price of a bias: they are not lossless."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eval.verifiers.rule import Candidates, NodeRule, Rng
from specdata.probability import residual


def biased_uno(epsilon: float) -> NodeRule:
    """Over-acceptance with the target itself after a rejection.

    Implements Yin et al. 2024 (NeurIPS, arXiv:2411.00841), Decoding-UNO: accept x with probability
    b(x) = min(1, (p(x) + epsilon) / q(x)), else draw from p. Paper symbols: the paper's q is the
    target p here and its p the draft q. Biased, even at epsilon = 0; its bias at one position is
    `uno_loss`, and biases add up over positions. Raises ValueError if epsilon is negative or not
    finite.
    """
    _check(epsilon)

    def rule(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
        return 0 if rng.bernoulli((candidates.p[0] + epsilon) / candidates.q[0]) else p

    return rule


def biased_opt(epsilon: float) -> NodeRule:
    """Over-acceptance with the residual that makes the bias as small as it can be.

    Implements Yin et al. 2024 (NeurIPS, arXiv:2411.00841), Theorems 4 and 5, Decoding-OPT: accept x
    with probability b(x) = min(1, (p(x) + epsilon) / q(x)), else draw from norm((p - b q)+). Paper
    symbols and errors as in `biased_uno`. Its bias at one position, `opt_loss`, is
    TV(p, q) minus the probability of a rejection; epsilon = 0 is token verification.
    """
    _check(epsilon)

    def rule(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
        if rng.bernoulli((candidates.p[0] + epsilon) / candidates.q[0]):
            return 0
        # b q = min(q, p + epsilon), also where q is 0.
        return residual(p, torch.minimum(candidates.distributions[0], p + epsilon))

    return rule


def opt_loss(p: Tensor, q: Tensor, epsilon: float) -> float:
    """Bias of Decoding-OPT at one position, p and q (V,): sum_x (b q - p)+ (Theorem 4)."""
    return float((torch.minimum(q, p + epsilon) - p).clamp(min=0.0).sum())


def uno_loss(p: Tensor, q: Tensor, epsilon: float) -> float:
    """Bias of Decoding-UNO at one position, p and q (V,): TV(b q + R p, p), R the rejected mass."""
    accepted = torch.minimum(q, p + epsilon)
    return float(0.5 * (accepted + (q - accepted).sum() * p - p).abs().sum())


def _check(epsilon: float) -> None:
    number = isinstance(epsilon, int | float)
    if not (number and math.isfinite(epsilon) and epsilon >= 0.0):
        raise ValueError(f"epsilon must be a finite number, 0 or larger, got {epsilon!r}")
