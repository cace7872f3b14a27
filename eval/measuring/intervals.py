"""95 % percentile bootstrap over prompts, whose tokens depend on each other.

Methods that are compared share the resamples (common random numbers), so that differences between
intervals are differences between methods, and a ratio of two methods is paired by prompt. Of too
few prompts there is no interval: its ends are NaN, which no comparison with them survives.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from statistics import NormalDist
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainSerializer

RESAMPLES = 1000
CONFIDENCE = 0.95
LEAST_COVERAGE = 0.90
"""Intervals that hold the truth less often are not given: they miss at most twice as often as 95 %
says. That takes 10 prompts of one set, 7 of each of two, 6 of each of three."""

Floats = NDArray[np.float64]
End = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda stored: math.nan if stored is None else stored),
    PlainSerializer(lambda end: None if math.isnan(end) else end, return_type=float | None),
]
"""An end of an interval; null in files where there is none."""


@cache
def coverage(prompts: tuple[int, ...]) -> float:
    """The share of 95 % intervals over sets of so many prompts that hold the truth, by theory.

    A percentile bootstrap of a mean over n prompts covers what Student's t with n - 1 degrees of
    freedom has within 1.96 sqrt((n - 1) / n): 75 % for 3 prompts, 85 % for 5 and 90 % for 10.
    """
    if (freedom := sum(prompts) - len(prompts)) < 1:
        return 0.0
    narrow = math.sqrt(sum((n - 1) / n for n in prompts) / len(prompts))
    within = narrow * NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    # Student's density, integrated over 1000 steps: a finished run is shown without scipy.
    places = within * (np.arange(1000) + 0.5) / 1000
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + places**2 / freedom) ** (-(freedom + 1) / 2)
    return float(2 * within * density.mean() * math.exp(scale) / math.sqrt(freedom * math.pi))


def prompts_needed(sets: int) -> int:
    """The fewest prompts of each of so many sets that an interval is given of."""
    return next(n for n in count(2) if coverage((n,) * sets) >= LEAST_COVERAGE)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval, whose ends are NaN where there is none."""

    value: float
    low: End = math.nan
    high: End = math.nan

    @classmethod
    def of(cls, values: Floats) -> Interval:
        """The interval of values (1 + RESAMPLES,) in the order of `resamples`."""
        return cls(float(values[0]), *interval(values[1:]))

    @property
    def exists(self) -> bool:
        """False where too few prompts were measured for an interval."""
        return not math.isnan(self.low)

    def stored(self) -> dict[str, float | None]:
        """The interval as JSON has it: ends that do not exist are None."""
        return {name: None if math.isnan(x) else x for name, x in asdict(self).items()}

    def within(self, decimals: int, unit: str = "") -> str:
        """The interval as text, such as "2.55x [2.28, 2.91]"."""
        value, low, high = (f"{x:.{decimals}f}" for x in (self.value, self.low, self.high))
        return f"{value}{unit}" + f" [{low}, {high}]" * self.exists

    def __str__(self) -> str:
        """The interval in percent, such as "6.1 % [4.9, 7.2]"."""
        # Adding 0 makes 0.0 of -0.0.
        percent = (round(100 * x, 1) + 0.0 for x in (self.value, self.low, self.high))
        return Interval(*percent).within(1, " %")


@cache
def resamples(prompts: int, seed: int = 0, sets: tuple[int, ...] = ()) -> Floats:
    """All prompts once, then how often each bootstrap resample has each: (1 + RESAMPLES, prompts).

    Multiply it with sums a prompt, (prompts, ...), for the sums of every resample; take the ratio
    of two such products, and `Interval.of` it. Equal seeds give equal resamples. Resamples are NaN
    where an interval over these prompts, or over all `sets` that are pooled, is not given.
    """
    even = np.full(prompts, 1.0 / prompts)
    counts = np.random.default_rng(seed).multinomial(prompts, even, size=RESAMPLES)
    enough = coverage(sets or (prompts,)) >= LEAST_COVERAGE
    return np.vstack([np.ones(prompts), counts if enough else np.full(counts.shape, np.nan)])


def interval(values: Floats) -> tuple[float, float]:
    """The central 95 % of bootstrap values (RESAMPLES,); undefined resamples are left out."""
    if np.isnan(values).all():
        return math.nan, math.nan
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)
