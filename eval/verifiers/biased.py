"""Verifiers that trade a bias for fewer rejections. Not lossless; off unless asked for by name."""

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
    target p here and its p the draft q. Biased, even at epsilon = 0; `eval.analysis.theory.uno_loss` is its
    bias at one place, and it adds up over places.

    Raises:
        ValueError: if epsilon is negative or not finite.
    """
    _check(epsilon)

    def rule(p: Tensor, siblings: Candidates, rng: Rng) -> int | Tensor:
        return 0 if _accepts(p, siblings, rng, epsilon) else p

    return rule


def biased_opt(epsilon: float) -> NodeRule:
    """Over-acceptance with the residual that makes the bias as small as it can be.

    Implements Yin et al. 2024 (NeurIPS, arXiv:2411.00841), Theorems 4 and 5, Decoding-OPT: accept x
    with probability b(x) = min(1, (p(x) + epsilon) / q(x)), else draw from norm((p - b q)+). Paper
    symbols as in `biased_uno`. Its bias at one place is `eval.analysis.theory.opt_loss`, TV(p, q) minus the
    probability of a rejection; epsilon = 0 is token verification.

    Raises:
        ValueError: if epsilon is negative or not finite.
    """
    _check(epsilon)

    def rule(p: Tensor, siblings: Candidates, rng: Rng) -> int | Tensor:
        if _accepts(p, siblings, rng, epsilon):
            return 0
        # b q = min(q, p + epsilon), also where q is 0.
        return residual(p, torch.minimum(siblings.distributions[0], p + epsilon))

    return rule


def _accepts(p: Tensor, siblings: Candidates, rng: Rng, epsilon: float) -> bool:
    x, q = siblings.tokens[0], siblings.distributions[0]
    return rng.bernoulli((float(p[x]) + epsilon) / float(q[x]))


def _check(epsilon: float) -> None:
    number = isinstance(epsilon, int | float)
    if not (number and math.isfinite(epsilon) and epsilon >= 0.0):
        raise ValueError(f"epsilon must be a finite number, 0 or larger, got {epsilon!r}")
