"""The plots of a report as PNG files and as SVG inside a page: no pyplot, no display.

A PNG shows all datasets side by side; a page shows each on its own, so that a phone can read it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eval.analysis.quality import Quality
from eval.analysis.tree_results import TreeSearch
from eval.measuring.results import Results
from eval.reporting import charts
from eval.reporting.charts import GRID, INK, LOOKS, MIN_ROUNDS, family, label, place_labels
from eval.reporting.quality_charts import draw_places, draw_positions, draw_reliability
from eval.reporting.training_charts import (
    draw_acceptance,
    draw_by_position,
    draw_loss,
    draw_tokens,
)
from eval.reporting.trees import TITLE, draw_frontier
from eval.reporting.what_if import Panel
from eval.reporting.what_if_charts import draw_what_if
from specdata.history import History
from specdata.storage.files import atomic_write

Draw = Callable[[Axes, Results, str], None]
HEIGHT = 4.3
"""Inches of a panel that does not grow with the number of methods."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One kind of figure.

    Args:
        title: heading.
        caption: one or two sentences on how to read it.
        draw: draws one dataset.
        per_method: whether the height grows with the number of methods.
    """

    title: str
    caption: str
    draw: Draw
    per_method: bool


PLOTS = {
    "speedup": Plot(
        "Speed-up",
        "Longer is faster. Whiskers are 95 % bootstrap intervals over prompts; ★ marks the fastest"
        " lossless method; hatched bars change the target's distribution.",
        charts.draw_speed,
        True,
    ),
    "efficiency": Plot(
        "Block efficiency",
        "Tokens per forward of the target; longer is better, but says nothing of what the draft"
        " costs: times were not measured. Whiskers are 95 % bootstrap intervals over prompts;"
        " hatched bars change the target's distribution.",
        charts.draw_efficiency,
        True,
    ),
    "pareto": Plot(
        "Forwards of the target against discarded tokens",
        "Lower left is better. Numbers are lengths K or thresholds; dashed: another verifier than"
        " token; hollow: biased. Dotted lines join points of"
        " equal predicted speed-up (SpecDec++, Eq. 5.1). Trees are left out, they discard"
        " siblings by design.",
        charts.draw_pareto,
        False,
    ),
    "acceptance": Plot(
        "Acceptance by position",
        "Share of the rounds drafting this deep that accepted the position and all before it; the"
        f" longest run of each kind, positions drafted in at least {MIN_ROUNDS} rounds.",
        charts.draw_positions,
        False,
    ),
    "cost": Plot(
        "Where the time goes",
        "Time of one emitted token, fastest method on top. A draft that costs more than the target"
        " forwards it saves makes decoding slower however much is accepted. The rest is prefill and"
        " whatever the method does not attribute; transformers attributes nothing.",
        charts.draw_cost,
        True,
    ),
}


@dataclass(frozen=True, slots=True)
class QualityPlot:
    """One kind of figure on how well acceptance is predicted; the fields are those of `Plot`."""

    title: str
    caption: str
    draw: Callable[[Axes, Quality, str], None]


QUALITY_PLOTS = {
    "reliability": QualityPlot(
        "Are the head's probabilities right?",
        "On the diagonal a probability is what it says: of the tokens that are given .8, four in"
        " five are accepted. Above it acceptance is underestimated, and drafts end too early; below"
        " it they run on too long. Bars are 95 % bootstrap intervals of the head's.",
        draw_reliability,
    ),
    "auroc": QualityPlot(
        "Does the head tell accepted tokens from rejected ones?",
        "AUROC by position in the rollout: 0.5 is chance, 1 is perfect. Bars are 95 % bootstrap"
        " intervals of the head's.",
        draw_positions,
    ),
    "auroc-draft": QualityPlot(
        "And the further a draft goes?",
        "AUROC by position in a draft, where drafts begin everywhere along the rollouts and a token"
        " counts with the chance that those before it were accepted: it is there that a draft is"
        " ended or goes on.",
        draw_places,
    ),
}

# Heading of a panel -> what draws it.
TRAINING_PLOTS: dict[str, Callable[[Axes, History], None]] = {
    "loss": draw_loss,
    "acceptance": draw_acceptance,
    "tokens a round": draw_tokens,
    "by position": draw_by_position,
}


def kinds(results: Results) -> list[str]:
    """The keys of PLOTS that these results can fill: without times no speeds and no costs."""
    left_out = ("efficiency",) if results.timed else ("speedup", "cost")
    return [kind for kind in PLOTS if kind not in left_out]


_RC: dict[Any, Any] = {
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
    "svg.hashsalt": "report",  # makes ids, and so the bytes, depend on the input only
    "svg.fonttype": "path",
}


def plot(kind: str, results: Results, datasets: Sequence[str]) -> Figure:
    """Draw one kind of figure, one panel a dataset.

    Args:
        kind: key of PLOTS.
        results: what to draw.
        datasets: at least one of its datasets.
    """
    what = PLOTS[kind]
    methods = max(len(results.of(dataset)) for dataset in datasets)
    height = 1.3 + 0.27 * methods if what.per_method else HEIGHT
    with mpl.rc_context(_RC):
        figure = _panels(datasets, height, lambda axes, name: what.draw(axes, results, name))
        if kind in ("speedup", "efficiency", "pareto"):
            _add_legend(figure, results, datasets, with_plain=kind != "pareto")
        if kind == "pareto":
            figure.draw_without_rendering()  # computes the layout that labels are placed in
            figure.set_layout_engine("none")
            for axes in figure.axes:
                place_labels(axes)
    return figure


def plot_quality(kind: str, quality: Quality, domains: Sequence[str]) -> Figure:
    """Draw how well acceptance is predicted, one panel a prompt set.

    Args:
        kind: key of QUALITY_PLOTS.
        quality: what to draw.
        domains: at least one of its prompt sets.
    """
    draw = QUALITY_PLOTS[kind].draw
    with mpl.rc_context(_RC):
        return _panels(domains, HEIGHT, lambda axes, name: draw(axes, quality, name))


def training_kinds(history: History) -> list[str]:
    """The keys of TRAINING_PLOTS that a history can fill."""
    there = {
        "loss": history.steps,
        "acceptance": history.measurements,
        "tokens a round": history.measurements,
        "by position": history.after,
    }
    return [kind for kind in TRAINING_PLOTS if there[kind]]


def plot_training(history: History, kinds: Sequence[str]) -> Figure:
    """Draw how a draft was trained, one panel a kind, of `training_kinds`."""
    with mpl.rc_context(_RC):
        return _panels(kinds, HEIGHT, lambda axes, kind: TRAINING_PLOTS[kind](axes, history))


def plot_trees(search: TreeSearch) -> Figure:
    """Draw how many tokens a round drafts of each kind emit."""
    with mpl.rc_context(_RC):
        return _panels([TITLE], HEIGHT, lambda axes, _: draw_frontier(axes, search))


def plot_what_if(shown: Sequence[Panel]) -> Figure:
    """Draw predicted speed-ups against the cost ratio, one panel each."""
    by_title = {panel.title: panel for panel in shown}
    with mpl.rc_context(_RC):
        return _panels(
            list(by_title), HEIGHT, lambda axes, title: draw_what_if(axes, by_title[title])
        )


def _panels(names: Sequence[str], height: float, draw: Callable[[Axes, str], None]) -> Figure:
    """A figure with a titled panel for each name."""
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(5.2 * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(label(name, 28), loc="left", fontweight="bold")
        draw(axes, name)
    return figure


def _add_legend(
    figure: Figure, results: Results, datasets: Sequence[str], *, with_plain: bool
) -> None:
    """One legend of the families that occur, below all panels."""
    present = {family(run) for dataset in datasets for run in results.of(dataset)}
    shown = [LOOKS[key] for key in LOOKS if key in present]
    if not with_plain:
        shown = [look for key, look in LOOKS.items() if key in present - {"plain", "tree"}]
    marks = [
        Line2D([], [], color=f.colour, marker=f.marker, linestyle="none", label=f.label)
        for f in shown
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3)


def write_png(path: Path, figure: Figure) -> None:
    """Save at 150 dots an inch on white, whole or not at all."""
    with atomic_write(path) as temporary, mpl.rc_context(_RC):
        figure.savefig(
            temporary, format="png", dpi=150, facecolor="white", metadata={"Software": None}
        )


def to_svg(figure: Figure, *, prefix: str, title: str, description: str) -> str:
    """Return an inline <svg> that takes the page's ink, so that it is readable in dark mode.

    Args:
        figure: what to write.
        prefix: makes the ids of this figure unique within the page.
        title: short text for assistive technology.
        description: longer text for assistive technology.
    """
    buffer = io.StringIO()
    with mpl.rc_context(_RC):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to groups, and gids repeat
    text = re.sub(r'\b(id|href)="(#?)', rf'\1="\2{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    text = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    opening = (
        f'<svg role="img" aria-labelledby="{prefix}-title {prefix}-desc"'
        f' preserveAspectRatio="xMidYMin meet"'
    )
    names = (
        f'<title id="{prefix}-title">{escape(title)}</title>'
        f'<desc id="{prefix}-desc">{escape(description)}</desc>'
    )
    head, tail = text.split(">", 1)
    return opening + head.removeprefix("<svg") + ">" + names + tail
