"""Every method over one prompt set, or over several that count alike.

Each set counts as much as any other: its sums are divided by its emitted tokens, so the pooled
rates are those of a text with equally many tokens of every set. The mix is then the same for every
method, whatever it happened to emit, and a set does not count more because it has more prompts or
longer answers. Intervals resample the prompts within each set; methods share the resamples, so
ratios of two methods are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.decode_config import Method
from eval.measuring.intervals import Floats, Interval
from eval.measuring.methods import baseline
from eval.measuring.metrics import COUNTS, prompt_ids, rates_of, resampled_counts
from eval.measuring.results import Results, Run

ALL_SETS = "all prompt sets"


@dataclass(frozen=True, slots=True)
class PooledRow:
    """One method over one or several prompt sets.

    Args:
        runs: what was measured of it, one run a set.
        rates: name -> the pooled value, then those of the bootstrap resamples: (1 + RESAMPLES,);
            those of `RATES` that exist, and "speedup" where the target alone was timed.
        spread: lowest and highest speed-up of several evaluations of the same settings.
        chosen_by: its `merit` on the sets that methods are chosen on, if those are others.
    """

    runs: tuple[Run, ...]
    rates: dict[str, Floats]
    spread: tuple[float, float] | None = None
    chosen_by: tuple[float, float] | None = None

    @property
    def method(self) -> Method:
        """The method."""
        return self.runs[0].method

    @property
    def name(self) -> str:
        """The method's name."""
        return self.runs[0].method.name

    def value(self, name: str) -> float | None:
        """One rate; None if it does not exist."""
        return float(self.rates[name][0]) if name in self.rates else None

    def rate(self, name: str) -> Interval | None:
        """A rate with its interval; None if it does not exist."""
        return Interval.of(self.rates[name]) if name in self.rates else None

    def speed(self) -> float:
        """Tokens a second; 0 if it was not timed."""
        return self.value("tokens_per_second") or 0.0

    def over(self, other: PooledRow, name: str) -> Interval:
        """A rate over that of another method, paired by prompt."""
        return Interval.of(self.rates[name] / other.rates[name])


def pool(results: Results, datasets: Sequence[str] = ()) -> list[PooledRow]:
    """A row for each method that all sets, or some, have; `merit` ranks by what chooses methods."""
    rows, chosen_on = _pooled(results, datasets or results.datasets()), results.chosen_on()
    if not chosen_on:
        return rows
    merits = {row.name: merit(row) for row in _pooled(results, chosen_on)}
    # What was not in dev's last round was surely slower than the best in an earlier one.
    return [replace(row, chosen_by=merits.get(row.name, (0.0, row.speed()))) for row in rows]


def _pooled(results: Results, datasets: Sequence[str]) -> list[PooledRow]:
    by_set = [{run.method.name: run for run in results.of(dataset)} for dataset in datasets]
    rows = {}
    for method in by_set[0]:
        if not all(method in runs for runs in by_set):
            continue
        runs = tuple(of_set[method] for of_set in by_set)
        # Sets are resampled independently, methods alike.
        prompts = [prompt_ids(run.generations) for run in runs]
        counts = tuple(map(len, prompts))
        sums = [
            resampled_counts(run.generations, prompts[seed], seed, counts)
            for seed, run in enumerate(runs)
        ]
        a_token = {
            name: np.sum([each[name] / each["tokens"] for each in sums], axis=0) for name in COUNTS
        }
        rows[method] = PooledRow(runs, rates_of(a_token))
    for row in rows.values() if results.timed else ():
        if plain := rows.get(baseline(row.method)):
            speeds = row.rates["tokens_per_second"]
            row.rates["speedup"] = speeds / plain.rates["tokens_per_second"]
    return list(rows.values())


def medians(results: Results, datasets: Sequence[str] = ()) -> list[PooledRow]:
    """`pool`, with each method as the evaluation has it in which its speed-up is the median.

    Of an even number of evaluations the slower of the two in the middle.
    """
    rows = []
    pools = [pool(each, datasets) for each in results.repetitions()]
    for of_method in zip(*pools, strict=True):
        ranked = sorted(of_method, key=lambda row: row.value("speedup") or row.speed())
        row, low, high = (ranked[place] for place in ((len(ranked) - 1) // 2, 0, -1))
        if results.repeats and "speedup" in row.rates:
            spread = (float(low.rates["speedup"][0]), float(high.rates["speedup"][0]))
            row = replace(row, spread=spread)
        rows.append(row)
    return rows


def merit(row: PooledRow) -> tuple[float, float]:
    """The rank of a method: speed, over the target's where timed; else tokens per target call.

    Speed-ups of several evaluations can be compared; tokens a second need a machine as fast.
    """
    speed = row.value("speedup") or row.speed()
    return row.chosen_by or (speed, row.value("block_efficiency") or 0.0)


def fastest(rows: Sequence[PooledRow]) -> tuple[PooledRow, list[PooledRow]] | None:
    """The lossless method with the most tokens a second, and those not told apart from it.

    A method ties if the interval of its speed over the fastest one's, paired by prompt, contains 1.
    Those of decoder `server` and `generate` do not count; None if no other was timed.
    """
    timed = [row for row in rows if row.method.lossless and "tokens_per_second" in row.rates]
    # A server may be another machine, and `generate` is the target alone in slower code.
    timed = [row for row in timed if row.method.decoder not in ("server", "generate")]
    if not timed:
        return None
    best = max(timed, key=merit)
    ties = []
    for row in timed:
        ratio = row.over(best, "tokens_per_second")
        if row is not best and ratio.low <= 1 <= ratio.high:
            ties.append(row)
    return best, ties
