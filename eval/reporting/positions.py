"""Acceptance by drafted position: fixed lengths in one panel, adaptive rules in another.

A fixed length drafts every position in every round, so its curve says how hard positions are. An
adaptive rule goes on where it expects acceptance: the tokens that it drafts far out are the easy
ones, and its curve lies higher for that alone. The two do not compare, and an adaptive curve is
only read with the number of tokens that reached each position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.measuring.intervals import Array, bootstrap_weights, interval
from eval.measuring.results import Results, Run
from eval.reporting.charts import label, look_of, series

MIN_ROUNDS = 10
"""Positions drafted in fewer rounds than this are not shown."""
LARGEST = 90.0
"""Area of the marker of a position that every round reached, in square points."""
# Tells runs of one family, and so of one colour, apart.
_LINE_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Position:
    """Acceptance at one drafted position of one run.

    Args:
        drafted: rounds that drafted it.
        share: of the rounds, that drafted it.
        accepted: share of `drafted` that accepted it and all before it.
        low: lower end of the 95 % interval of `accepted`, over prompts.
        high: upper end.
    """

    drafted: int
    share: float
    accepted: float
    low: float
    high: float


def is_adaptive(run: Run) -> bool:
    """Whether how far a round drafts depends on what it drafted."""
    return run.drafter is not None and not run.fixed_length


def positions_of(run: Run) -> list[Position]:
    """Each position that was drafted in at least MIN_ROUNDS rounds, the first one first."""
    prompts = list(dict.fromkeys(each.prompt_id for each in run.generations))
    row = {name: index for index, name in enumerate(prompts)}
    deepest = len(run.acceptance_by_position)
    drafted, accepted = np.zeros((2, len(prompts), deepest))
    for each in run.generations:
        depth = len(each.drafted_by_position)
        drafted[row[each.prompt_id], :depth] += each.drafted_by_position
        accepted[row[each.prompt_id], :depth] += each.accepted_by_position
    weights = bootstrap_weights(len(prompts))
    found = []
    for place in range(deepest):
        count = int(drafted[:, place].sum())
        if count < MIN_ROUNDS:
            break
        low, high = interval(_shares(weights @ accepted[:, place], weights @ drafted[:, place]))
        value = float(accepted[:, place].sum() / count)
        found.append(Position(count, count / run.rounds, value, low, high))
    return found


def _shares(above: Array, below: Array) -> Array:
    """Shares, NaN in resamples in which the position was not drafted."""
    shares: Array = np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
    return shares


def shown_runs(results: Results, dataset: str, *, adaptive: bool) -> list[Run]:
    """The run with the longest drafts of each series of one of the two kinds."""
    runs = [run for run in results.of(dataset) if run.drafter and is_adaptive(run) == adaptive]
    return [
        max(group, key=lambda r: (len(r.acceptance_by_position), r.tokens_per_second or 0.0))
        for group in series(runs)
    ]


def has_runs(results: Results, *, adaptive: bool) -> bool:
    """Whether there is any run of one of the two kinds."""
    return any(run.drafter and is_adaptive(run) == adaptive for run in results.runs)


def draw_fixed(axes: Axes, results: Results, dataset: str) -> None:
    """Marginal acceptance of fixed lengths and trees."""
    _draw(axes, results, dataset, adaptive=False)


def draw_adaptive(axes: Axes, results: Results, dataset: str) -> None:
    """The same of adaptive rules, a marker as large as the share of rounds that came so far."""
    _draw(axes, results, dataset, adaptive=True)


def _draw(axes: Axes, results: Results, dataset: str, *, adaptive: bool) -> None:
    for run in shown_runs(results, dataset, adaptive=adaptive):
        found = positions_of(run)
        if not found:
            continue
        look, places = look_of(run), range(1, len(found) + 1)
        before = sum(line.get_color() == look.colour for line in axes.get_lines())
        fill = look.colour if run.lossless else "none"
        axes.plot(
            places,
            [each.accepted for each in found],
            color=look.colour,
            marker=look.marker,
            markersize=2.5 if adaptive else 4.5,
            linewidth=1.4,
            markerfacecolor=fill,
            linestyle=_LINE_STYLES[before % len(_LINE_STYLES)],
            label=label(run.method, 22),
        )
        axes.fill_between(
            places,
            [each.low for each in found],
            [each.high for each in found],
            color=look.colour,
            alpha=0.12,
            linewidth=0,
        )
        if adaptive:
            axes.scatter(
                places,
                [each.accepted for each in found],
                [LARGEST * each.share for each in found],
                marker=look.marker,
                facecolor=fill,
                edgecolor=look.colour,
            )
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted, of the rounds that drafted it")


@dataclass(frozen=True, slots=True)
class PositionTable:
    """The figures of one drawing.

    Args:
        dataset: its name.
        positions: how many columns there are.
        rows: method -> figure, interval and count of each position; shorter for shorter drafts.
    """

    dataset: str
    positions: int
    rows: dict[str, list[tuple[str, str]]]


def position_tables(results: Results, *, adaptive: bool) -> list[PositionTable]:
    """What `draw_fixed` or `draw_adaptive` shows, in numbers, a table a dataset."""
    tables = []
    for dataset in results.datasets():
        rows = {
            run.method: [
                (f"{each.accepted:.2f}", f"[{each.low:.2f}, {each.high:.2f}] of {each.drafted:,}")
                for each in positions_of(run)
            ]
            for run in shown_runs(results, dataset, adaptive=adaptive)
        }
        tables.append(PositionTable(dataset, max(map(len, rows.values()), default=0), rows))
    return [table for table in tables if table.positions]
