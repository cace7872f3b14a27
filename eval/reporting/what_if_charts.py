"""Speed-up of every method against the cost ratio, on one pair of axes."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.analysis.what_if import PAPERS_RATIO, RATIOS, WhatIf
from eval.reporting.charts import INK, label, look_of
from eval.reporting.what_if import Panel

TICKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
ROOM = 1.28
"""Height of the axes over the highest curve: for names and the labels of ratios."""
LEAST_SPAN = 1.6
"""A winner is named if it wins from some ratio to so many times it."""


def draw_what_if(axes: Axes, panel: Panel) -> None:
    """A line a method, what the clock measured, and who wins where."""
    shown = panel.shown
    highest = 1.0
    # Of lines and marks together, which are drawn apart.
    looks = {look.label: look for look in (look_of(method.run) for method in shown.methods)}
    for look in looks.values():
        axes.plot([], [], color=look.colour, marker=look.marker, markersize=4, label=look.label)
    for method in shown.methods:
        look, curve = look_of(method.run), shown.curve(method)
        highest = max(highest, float(curve.max()))
        axes.plot(
            RATIOS,
            curve,
            color=look.colour,
            linewidth=0.9,
            alpha=0.65,
            linestyle="-" if method.run.lossless else "--",
        )
        if panel.clocked:
            clocked = shown.clocked(method).value
            highest = max(highest, clocked)
            axes.plot(
                shown.ratio,
                clocked,
                color=look.colour,
                marker=look.marker,
                markersize=4,
                markerfacecolor=look.colour if method.run.lossless else "none",
                linestyle="none",
            )
    _draw_winners(axes, shown)
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(0, ROOM * highest)
    axes.set_xscale("log")
    axes.set_xlim(TICKS[0], TICKS[-1])
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("cost ratio  t_draft / t_target")
    axes.set_ylabel("predicted speed-up over the target alone")


def _draw_winners(axes: Axes, shown: WhatIf) -> None:
    """The upper edge of the lossless curves in bold, a stroke where it changes hands."""
    for method, start, end in shown.winners():
        if method is shown.plain:
            continue
        won = RATIOS[(start <= RATIOS) & (end >= RATIOS)]
        curve = shown.curve(method, won)
        axes.plot(won, curve, color=look_of(method.run).colour, linewidth=2.8)
        axes.plot(won[-1], curve[-1], color=INK, marker="|", markersize=7)
        if end >= LEAST_SPAN * start:
            middle = float(np.sqrt(start * end))
            axes.annotate(
                label(method.run.method, 18),
                (middle, float(np.interp(middle, won, curve))),
                (5, 3),
                textcoords="offset points",
                ha="left",
                va="bottom",
                fontsize=7.5,
                color=INK,
            )


def mark_ratios(axes: Axes, panel: Panel) -> None:
    """Upright lines at this machine's ratio and the papers', each labelled on its outer side.

    Call it once the limits are final.
    """
    here = panel.shown.ratio
    for ratio, name, other in (
        (here, f"here {here:.2g}", PAPERS_RATIO),
        (PAPERS_RATIO, f"papers {PAPERS_RATIO:g}", here),
    ):
        axes.axvline(ratio, color=INK, linewidth=0.9, linestyle=":")
        left = ratio < other
        axes.annotate(
            name,
            (ratio, axes.get_ylim()[1]),
            (-3 if left else 3, -3),
            textcoords="offset points",
            ha="right" if left else "left",
            va="top",
            fontsize=7.5,
            color=INK,
        )


def described_what_if(panel: Panel) -> str:
    """The data of a drawing in words, for those who cannot see it."""
    at = (0.01, 0.05, PAPERS_RATIO, 0.5)
    parts = [
        f"{method.run.method} "
        + " ".join(f"{value:.2f}x" for value in panel.shown.curve(method, np.array(at)))
        for method in panel.shown.methods
    ]
    ratios = ", ".join(f"{ratio:g}" for ratio in at)
    return (
        f"This machine's ratio is {panel.shown.ratio:.2g}. Predicted at ratios {ratios}:"
        f" {'; '.join(parts)}."
    )
