"""Every method over all prompt sets together.

Each set counts as much as any other: its sums are divided by its emitted tokens, so the pooled
rates are those of a text with equally many tokens of every set. The mix is then the same for every
method, whatever it happened to emit, and a set does not count more because it has more prompts or
longer answers. Intervals resample the prompts within each set; methods share the resamples, so
ratios of two methods are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from eval.measuring.intervals import Array, Interval, interval, resamples
from eval.measuring.methods import PLAIN
from eval.measuring.metrics import RATES
from eval.measuring.results import Results, Run

ALL_SETS = "all prompt sets"
COLUMNS = sorted(set(chain.from_iterable(RATES.values())))


@dataclass(frozen=True, slots=True)
class PooledRow:
    """One method over all sets that were measured.

    Args:
        runs: what was measured of it, one run a set.
        rates: name -> the pooled value, then those of the bootstrap resamples: (1 + RESAMPLES,);
            those of `RATES` that exist, and "speedup" where the target alone was timed.
    """

    runs: tuple[Run, ...]
    rates: dict[str, Array]

    @property
    def method(self) -> str:
        """Its name."""
        return self.runs[0].method

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is proved to be the target's."""
        return self.runs[0].lossless

    @property
    def drafter(self) -> str | None:
        """What drafts: as in `Method`."""
        return self.runs[0].drafter

    def value(self, name: str) -> float | None:
        """One rate; None if it does not exist."""
        return float(self.rates[name][0]) if name in self.rates else None

    def rate(self, name: str) -> tuple[float | None, tuple[float, float] | None]:
        """A rate and its interval; None for those that do not exist."""
        value = self.value(name)
        return value, None if value is None else self.interval(name)

    def interval(self, name: str) -> tuple[float, float]:
        """The 95 % interval of a rate that exists."""
        return interval(self.rates[name][1:])

    def over(self, other: PooledRow, name: str) -> Interval:
        """A rate over that of another method, paired by prompt."""
        return Interval.of(self.rates[name] / other.rates[name])


def pool(results: Results) -> list[PooledRow]:
    """One row for each method that every set has, in the order they were run."""
    datasets = results.datasets()
    by_set = [{run.method: run for run in results.of(dataset)} for dataset in datasets]
    methods = [name for name in by_set[0] if all(name in runs for runs in by_set)]
    runs = {name: tuple(of_set[name] for of_set in by_set) for name in methods}
    rates = {name: _rates(each) for name, each in runs.items()}
    if results.timed and PLAIN in rates:
        for each in rates.values():
            each["speedup"] = each["tokens_per_second"] / rates[PLAIN]["tokens_per_second"]
    return [PooledRow(runs[name], rates[name]) for name in methods]


def fastest_pooled(rows: Sequence[PooledRow]) -> tuple[PooledRow, list[PooledRow]] | None:
    """The lossless method with the most tokens a second, and those not told apart from it.

    None if no lossless method was timed.
    """
    timed = [row for row in rows if row.lossless and "tokens_per_second" in row.rates]
    if not timed:
        return None
    best = max(timed, key=lambda row: row.value("tokens_per_second") or 0.0)
    ties = []
    for row in timed:
        ratio = row.over(best, "tokens_per_second")
        if row is not best and ratio.low <= 1 <= ratio.high:
            ties.append(row)
    return best, ties


def _rates(runs: Sequence[Run]) -> dict[str, Array]:
    """Every rate of RATES that the sets together have."""
    shares = [_a_token(run, seed) for seed, run in enumerate(runs)]
    sums = {name: sum(share[name] for share in shares) for name in COLUMNS}
    rates = {}
    for name, (above, below) in RATES.items():
        counted = np.asarray(sums[below], float)
        quotient = np.divide(
            sums[above], counted, out=np.full(counted.shape, np.nan), where=counted > 0
        )
        if not np.isnan(quotient[0]):
            rates[name] = quotient
    return rates


def _a_token(run: Run, seed: int) -> dict[str, Array]:
    """Sums an emitted token of one set: (1 + RESAMPLES,), the first over its prompts as they are.

    Args:
        run: one method on the set.
        seed: of the set's bootstrap: sets are resampled independently, methods alike.
    """
    names = list(dict.fromkeys(each.prompt_id for each in run.generations))
    row = {name: index for index, name in enumerate(names)}
    columns = np.zeros((len(COLUMNS), len(names)))
    for each in run.generations:
        columns[:, row[each.prompt_id]] += [getattr(each, name) for name in COLUMNS]
    sums = dict(zip(COLUMNS, columns @ resamples(len(names), seed).T, strict=True))
    return {name: column / sums["tokens"] for name, column in sums.items()}
