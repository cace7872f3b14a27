"""The bars of a page (`eval.reporting.rendering.Bar`) as a PNG file: no pyplot, no display.

The colours are Okabe and Ito's, which can be told apart under every common form of colour
blindness; hatches repeat the distinction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.reporting.rendering import Bar, longest
from specdata.storage.files import atomic_write

INK, GRID = "#24292f", "#d0d7de"
HEIGHT = 4.3
"""Inches of a panel that does not grow with what it shows."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
COLOURS = {"": "#56B4E9", "first": "#0072B2", "best": "#009E73", "biased": "#808080"}
"""The look of a bar -> its colour."""


def label(name: str, width: int = 60) -> str:
    """A name as matplotlib may draw it: one line, no mathematics, not too long."""
    flat = " ".join(name.split())
    short = flat if len(flat) <= width else flat[: width - 1] + "…"
    return short.replace("$", r"\$")


def draw_bars(bars: Sequence[Bar], meaning: str) -> Figure:
    """Bars from the top, a gap between groups, each with its whisker, mark and value.

    `meaning` is of their length, and of the mark.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    rows = [number + 0.7 * groups.index(bar.group) for number, bar in enumerate(bars)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.8 + 0.26 * rows[-1]), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for row, bar in zip(rows, bars, strict=True):
            hatch, edge = ("////", "white") if bar.look == "biased" else ("", "none")
            value, low, high = bar.value.value, bar.value.low, bar.value.high
            axes.barh(row, value, color=COLOURS[bar.look], height=0.8, hatch=hatch, edgecolor=edge)
            axes.plot([low, high], [row, row], color=INK, linewidth=1.1)
            if bar.mark is not None:
                axes.plot([bar.mark, bar.mark], [row - 0.45, row + 0.45], color=INK)
            end = (longest([bar]), row)
            axes.annotate(
                bar.text, end, (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        names = [f"{bar.group}: {bar.name}" if bar.group else bar.name for bar in bars]
        axes.set_yticks(rows, [label(name) for name in names])
        axes.set_ylim(rows[-1] + 0.6, -0.6)
        axes.set_xlim(0.0, 1.15 * longest(bars))
        axes.set_xlabel(meaning)
        axes.grid(axis="y", visible=False)
    return figure


def write_bars(path: Path, bars: Sequence[Bar], meaning: str) -> None:
    """Draw bars and save them at 150 dots an inch on white, whole or not at all."""
    figure = draw_bars(bars, meaning)
    with atomic_write(path) as temporary, mpl.rc_context(STYLE):
        figure.savefig(
            temporary, format="png", dpi=150, facecolor="white", metadata={"Software": None}
        )
