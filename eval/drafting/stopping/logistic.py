"""The logistic model of acceptance on the confidence max_x q(x) of the draft, and its rule.

Unlike SpecDec++'s head it judges the newest token, because it reads the distribution that this was
drawn from. Its two coefficients are fitted on labels by maximum likelihood (`fit_calibration`), and
the cost rule goes on learning from what was accepted (`OnlineLogistic`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.rule import ActiveRule, AdaptiveRule, ThresholdRule, largest

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Reals, RecordedTokens
    from heads import BaseHead

Coefficients = tuple[float, float]
"""Intercept and slope."""

MEMORY = 1000.0
"""Outcomes that are remembered: each new one makes all earlier ones count 1/1000 less."""
INFORMATION: Coefficients = (4.0, 20.0)
"""Diagonal of H without any outcome, which holds the first coefficients as about twenty outcomes
with p (1 - p) = .2 and x^2 = 5 would."""


def sigmoid(odds: float) -> float:
    """1 / (1 + exp(-odds)), without its overflow; of arrays, too."""
    tanh = math.tanh if isinstance(odds, float) else np.tanh
    return 0.5 + 0.5 * tanh(0.5 * odds)


class OnlineLogistic:
    """P(accept) = sigmoid(intercept + slope x), refitted by each outcome that becomes known.

    Running sums hold what the outcomes so far say about the two coefficients: their information
    matrix H and H w, w being the coefficients. A new outcome y at z = (1, x) moves w to the maximum
    of its own likelihood and the Gaussian of these sums, found by Newton's method along the only
    direction in which w can go, H^-1 z; then p (1 - p) z z^T joins the sums. Before, the sums are
    discounted by 1 - 1/MEMORY towards those of the first coefficients, so old outcomes are
    forgotten. Going to the maximum and not one plain Newton step keeps a single surprise from
    overshooting.

    What is decided with it stays lossless: it only looks at rounds that are over.
    """

    def __init__(self, first: Coefficients) -> None:
        self.intercept, self.slope = first
        self._keep = 1.0 - 1.0 / MEMORY
        # H as (intercept, both, slope), and H w.
        self._first = (INFORMATION[0], 0.0, INFORMATION[1])
        self._first_sums = (INFORMATION[0] * first[0], INFORMATION[1] * first[1])
        self._information, self._sums = self._first, self._first_sums

    def accept(self, x: float) -> float:
        """The acceptance probability of a token with this x."""
        return sigmoid(self.intercept + self.slope * x)

    def observe(self, x: float, accepted: bool) -> None:
        """Learn that a token with this x was accepted, or that it was not."""
        keep, lost = self._keep, 1.0 - self._keep
        a, b, d = (
            keep * now + lost * at_first
            for now, at_first in zip(self._information, self._first, strict=True)
        )
        u, v = (
            keep * now + lost * at_first
            for now, at_first in zip(self._sums, self._first_sums, strict=True)
        )
        determinant = a * d - b * b
        intercept, slope = (d * u - b * v) / determinant, (a * v - b * u) / determinant
        # H^-1 z, and how far the odds at x move for each unit of y - P.
        step = (d - b * x) / determinant, (a * x - b) / determinant
        odds = intercept + slope * x
        moved = _newton(odds, step[0] + step[1] * x, float(accepted))
        error = float(accepted) - sigmoid(moved)
        self.intercept, self.slope = intercept + step[0] * error, slope + step[1] * error
        weight = sigmoid(moved) * sigmoid(-moved)
        a, b, d = a + weight, b + weight * x, d + weight * x * x
        self._information = a, b, d
        self._sums = a * self.intercept + b * self.slope, b * self.intercept + d * self.slope


def _newton(odds: float, variance: float, outcome: float) -> float:
    """The odds u with u = odds + variance (outcome - sigmoid(u)): unique, as the right side falls.

    It lies between `odds` and odds + variance (outcome - sigmoid(odds)); a step that would leave
    what is known to hold it is replaced by its middle.
    """
    end = odds + variance * (outcome - sigmoid(odds))
    low, high = min(odds, end), max(odds, end)
    guess = odds
    for _ in range(60):
        chance = sigmoid(guess)
        gap = guess - odds - variance * (outcome - chance)
        low, high = (low, guess) if gap > 0.0 else (guess, high)
        newton = guess - gap / (1.0 + variance * chance * (1.0 - chance))
        if abs(newton - guess) < 1e-9:
            return newton
        guess = newton if low < newton < high else 0.5 * (low + high)
    return guess


EDGE = 1e-6
"""max q is kept this far from 0 and 1: a one-hot distribution (greedy, top-k 1) has no logit."""


def odds_of(q_max: float) -> float:
    """logit(max q): what the logistic model reads of a distribution; of arrays, too."""
    if not isinstance(q_max, float):
        clipped = np.clip(q_max, EDGE, 1.0 - EDGE)
        return np.log(clipped / (1.0 - clipped))
    q_max = min(max(q_max, EDGE), 1.0 - EDGE)
    return math.log(q_max / (1.0 - q_max))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The two coefficients; the default takes max q itself for the acceptance probability."""

    intercept: float = 0.0
    slope: float = 1.0

    def accept(self, q_max: float) -> float:
        """The acceptance probability of a token of a distribution with that maximum; or of many."""
        return sigmoid(self.intercept + self.slope * odds_of(q_max))


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


