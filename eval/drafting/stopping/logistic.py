"""Logistic models of acceptance on one number of the draft, and the rules that read them.

`logit` and `cost` read max_x q(x), the draft's own confidence; `margin` reads the gap between its
two most probable tokens. Unlike an acceptance head they judge the newest token, because they read
the distribution that it was drawn from. Coefficients are fitted on labels by maximum likelihood
(`fit_logistic`), and some go on learning from what was accepted (`OnlineLogistic`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    Features,
    PrefixAcceptanceRule,
    largest,
)

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, Reals, RecordedTokens
    from eval.rounds import Round
    from heads import BaseHead

Pair = tuple[float, float]
"""Intercept and slope."""

MEMORY = 1000.0
"""Outcomes that are remembered: each new one makes all earlier ones count 1/1000 less."""
INFORMATION: Pair = (4.0, 20.0)
"""Of the first coefficients: as of about twenty outcomes with p (1 - p) = .2 and x^2 = 5."""


def sigmoid(odds: float) -> float:
    """1 / (1 + exp(-odds)), without its overflow."""
    return 0.5 + 0.5 * math.tanh(0.5 * odds)


class OnlineLogistic:
    """P(accept) = sigmoid(intercept + slope x), refitted by each outcome that becomes known.

    Running sums hold what the outcomes so far say about the two coefficients: their information
    matrix H and H w, w being the coefficients. A new outcome y at z = (1, x) moves w to the maximum
    of its own likelihood and the Gaussian of these sums, found by Newton's method along the only
    direction in which w can go, H^-1 z; then p (1 - p) z z^T joins the sums. Before, the sums are
    discounted by 1 - 1/memory towards those of the first coefficients, so old outcomes are
    forgotten. Going to the maximum and not one plain Newton step keeps a single surprise from
    overshooting.

    What is decided with it stays lossless: it only looks at rounds that are over.

    Args:
        first: the coefficients without any outcome.
        information: the diagonal of H without any outcome: how firmly these are held.
        memory: outcomes that are remembered.
    """

    def __init__(
        self, first: Pair, *, information: Pair = INFORMATION, memory: float = MEMORY
    ) -> None:
        self.intercept, self.slope = first
        self._keep = 1.0 - 1.0 / memory
        # H as (intercept, both, slope), and H w.
        self._first = (information[0], 0.0, information[1])
        self._first_sums = (information[0] * first[0], information[1] * first[1])
        self._information, self._sums = self._first, self._first_sums

    @property
    def coefficients(self) -> Pair:
        """Intercept and slope as they are now."""
        return self.intercept, self.slope

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


class Logit(CalibratedRule):
    """End once the logistic model gives a rejection more probability than `threshold`.

    Stop when 1 - prod_i P_i > threshold with P_i = sigmoid(intercept + slope logit(max_x q_i(x))):
    the combination of SpecDec++ (arXiv:2405.19715) without its lag, because the distribution of
    the newest token is known. A lower threshold stops earlier: 1 never stops. The default is the
    head's, whose threshold has the same meaning. A one-hot distribution (temperature 0, top-k 1)
    tells nothing, so drafts then run to the limit.
    """

    name: ClassVar[str] = "logit"

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by max q",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """Until a rejection is too probable by the model."""
        from eval.drafting.stopping.recorded import until_product_below

        estimates = self.model.accept_all(tokens.q_max)
        return until_product_below(tokens, estimates, 1.0 - self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the modelled acceptance probabilities of a round's tokens."""
        return _LogitModel(self)


class _LogitModel(PrefixAcceptanceRule):
    def __init__(self, rule: Logit) -> None:
        super().__init__(rule.limit, largest, rule.threshold)
        self.model = rule.model

    def accept(self, numbers: tuple[float, ...]) -> float:
        return self.model.accept(numbers[0])


POSITIONS = 20
"""Positions in a draft that have a model of their own; further ones share that of the last."""
UNFITTED: Pair = (-0.2, 0.6)
"""A guess for a draft that nothing is known of: P = .45 for a tie, .95 for odds of 200 to 1."""


