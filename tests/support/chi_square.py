"""Pearson's chi-square test of sampled outcomes against an exact distribution, with its power."""

from collections.abc import Mapping
from typing import Any

from scipy.stats import chi2, ncx2

LEVEL = 1e-6
"""False alarms: a correct sampler fails a test at this level once in a million runs."""
LEAST_EXPECTED = 5.0
"""Outcomes expected less often than this are pooled, so that the chi-square approximation holds."""
Probabilities = Mapping[Any, float]


def p_value(counts: Mapping[Any, int], probabilities: Probabilities) -> float:
    """Probability of counts at least this far from expectation under the exact distribution."""
    draws = sum(counts.values())
    impossible = {
        value for value, count in counts.items() if count and not probabilities.get(value)
    }
    assert not impossible, f"drawn with probability 0: {impossible}"
    bins = _bins(probabilities, counts, draws)
    if len(bins) == 1:
        return 1.0
    statistic = sum((count - draws * mass) ** 2 / (draws * mass) for mass, count in bins)
    return float(chi2.sf(statistic, len(bins) - 1))


def power(
    probabilities: Probabilities, alternative: Probabilities, draws: int, level: float = LEVEL
) -> float:
    """Probability that samples of another distribution are rejected."""
    bins = _bins(probabilities, alternative, draws)
    shifts = sum((other - mass) ** 2 / mass for mass, other in bins)
    return _power(len(bins) - 1, draws * shifts, level)


def power_of_shift(
    probabilities: Probabilities, shift: float, draws: int, level: float = LEVEL
) -> float:
    """Probability that a shift between any two outcomes is rejected, the least over all pairs.

    Moving `shift` from an outcome of probability a to one of b adds n shift^2 (1/a + 1/b) to the
    noncentrality, least for the two largest outcomes.
    """
    masses = sorted(mass for mass, _ in _bins(probabilities, probabilities, draws))
    if len(masses) < 2:
        return 1.0
    noncentrality = draws * shift**2 * (1 / masses[-1] + 1 / masses[-2])
    return _power(len(masses) - 1, noncentrality, level)


def _bins(
    probabilities: Probabilities, other: Probabilities, draws: int
) -> list[tuple[float, float]]:
    """Each outcome's probability and `other`; those that are expected too rarely are one."""
    bins = {value: mass for value, mass in probabilities.items() if draws * mass >= LEAST_EXPECTED}
    rare = sum(mass for value, mass in probabilities.items() if value not in bins)
    pairs = [(mass, other.get(value, 0.0)) for value, mass in bins.items()]
    if rare > 0:
        pairs.append((rare, sum(other.values()) - sum(own for _, own in pairs)))
    return pairs


def _power(freedom: int, noncentrality: float, level: float) -> float:
    return float(ncx2.sf(chi2.isf(level, freedom), freedom, noncentrality))
