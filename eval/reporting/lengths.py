"""The best measured number of drafted tokens, for each engine apart.

A length that is best in one engine's loop says nothing about another engine, whose draft and target
cost other shares of a round. So an engine that was not measured has no best length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.measuring.intervals import Interval
from eval.measuring.pooled import PooledRow, pool
from eval.measuring.results import Results
from eval.reporting.rendering import NOT_MEASURED
from specdata.errors import ManifestError

ENGINES = {
    "draftsmith": "chain",
    "transformers": "transformers",
    "vLLM": None,
    "SGLang": None,
    "llama.cpp": None,
}
"""Engines that serve a plain draft -> the drafter under which results hold them, if they can."""


@dataclass(frozen=True, slots=True)
class MeasuredLength:
    """The fastest of the fixed lengths that were measured with one engine.

    Args:
        engine: its name.
        method: the method that was fastest over all prompt sets together.
        verifier: its acceptance rule; None where the engine does not say.
        length: tokens it drafts a round.
        speed: its tokens a second, over all prompt sets, each counting alike.
        measured: every length that was measured with this engine, ascending.
        runner_up: the next fastest method; None if there was no other.
        ratio: speed of the fastest over that of the runner-up, paired by prompt.
    """

    engine: str
    method: str
    verifier: str | None
    length: int
    speed: Interval
    measured: tuple[int, ...]
    runner_up: str | None = None
    ratio: Interval | None = None

    @property
    def tied(self) -> bool:
        """True if the runner-up may be as fast: the interval of the ratio contains 1."""
        return self.ratio is not None and self.ratio.low <= 1.0

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Best length, speed, all measured lengths and the next best, as text."""
        best = f"K = {self.length}" + (f", {self.verifier} verification" if self.verifier else "")
        speed, ratio, against = self.speed, self.ratio, NOT_MEASURED
        if ratio is not None:
            against = f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] {self.runner_up}"
            against += ": not told apart" if self.tied else ""
        lengths = f"K = {', '.join(map(str, self.measured))}"
        return best, f"{speed.value:.1f} [{speed.low:.1f}, {speed.high:.1f}]", lengths, against


def measured_lengths(results: Results) -> dict[str, MeasuredLength | None]:
    """Engine -> the best of what was measured with it; None where nothing was, or without times."""
    return {
        engine: _best(engine, _of_drafter(results, drafter)) if drafter and results.timed else None
        for engine, drafter in ENGINES.items()
    }


def longest_measured(results: Results) -> int:
    """The longest fixed length of a chain that was measured on every prompt set.

    Raises:
        ManifestError: if none was.
    """
    drafters = [drafter for drafter in ENGINES.values() if drafter]
    methods = [row for drafter in drafters for row in _of_drafter(results, drafter)]
    if not methods:
        raise ManifestError(
            "the card of a draft needs a measured draft length: evaluate a method with a fixed"
            " length (stop: fixed) on every prompt set"
        )
    return max(row.runs[0].length or 0 for row in methods)


def _of_drafter(results: Results, drafter: str) -> list[PooledRow]:
    """Each lossless method of a fixed length that was measured on every prompt set."""
    rows = [row for row in pool(results) if row.drafter == drafter and row.lossless]
    return [row for row in rows if row.runs[0].fixed_length and row.runs[0].length]


def _best(engine: str, methods: Sequence[PooledRow]) -> MeasuredLength | None:
    if not methods:
        return None
    first, *others = sorted(methods, key=PooledRow.speed, reverse=True)
    return MeasuredLength(
        engine=engine,
        method=first.method,
        verifier=first.runs[0].verifier,
        length=first.runs[0].length or 0,
        speed=Interval.of(first.rates["tokens_per_second"]),
        measured=tuple(sorted({row.runs[0].length or 0 for row in methods})),
        runner_up=others[0].method if others else None,
        ratio=first.over(others[0], "tokens_per_second") if others else None,
    )