class Margin(AdaptiveRule):
    """End once the models of the margin give a rejection more probability than `threshold`.

    Stop when 1 - prod_k P_k > threshold with P_k = sigmoid(intercept_k + slope_k m_k), where m_k is
    the top-2 margin, log max q - log of the second largest probability of the distribution that
    the k-th token of the draft was drawn from, at most 30. An evaluation fits the pairs on the
    run's labels; while decoding, every outcome that becomes known refits the pair of its position
    (`OnlineLogistic`). Known are the accepted tokens and the first one that was not: those behind
    it are censored. With a verifier that accepts whole blocks, a token counts as accepted if it
    was kept, so the models learn the prefix acceptance of positions under that verifier.

    A lower threshold stops earlier: 1 never stops.
    """

    name: ClassVar[str] = "margin"
    fitted: ClassVar[tuple[str, ...]] = ("coefficients",)

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the top-2 margin",
    )
    coefficients: tuple[Pair, ...] | None = Field(
        default=None,
        min_length=1,
        description="intercept and slope for each position of a draft, the last for all further "
        "ones; an evaluation fits them on the run's labels unless they are given",
    )
    refit: bool = Field(
        default=True,
        description="go on learning from what was accepted while decoding; false: what was decoded "
        "before changes nothing",
    )

    @classmethod
    def fit(cls, tokens: RecordedTokens, accept: Reals) -> dict[str, Any]:
        """A pair for each position k of a draft, from the expected outcomes of all rollouts.

        A draft is taken to start at every position of a rollout; a token is then seen at place k
        with the probability that the k tokens before it were accepted, which is its weight. Places
        that are hardly ever reached keep the coefficients of all positions together.
        """
        if tokens.margin is None:
            raise ValueError("the margins of the drafted tokens are needed and were not recorded")
        inside = tokens.inside
        chances, margins = accept[inside], tokens.margin[inside]
        pooled = fit_logistic(chances, margins, prior=UNFITTED)
        weights, pairs = np.where(inside, 1.0, 0.0), list[Pair]()
        for _ in range(min(POSITIONS, accept.shape[1])):
            pairs.append(fit_logistic(chances, margins, prior=pooled, weights=weights[inside]))
            weights = np.where(inside, np.pad((weights * accept)[:, :-1], ((0, 0), (1, 0))), 0.0)
        return {"coefficients": pairs}

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The coefficients that it starts with."""
        return self.coefficients or (UNFITTED,)

    def reported(self) -> dict[str, Any]:
        """The parameters, with the coefficients that it started with."""
        return {**super().reported(), "coefficients": [list(pair) for pair in self.pairs]}

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """Until a rejection is too probable by the fitted pairs, which stay as they are."""
        from scipy.special import expit

        from eval.drafting.stopping.recorded import until_product_below

        if tokens.margin is None:
            return None
        intercepts, slopes = np.array(self.pairs).T[:, :, None, None]
        estimates = expit(intercepts + slopes * tokens.margin)
        return until_product_below(tokens, estimates, 1.0 - self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> MarginModels:
        """Multiply the modelled acceptance probabilities of a round's tokens."""
        return MarginModels(self)


class MarginModels(PrefixAcceptanceRule):
    """The rule at work in one slot.

    Args:
        rule: its parameters.

    Attributes:
        models: of each position, as they are now.
        margins: of the tokens of the round so far.
    """

    def __init__(self, rule: Margin) -> None:
        super().__init__(rule.limit, Features(("margin",)), rule.threshold)
        self.models = [OnlineLogistic(pair) for pair in rule.pairs]
        self.margins: list[float] = []
        self._refit = rule.refit

    def begin(self) -> None:
        """Start a round."""
        super().begin()
        self.margins = []

    def accept(self, numbers: tuple[float, ...]) -> float:
        """By the model of the position."""
        self.margins.append(numbers[0])
        return self._model(len(self.margins) - 1).accept(numbers[0])

    def observe(self, record: Round) -> None:
        """Learn the outcomes that are known: of the accepted tokens and the first that was not."""
        for place, margin in enumerate(islice(self.margins, record.accepted + 1)):
            if self._refit:
                self._model(place).observe(margin, place < record.accepted)

    def _model(self, place: int) -> OnlineLogistic:
        return self.models[min(place, len(self.models) - 1)]


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