class Logit(CalibratedRule):
    """End once the logistic model gives a rejection more probability than `threshold`.

    Stop when 1 - prod_i P_i > threshold with P_i = sigmoid(intercept + slope logit(max_x q_i(x))):
    the combination of SpecDec++ (arXiv:2405.19715) without its lag, because the distribution of
    the newest token is known. A lower threshold stops earlier: 1 never stops. The default is the
    head's, whose threshold has the same meaning. A one-hot distribution (temperature 0, top-k 1)
    tells nothing, so drafts then run to the limit.
    """

    name: ClassVar[str] = "logit"
    until: ClassVar[str] = "a logistic model of the draft's confidence expects a rejection"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"threshold": 0.5, "calibration": (0.5, 0.8)},
    )

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by max q",
    )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the modelled acceptance probabilities of a round's tokens."""
        return ThresholdRule(
            self.limit,
            largest,
            lambda alive: 1.0 - alive > self.threshold,
            multiplies=True,
            accept=self.model.accept,
        )


def fit_calibration(accept: Reals, q_max: Reals) -> Calibration:
    """The logistic model by maximum likelihood of soft labels, with a little weight on the default.

    Minimises -sum_i [a_i log P_i + (1 - a_i) log(1 - P_i)] + |coefficients - (0, 1)|^2 / 2 with
    P = sigmoid(intercept + slope logit(max q)). The second part keeps the answer finite when all
    labels or all inputs agree, and gives the default when there is nothing to fit.

    Of (n,) min(1, p/q) of drafted tokens, or whether they were accepted, and (n,) max_x q(x) of the
    distributions they were drawn from. Raises ValueError if sizes differ or a value is no
    probability.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, logit

    if accept.shape != q_max.shape or accept.ndim != 1:
        raise ValueError(f"accept and q_max must both be (n,), got {accept.shape}, {q_max.shape}")
    for name, values in (("accept", accept), ("q_max", q_max)):
        if not ((values >= 0.0) & (values <= 1.0 + EDGE)).all():
            raise ValueError(f"{name} must hold probabilities")
    default = np.array([0.0, 1.0])
    design = np.stack([np.ones_like(q_max), logit(q_max.clip(EDGE, 1.0 - EDGE))])

    def loss(coefficients: Reals) -> tuple[float, Reals]:
        odds, apart = coefficients @ design, coefficients - default
        value = (np.logaddexp(0.0, odds) - accept * odds).sum() + 0.5 * apart @ apart
        return float(value), design @ (expit(odds) - accept) + apart

    def curvature(coefficients: Reals) -> Reals:
        chance = expit(coefficients @ design)
        return np.asarray((design * (chance * (1.0 - chance))) @ design.T + np.eye(2))

    best = minimize(loss, default, jac=True, hess=curvature, method="trust-exact")
    return Calibration(float(best.x[0]), float(best.x[1]))
