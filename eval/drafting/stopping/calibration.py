"""How likely the target is to accept a token, judged by the draft's own confidence max_x q(x).

P(accept) = sigmoid(intercept + slope logit(max_x q(x))): two numbers, fitted on labels by maximum
likelihood. Unlike an acceptance head it judges the newest token, because it reads the distribution
that the token was drawn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.online import Pair, sigmoid
from eval.drafting.stopping.rule import AdaptiveRule

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Reals, RecordedTokens

EDGE = 1e-6
"""max q is kept this far from 0 and 1: a one-hot distribution (greedy, top-k 1) has no logit."""


def odds_of(q_max: float) -> float:
    """logit(max q): what the logistic model reads of a distribution."""
    q_max = min(max(q_max, EDGE), 1.0 - EDGE)
    return math.log(q_max / (1.0 - q_max))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The two coefficients; the default takes max q itself for the acceptance probability."""

    intercept: float = 0.0
    slope: float = 1.0

    def accept(self, q_max: float) -> float:
        """The acceptance probability of a token drawn from a distribution with that maximum."""
        return sigmoid(self.intercept + self.slope * odds_of(q_max))

    def accept_all(self, q_max: Reals) -> Reals:
        """The same for any number of tokens: (...) -> (...)."""
        clipped = q_max.clip(EDGE, 1.0 - EDGE)
        odds = self.intercept + self.slope * np.log(clipped / (1.0 - clipped))
        return np.asarray(0.5 + 0.5 * np.tanh(0.5 * odds))


class CalibratedRule(AdaptiveRule):
    """A stopping rule that reads the logistic model."""

    fitted: ClassVar[tuple[str, ...]] = ("calibration",)

    calibration: tuple[float, float] | None = Field(
        default=None,
        description="intercept and slope of the logistic model; an evaluation fits them on the "
        "run's labels unless they are given, a decoder then takes max q itself (0, 1)",
    )

    @property
    def model(self) -> Calibration:
        """The logistic model in use."""
        return Calibration() if self.calibration is None else Calibration(*self.calibration)

    @classmethod
    def fit(cls, tokens: RecordedTokens, accept: Reals) -> dict[str, Any]:
        """The two coefficients, by maximum likelihood at every position."""
        inside = tokens.inside
        model = fit_calibration(accept[inside], tokens.q_max[inside])
        return {"calibration": [model.intercept, model.slope]}

    def reported(self) -> dict[str, Any]:
        """The parameters, with the coefficients in use."""
        model = self.model
        return {**super().reported(), "calibration": [model.intercept, model.slope]}


def fit_calibration(accept: Reals, q_max: Reals, prior: Calibration = Calibration()) -> Calibration:
    """The logistic model of acceptance on logit(max q), by `fit_logistic`.

    Args:
        accept: (n,) min(1, p/q) of drafted tokens, or whether they were accepted.
        q_max: (n,) max_x q(x) of the distributions they were drawn from.
        prior: the coefficients without any label.

    Raises:
        ValueError: if sizes differ or a value is no probability.
    """
    from scipy.special import logit

    if accept.shape != q_max.shape or accept.ndim != 1:
        raise ValueError(f"accept and q_max must both be (n,), got {accept.shape}, {q_max.shape}")
    for name, values in (("accept", accept), ("q_max", q_max)):
        if not ((values >= 0.0) & (values <= 1.0 + EDGE)).all():
            raise ValueError(f"{name} must hold probabilities")
    inputs = logit(q_max.clip(EDGE, 1.0 - EDGE))
    return Calibration(*fit_logistic(accept, inputs, prior=(prior.intercept, prior.slope)))


def fit_logistic(
    accept: Reals, inputs: Reals, *, prior: Pair, weights: Reals | None = None
) -> Pair:
    """Maximum likelihood of soft labels, with a little weight on a prior.

    Minimises -sum_i v_i [a_i log P_i + (1 - a_i) log(1 - P_i)] + |coefficients - prior|^2 / 2 with
    P = sigmoid(intercept + slope x). The second part keeps the answer finite when all labels or all
    inputs agree, and gives the prior when there is nothing to fit.

    Args:
        accept: (n,) labels a in [0, 1].
        inputs: (n,) x.
        prior: intercept and slope without any label.
        weights: (n,) v, how often each label counts; once by default.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    start = np.array(prior)
    counts = np.ones_like(accept) if weights is None else weights
    design = np.stack([np.ones_like(inputs), inputs])

    def loss(coefficients: Reals) -> tuple[float, Reals]:
        odds, apart = coefficients @ design, coefficients - start
        value = (counts * (np.logaddexp(0.0, odds) - accept * odds)).sum() + 0.5 * apart @ apart
        return float(value), design @ (counts * (expit(odds) - accept)) + apart

    def curvature(coefficients: Reals) -> Reals:
        chance = expit(coefficients @ design)
        return np.asarray((design * (counts * chance * (1.0 - chance))) @ design.T + np.eye(2))

    best = minimize(loss, start, jac=True, hess=curvature, method="trust-exact")
    return float(best.x[0]), float(best.x[1])
