"""95 % percentile bootstrap over prompts, whose tokens depend on each other.

Methods that are compared share the resamples (common random numbers), so that differences between
intervals are differences between methods, and a ratio of two methods is paired by prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Interval:
        """Of values (1 + RESAMPLES,) in the order of `resamples`."""
        return cls(float(values[0]), *interval(values[1:]))

    def within(self, decimals: int, unit: str = "") -> str:
        """As text, such as "2.55x [2.28, 2.91]"."""
        value, low, high = (f"{x:.{decimals}f}" for x in (self.value, self.low, self.high))
        return f"{value}{unit} [{low}, {high}]"

    def __str__(self) -> str:
        """In percent, such as "6.1 % [4.9, 7.2]"."""
        # Adding 0 makes 0.0 of -0.0.
        percent = (round(100 * x, 1) + 0.0 for x in (self.value, self.low, self.high))
        return Interval(*percent).within(1, " %")


@cache
def resamples(prompts: int, seed: int = 0) -> Array:
    """All prompts once, then how often each bootstrap resample has each: (1 + RESAMPLES, prompts).

    Multiply it with sums a prompt, (prompts, ...), for the sums of every resample; take the ratio
    of two such products, and `Interval.of` it. Equal seeds give equal resamples.
    """
    even = np.full(prompts, 1.0 / prompts)
    counts = np.random.default_rng(seed).multinomial(prompts, even, size=RESAMPLES)
    return np.vstack([np.ones(prompts), counts])


def interval(values: Array) -> tuple[float, float]:
    """The central 95 % of bootstrap values (RESAMPLES,); undefined resamples are left out."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)
