"""A logistic model of acceptance that goes on learning from what was accepted while decoding."""

from __future__ import annotations

import math

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
