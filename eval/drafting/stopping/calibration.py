"""How likely the target is to accept a token, judged by the draft's own confidence max_x q(x).

P(accept) = sigmoid(intercept + slope logit(max_x q(x))): two numbers, fitted on labels by maximum
likelihood. Unlike an acceptance head it judges the newest token, because it reads the distribution
that the token was drawn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import Field

from eval.drafting.stopping.rule import AdaptiveRule

if TYPE_CHECKING:
    import datasets
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]

EDGE = 1e-6
"""max q is kept this far from 0 and 1: a one-hot distribution (greedy, top-k 1) has no logit."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The two coefficients; the default takes max q itself for the acceptance probability."""

    intercept: float = 0.0
    slope: float = 1.0

    def accept(self, q_max: float) -> float:
        """The acceptance probability of a token drawn from a distribution with that maximum."""
        q_max = min(max(q_max, EDGE), 1.0 - EDGE)
        odds = self.intercept + self.slope * math.log(q_max / (1.0 - q_max))
        return 0.5 + 0.5 * math.tanh(0.5 * odds)  # the sigmoid, without its overflow

    def accept_all(self, q_max: Reals) -> Reals:
        """The same for any number of tokens: (...) -> (...)."""
        clipped = q_max.clip(EDGE, 1.0 - EDGE)
        odds = self.intercept + self.slope * np.log(clipped / (1.0 - clipped))
        return np.asarray(0.5 + 0.5 * np.tanh(0.5 * odds))


class CalibratedRule(AdaptiveRule):
    """A stopping rule that reads the logistic model."""

    calibration: tuple[float, float] | None = Field(
        default=None,
        description="intercept and slope of the logistic model; an evaluation fits them on the "
        "run's labels unless they are given, a decoder then takes max q itself (0, 1)",
    )

    @property
    def model(self) -> Calibration:
        """The logistic model in use."""
        return Calibration() if self.calibration is None else Calibration(*self.calibration)

    @property
    def needs_calibration(self) -> bool:
        """Whether none was given."""
        return self.calibration is None

    def calibrated(self, coefficients: tuple[float, float]) -> Self:
        """The same rule with these coefficients, if none were given."""
        return self.model_copy(update={"calibration": self.calibration or coefficients})

    def reported(self) -> dict[str, Any]:
        """The parameters, with the coefficients in use."""
        model = self.model
        return {**super().reported(), "calibration": [model.intercept, model.slope]}


def fit_calibration(accept: Reals, q_max: Reals, prior: Calibration = Calibration()) -> Calibration:
    """Maximum likelihood of soft labels, with a little weight on a prior.

    Minimises -sum_i [a_i log P_i + (1 - a_i) log(1 - P_i)] + |coefficients - prior|^2 / 2. The
    second part keeps the answer finite when all labels agree or all distributions are one-hot, and
    gives the prior when there is nothing to fit.

    Args:
        accept: (n,) min(1, p/q) of drafted tokens, or whether they were accepted.
        q_max: (n,) max_x q(x) of the distributions they were drawn from.
        prior: the coefficients without any label.

    Raises:
        ValueError: if sizes differ or a value is no probability.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, logit

    if accept.shape != q_max.shape or accept.ndim != 1:
        raise ValueError(f"accept and q_max must both be (n,), got {accept.shape}, {q_max.shape}")
    for name, values in (("accept", accept), ("q_max", q_max)):
        if not ((values >= 0.0) & (values <= 1.0 + EDGE)).all():
            raise ValueError(f"{name} must hold probabilities")
    inputs = np.stack([np.ones_like(q_max), logit(q_max.clip(EDGE, 1.0 - EDGE))])
    start = np.array([prior.intercept, prior.slope])

    def loss(weights: Reals) -> tuple[float, Reals]:
        odds, apart = weights @ inputs, weights - start
        value = (np.logaddexp(0.0, odds) - accept * odds).sum() + 0.5 * apart @ apart
        return float(value), inputs @ (expit(odds) - accept) + apart

    def curvature(weights: Reals) -> Reals:
        chance = expit(weights @ inputs)
        return np.asarray((inputs * (chance * (1.0 - chance))) @ inputs.T + np.eye(2))

    best = minimize(loss, start, jac=True, hess=curvature, method="trust-exact")
    return Calibration(float(best.x[0]), float(best.x[1]))


def calibrate(labels: datasets.Dataset) -> Calibration:
    """Fit on every position of a dataset of labels (columns `accept_prob` and `log_q_max`)."""
    accept = [chance for row in labels["accept_prob"] for chance in row]
    q_max = [chance for row in labels["log_q_max"] for chance in np.exp(row)]
    return fit_calibration(np.array(accept), np.array(q_max).clip(max=1.0))
