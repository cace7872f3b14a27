"""Pearson's chi-square test of sampled outcomes against an exact distribution, with its power."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from scipy.stats import chi2, ncx2

Value = TypeVar("Value", bound=Hashable)

LEVEL = 1e-6
"""False alarms: a correct sampler fails a test at this level once in a million runs."""
LEAST_EXPECTED = 5.0
"""Outcomes expected less often than this are pooled, so that the chi-square approximation holds."""


def p_value(counts: Mapping[Value, int], probabilities: Mapping[Value, float]) -> float:
    """Probability of counts at least this far from expectation under the exact distribution.

    Args:
        counts: how often each outcome occurred.
        probabilities: the exact distribution; it sums to 1.

    Raises:
        AssertionError: for an outcome of probability 0.
    """
    draws = sum(counts.values())
    impossible = {
        value for value, count in counts.items() if count and not probabilities.get(value)
    }
    assert not impossible, f"drawn with probability 0: {impossible}"
    common, rare = _pooled(probabilities, draws)
    bins = [(counts.get(value, 0), draws * probabilities[value]) for value in common]
    if rare > 0:
        bins.append((draws - sum(count for count, _ in bins), draws * rare))
    if len(bins) == 1:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for count, expected in bins)
    return float(chi2.sf(statistic, len(bins) - 1))


def power(
    probabilities: Mapping[Value, float],
    alternative: Mapping[Value, float],
    draws: int,
    level: float = LEVEL,
) -> float:
    """Probability that samples of another distribution are rejected."""
    common, rare = _pooled(probabilities, draws)
    shifts = [
        (alternative.get(value, 0.0) - probabilities[value], probabilities[value])
        for value in common
    ]
    if rare > 0:
        shifts.append((-sum(shift for shift, _ in shifts), rare))
    noncentrality = draws * sum(shift**2 / mass for shift, mass in shifts)
    return _power(len(shifts) - 1, noncentrality, level)


def power_of_shift(
    probabilities: Mapping[Value, float], shift: float, draws: int, level: float = LEVEL
) -> float:
    """Probability that a shift between any two outcomes is rejected, the least over all pairs.

    Moving `shift` from an outcome of probability a to one of b adds n shift^2 (1/a + 1/b) to the
    noncentrality, least for the two largest outcomes.
    """
    common, rare = _pooled(probabilities, draws)
    masses = sorted([probabilities[value] for value in common] + [rare] * (rare > 0))
    if len(masses) < 2:
        return 1.0
    noncentrality = draws * shift**2 * (1 / masses[-1] + 1 / masses[-2])
    return _power(len(masses) - 1, noncentrality, level)


def _pooled(probabilities: Mapping[Value, float], draws: int) -> tuple[list[Value], float]:
    """Outcomes that are expected often enough, and the probability of all others."""
    common = [value for value, mass in probabilities.items() if draws * mass >= LEAST_EXPECTED]
    return common, sum(mass for mass in probabilities.values() if draws * mass < LEAST_EXPECTED)


def _power(freedom: int, noncentrality: float, level: float) -> float:
    return float(ncx2.sf(chi2.isf(level, freedom), freedom, noncentrality))
