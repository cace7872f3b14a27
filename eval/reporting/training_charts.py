"""Drawings of trainings: the loss of draft and head, and what was measured of the draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.reporting.charts import GRID, INK, LOOKS, label
from eval.reporting.training import HeadTraining
from specdata.history import History, Measurement

# Okabe and Ito's colours, as in `eval.reporting.charts`, with markers that repeat the distinction.
LINES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
)
BEFORE, AFTER = "#808080", "#0072B2"
ROUNDS = {
    "token_4": ("token, K = 4", "#56B4E9", "o", "-"),
    "token_8": ("token, K = 8", "#0072B2", "o", "-"),
    "block_4": ("block, K = 4", "#56B4E9", "o", "--"),
    "block_8": ("block, K = 8", "#0072B2", "o", "--"),
}
MARKED = 12
"""Lines of more points have no markers."""
BLOCKS = 60
"""A longer curve than twice this is drawn as means of so many blocks of equal length."""


def draw_loss(axes: Axes, history: History) -> None:
    """The objective, as it was logged."""
    x = [step.step for step in history.steps]
    _draw_curve(axes, x, [step.loss for step in history.steps])
    _finish(axes, history, "loss")


def draw_head_loss(axes: Axes, training: HeadTraining) -> None:
    """The objective of a head in every step."""
    losses = training.losses
    _draw_curve(axes, range(1, len(losses) + 1), losses, LOOKS["head"].colour)
    per_epoch = len(losses) / max(training.epochs, 1)
    for epoch in range(1, training.epochs if per_epoch > 1 else 0):
        axes.axvline(epoch * per_epoch, color=GRID, linewidth=0.9, zorder=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)  # the lines between epochs take its place
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")


def _draw_curve(
    axes: Axes, x: Sequence[int], y: Sequence[float], colour: str = LINES[0][0]
) -> None:
    """A loss; a long one as means of blocks, with what four in five steps of a block lie within.

    Blocks do not overlap and none is left out, so the line neither lags nor hides a step.
    """
    if len(x) <= 2 * BLOCKS:
        _plot(axes, x, y, colour, LINES[0][1], name="loss")
        return
    blocks = loss_blocks(x, y)
    middle = [block.middle for block in blocks]
    axes.fill_between(
        middle,
        [block.low for block in blocks],
        [block.high for block in blocks],
        color=colour,
        alpha=0.25,
        linewidth=0,
        label="four in five of its steps",
    )
    name = f"mean of {-(-len(x) // BLOCKS)} steps"
    _plot(axes, middle, [block.mean for block in blocks], colour, "", name=name)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive points of a curve: their middle, and mean, 10 % and 90 % quantile of values."""

    middle: float
    mean: float
    low: float
    high: float


def loss_blocks(x: Sequence[int], y: Sequence[float]) -> list[Block]:
    """At most BLOCKS blocks of equal length, the last may be shorter.

    Args:
        x: (n,) steps.
        y: (n,) losses.
    """
    size = -(-len(x) // BLOCKS)
    blocks = []
    for start in range(0, len(x), size):
        steps, values = x[start : start + size], np.asarray(y[start : start + size])
        low, high = np.quantile(values, (0.1, 0.9)).tolist()
        blocks.append(Block((steps[0] + steps[-1]) / 2, float(values.mean()), low, high))
    return blocks


def draw_acceptance(axes: Axes, history: History) -> None:
    """Acceptance on the watched rollouts by step, of all and of each prompt set."""
    x = [measured.step for measured in history.measurements]
    names = list(history.measurements[0].sets)
    if len(names) != 1:
        values = [measured.overall.acceptance for measured in history.measurements]
        _plot(axes, x, values, INK, "X", name="all")
    for name, (colour, marker) in zip(names, LINES, strict=False):
        values = [measured.sets[name].acceptance for measured in history.measurements]
        _plot(axes, x, values, colour, marker, name=label(name, 20))
    _finish(axes, history, "acceptance, sum of min(p, q)")


def draw_tokens(axes: Axes, history: History) -> None:
    """Expected tokens of a round on the watched rollouts by step."""
    x = [measured.step for measured in history.measurements]
    for key, (name, colour, marker, style) in ROUNDS.items():
        values = [measured.overall.expected_tokens[key] for measured in history.measurements]
        _plot(axes, x, values, colour, marker, style, name=name)
    _finish(axes, history, "expected tokens of a round")


def draw_by_position(axes: Axes, history: History) -> None:
    """Acceptance by position in the completion, before and after."""
    ticks: dict[int, str] = {}
    for measured, name, colour, marker in (
        (history.before, "before", BEFORE, "o"),
        (history.after, "after", AFTER, "s"),
    ):
        if measured is None:
            continue
        ticks |= {i: f"{b.first}-{b.last}" for i, b in enumerate(measured.by_position)}
        values = [part.acceptance for part in measured.by_position]
        _plot(axes, range(len(values)), values, colour, marker, name=name)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("position in the completion")
    axes.set_ylabel("acceptance, sum of min(p, q)")


def _plot(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    marker: str,
    style: str = "-",
    *,
    name: str,
) -> None:
    axes.plot(
        x,
        y,
        color=colour,
        marker=marker if len(x) <= MARKED else "",
        markersize=4.5,
        linewidth=1.4,
        linestyle=style,
        label=name,
    )


def _finish(axes: Axes, history: History, what: str) -> None:
    """Name the axes, and mark the step whose weights were kept."""
    if history.kept_by is not None and history.kept_step is not None:
        axes.axvline(
            history.kept_step, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label="kept"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(what)


def described_training(history: History, kind: str) -> str:
    """The data of a drawing in words, for those who cannot see it."""
    if kind == "loss":
        return _values(f"step {step.step} {step.loss:.4f}" for step in history.steps)
    if kind == "by position":
        named = (("before", history.before), ("after", history.after))
        return _values(
            f"{name} {_positions(measured)}" for name, measured in named if measured is not None
        )
    return _values(
        f"step {m.step} acceptance {m.overall.acceptance:.3f}"
        if kind == "acceptance"
        else f"step {m.step} token K=4 {m.overall.expected_tokens['token_4']:.2f}"
        for m in history.measurements
    )


def described_head_loss(training: HeadTraining) -> str:
    """The loss of a head in words, by block."""
    blocks = loss_blocks(range(1, len(training.losses) + 1), training.losses)
    return _values(f"step {block.middle:.0f} {block.mean:.4f}" for block in blocks)


def _positions(measured: Measurement) -> str:
    return ", ".join(f"{b.first}-{b.last} {b.acceptance:.3f}" for b in measured.by_position)


def _values(parts: Iterable[str]) -> str:
    return "Values: " + "; ".join(parts) + "."
