"""Drawings of a draft's training: its loss, and what was measured of it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.reporting.charts import INK, label
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


def draw_loss(axes: Axes, history: History) -> None:
    """The objective, as it was logged."""
    x = [step.step for step in history.steps]
    _plot(axes, x, [step.loss for step in history.steps], *LINES[0], name="loss")
    _finish(axes, history, "loss")


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
    x: Sequence[int],
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


def _positions(measured: Measurement) -> str:
    return ", ".join(f"{b.first}-{b.last} {b.acceptance:.3f}" for b in measured.by_position)


def _values(parts: Iterable[str]) -> str:
    return "Values: " + "; ".join(parts) + "."
