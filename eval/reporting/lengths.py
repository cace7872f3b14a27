"""The best measured number of drafted tokens, for each engine apart.

A length that is best in one engine's loop says nothing about another engine, whose draft and target
cost other shares of a round. So an engine that was not measured has no best length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.measuring.metrics import Interval, compute_metrics, speed_ratio_interval
from eval.measuring.records import PromptRecord
from eval.measuring.results import Results, Run
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
        speed: its tokens a second, over all prompt sets.
        interval: of that speed, over prompts.
        measured: every length that was measured with this engine, ascending.
        runner_up: the next fastest method; None if there was no other.
        ratio: speed of the fastest over that of the runner-up.
        ratio_interval: of that ratio, paired by prompt.
    """

    engine: str
    method: str
    verifier: str | None
    length: int
    speed: float
    interval: Interval
    measured: tuple[int, ...]
    runner_up: str | None = None
    ratio: float | None = None
    ratio_interval: Interval | None = None

    @property
    def tied(self) -> bool:
        """Whether the runner-up may be as fast: the interval of the ratio contains 1."""
        return self.ratio_interval is not None and self.ratio_interval[0] <= 1.0

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Best length, speed, all measured lengths and the next best, as text."""
        best = f"K = {self.length}" + (f", {self.verifier} verification" if self.verifier else "")
        low, high = self.interval
        against = NOT_MEASURED
        if self.ratio_interval is not None:
            below, above = self.ratio_interval
            against = f"{self.ratio:.2f}x [{below:.2f}, {above:.2f}] {self.runner_up}"
            against += ": not told apart" if self.tied else ""
        lengths = f"K = {', '.join(map(str, self.measured))}"
        return best, f"{self.speed:.1f} [{low:.1f}, {high:.1f}]", lengths, against


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
    methods = [runs for drafter in drafters for runs in _of_drafter(results, drafter)]
    if not methods:
        raise ManifestError(
            "the card of a draft needs a measured draft length: evaluate a method with a fixed"
            " length (stop: fixed) on every prompt set"
        )
    return max(runs[0].length or 0 for runs in methods)


def _of_drafter(results: Results, drafter: str) -> list[list[Run]]:
    """The runs of each lossless method of a fixed length that was measured on every prompt set."""
    methods: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.drafter == drafter and run.fixed_length and run.lossless and run.length:
            methods.setdefault(run.method, []).append(run)
    return [runs for runs in methods.values() if len(runs) == len(results.datasets())]


def _best(engine: str, methods: Sequence[list[Run]]) -> MeasuredLength | None:
    if not methods:
        return None
    speeds = {id(runs): compute_metrics(_generations(runs)) for runs in methods}
    ranked = sorted(methods, key=lambda runs: -(speeds[id(runs)].tokens_per_second or 0.0))
    first, best = ranked[0], speeds[id(ranked[0])]
    assert best.tokens_per_second is not None  # `measured_lengths` asks timed results only
    found = MeasuredLength(
        engine=engine,
        method=first[0].method,
        verifier=first[0].verifier,
        length=first[0].length or 0,
        speed=best.tokens_per_second,
        interval=best.intervals["tokens_per_second"],
        measured=tuple(sorted({runs[0].length or 0 for runs in methods})),
    )
    if len(ranked) == 1:
        return found
    second, speed = ranked[1], speeds[id(ranked[1])].tokens_per_second
    assert speed is not None
    return replace(
        found,
        runner_up=second[0].method,
        ratio=best.tokens_per_second / speed,
        ratio_interval=speed_ratio_interval(_generations(first), _generations(second)),
    )


def _generations(runs: Sequence[Run]) -> list[PromptRecord]:
    return [record for run in runs for record in run.generations]
