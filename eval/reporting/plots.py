"""The plots of a report as PNG files and as SVG inside a page: no pyplot, no display.

A PNG shows all datasets side by side; a page shows each on its own, so that a phone can read it.
Either way they share their axes, so that they can be compared by eye, and have one legend.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.analysis.quality import Quality
from eval.analysis.tree_results import TreeSearch
from eval.measuring.results import Results
from eval.reporting import charts
from eval.reporting.charts import (
    GRID,
    INK,
    LOOKS,
    RULES,
    label,
    place_labels,
)
from eval.reporting.positions import MIN_ROUNDS, draw_adaptive, draw_fixed, has_runs
from eval.reporting.quality_charts import draw_places, draw_positions, draw_reliability
from eval.reporting.training import HeadTraining
from eval.reporting.training_charts import (
    draw_acceptance,
    draw_by_position,
    draw_head_loss,
    draw_loss,
    draw_tokens,
)
from eval.reporting.trees import TITLE, draw_frontier
from eval.reporting.what_if import Panel
from eval.reporting.what_if_charts import draw_what_if, mark_ratios
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
        per_method: whether each method has a row of its own: the height grows with their number,
            and datasets share the other axis alone.
        finish: draws what depends on how far the axes go.
    """

    title: str
    caption: str
    draw: Draw
    per_method: bool
    finish: Draw | None = None


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
        charts.finish_pareto,
    ),
    "acceptance": Plot(
        "Acceptance by position",
        "Fixed lengths and trees, which draft every position in every round. Share of the rounds"
        " drafting this deep that accepted the position and all before it, with its 95 % interval;"
        f" the longest run of each kind, positions drafted in at least {MIN_ROUNDS} rounds.",
        draw_fixed,
        False,
    ),
    "acceptance-adaptive": Plot(
        "Acceptance by position of adaptive rules",
        "Not to be compared with fixed lengths: an adaptive rule goes on where it expects"
        " acceptance, so the tokens it drafts far out are the easy ones. A marker's area is the"
        " share of rounds that came so far; the table has how many tokens that were.",
        draw_adaptive,
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


ADAPTIVE = {"acceptance": False, "acceptance-adaptive": True}
"""Kinds that show a part of the runs: whether that is the one with adaptive lengths."""


def kinds(results: Results) -> list[str]:
    """The keys of PLOTS that these results can fill: without times no speeds and no costs."""
    left_out = {"efficiency"} if results.timed else {"speedup", "cost"}
    for kind, adaptive in ADAPTIVE.items():
        if not has_runs(results, adaptive=adaptive):
            left_out.add(kind)
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


@dataclass(frozen=True, slots=True)
class Panels:
    """What is drawn side by side: a panel a name.

    Args:
        names: their headings, at least one.
        height: inches of a panel.
        draw: draws one of them.
        shared: the axes that all have the same limits on.
        finish: draws what depends on the limits.
    """

    names: Sequence[str]
    height: float
    draw: Callable[[Axes, str], None]
    shared: Literal["xy", "x", "y", ""] = ""
    finish: Callable[[Axes, str], None] | None = None

    def together(self) -> Figure:
        """All in one figure, with the legend below."""
        return self._figure(self.names, self._limits())

    def apart(self) -> tuple[list[Figure], Legend]:
        """One figure each, without legends, and the legend of all of them."""
        limits = self._limits()
        figures = [self._figure([name], limits, legend=False) for name in self.names]
        return figures, _entries(figures)

    def _limits(self) -> dict[str, tuple[float, float]]:
        """The widest limits that a panel has on each shared axis."""
        scratch = Figure()
        drawn = []
        for index, name in enumerate(self.names):
            axes = scratch.add_subplot(len(self.names), 1, index + 1)
            self.draw(axes, name)
            drawn.append({"x": axes.get_xlim(), "y": axes.get_ylim()})
        return {
            axis: (min(each[axis][0] for each in drawn), max(each[axis][1] for each in drawn))
            for axis in self.shared
        }

    def _figure(
        self,
        names: Sequence[str],
        limits: Mapping[str, tuple[float, float]],
        *,
        legend: bool = True,
    ) -> Figure:
        columns = min(3, len(names))
        rows = -(-len(names) // columns)
        figure = Figure(figsize=(5.2 * columns, self.height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for index, name in enumerate(names):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_title(label(name, 28), loc="left", fontweight="bold")
            self.draw(axes, name)
            axes.set(**{f"{axis}lim": ends for axis, ends in limits.items()})
            if self.finish is not None:
                self.finish(axes, name)
        if legend and (shown := _entries([figure])):
            labels, artists = list(shown), list(shown.values())
            figure.legend(artists, labels, loc="outside lower center", ncols=3 * columns)
        return figure


Legend = Mapping[str, Artist]
"""Words -> an artist that is drawn so."""


def _entries(figures: Sequence[Figure]) -> Legend:
    """What the lines and bars of some figures are called, each once."""
    entries: dict[str, Artist] = {}
    for figure in figures:
        for axes in figure.axes:
            artists, words = axes.get_legend_handles_labels()
            for artist, word in zip(artists, words, strict=True):
                entries.setdefault(word, artist)
    known = [look.label for look in (*LOOKS.values(), *RULES.values())]
    order = {word: known.index(word) if word in known else len(known) for word in entries}
    return {word: entries[word] for word in sorted(entries, key=order.__getitem__)}


def legend_marks(legend: Legend, prefix: str) -> list[tuple[str, str]]:
    """Words and SVG of each entry of a legend that a page sets as text."""
    marks = []
    with mpl.rc_context(_RC):
        for index, (words, artist) in enumerate(legend.items()):
            figure = Figure(figsize=(0.44, 0.2))
            # The legend of matplotlib draws the mark; its words stay away.
            figure.legend([artist], [""], loc="center", borderpad=0, handletextpad=0, fontsize=10)
            marks.append((words, to_svg(figure, prefix=f"{prefix}-legend{index}")))
    return marks


def plot(kind: str, results: Results, datasets: Sequence[str]) -> Figure:
    """Draw one kind of figure, one panel a dataset.

    Args:
        kind: key of PLOTS.
        results: what to draw.
        datasets: at least one of its datasets.
    """
    with mpl.rc_context(_RC):
        return _placed(kind, result_panels(kind, results, datasets).together())


def plot_apart(kind: str, results: Results) -> tuple[list[Figure], Legend]:
    """The same, a figure a dataset, and the legend of all."""
    with mpl.rc_context(_RC):
        figures, legend = result_panels(kind, results, results.datasets()).apart()
        return [_placed(kind, figure) for figure in figures], legend


def result_panels(kind: str, results: Results, datasets: Sequence[str]) -> Panels:
    """The panels of one kind of figure, a key of PLOTS."""
    what = PLOTS[kind]
    methods = max(len(results.of(dataset)) for dataset in datasets)
    finish = what.finish
    return Panels(
        datasets,
        1.3 + 0.27 * methods if what.per_method else HEIGHT,
        lambda axes, name: what.draw(axes, results, name),
        shared="x" if what.per_method else "xy",
        finish=None if finish is None else lambda axes, name: finish(axes, results, name),
    )


def _placed(kind: str, figure: Figure) -> Figure:
    """Place the labels of points, which needs the final layout."""
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
    with mpl.rc_context(_RC):
        return quality_panels(kind, quality, domains).together()


def plot_quality_apart(kind: str, quality: Quality) -> tuple[list[Figure], Legend]:
    """The same, a figure a prompt set, and the legend of all."""
    with mpl.rc_context(_RC):
        return quality_panels(kind, quality, quality.domains()).apart()


def quality_panels(kind: str, quality: Quality, domains: Sequence[str]) -> Panels:
    """The panels of one kind of figure, a key of QUALITY_PLOTS."""
    draw = QUALITY_PLOTS[kind].draw
    return Panels(domains, HEIGHT, lambda axes, name: draw(axes, quality, name), shared="xy")


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
        return Panels(
            kinds, HEIGHT, lambda axes, kind: TRAINING_PLOTS[kind](axes, history)
        ).together()


def plot_training_apart(history: History) -> tuple[list[Figure], Legend]:
    """All that is known of a draft's training, a figure a kind, and the legend of all."""
    with mpl.rc_context(_RC):
        panels = Panels(
            training_kinds(history),
            HEIGHT,
            lambda axes, kind: TRAINING_PLOTS[kind](axes, history),
        )
        return panels.apart()


def plot_head_training(training: HeadTraining) -> Figure:
    """Draw the loss of a head."""
    with mpl.rc_context(_RC):
        return Panels(["loss"], HEIGHT, lambda axes, _: draw_head_loss(axes, training)).together()


def plot_trees(search: TreeSearch) -> Figure:
    """Draw how many tokens a round drafts of each kind emit."""
    with mpl.rc_context(_RC):
        return Panels([TITLE], HEIGHT, lambda axes, _: draw_frontier(axes, search)).together()


def plot_what_if(shown: Sequence[Panel]) -> Figure:
    """Draw predicted speed-ups against the cost ratio, one panel each."""
    with mpl.rc_context(_RC):
        return what_if_panels(shown).together()


def plot_what_if_apart(shown: Sequence[Panel]) -> tuple[list[Figure], Legend]:
    """The same, a figure a panel, and the legend of all."""
    with mpl.rc_context(_RC):
        return what_if_panels(shown).apart()


def what_if_panels(shown: Sequence[Panel]) -> Panels:
    """The panels of predicted speed-ups."""
    by_title = {panel.title: panel for panel in shown}
    return Panels(
        list(by_title),
        HEIGHT,
        lambda axes, title: draw_what_if(axes, by_title[title]),
        shared="y",
        finish=lambda axes, title: mark_ratios(axes, by_title[title]),
    )


def write_png(path: Path, figure: Figure) -> None:
    """Save at 150 dots an inch on white, whole or not at all."""
    with atomic_write(path) as temporary, mpl.rc_context(_RC):
        figure.savefig(
            temporary, format="png", dpi=150, facecolor="white", metadata={"Software": None}
        )


def to_svg(figure: Figure, *, prefix: str, title: str = "", description: str = "") -> str:
    """Return an inline <svg> that takes the page's ink, so that it is readable in dark mode.

    Args:
        figure: what to write.
        prefix: makes the ids of this figure unique within the page.
        title: short text for assistive technology; without it the figure is one that adds nothing
            to the words beside it.
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
    head, tail = text.split(">", 1)
    if not title:
        return f'<svg aria-hidden="true"{head.removeprefix("<svg")}>{tail}'
    opening = (
        f'<svg role="img" aria-labelledby="{prefix}-title {prefix}-desc"'
        f' preserveAspectRatio="xMidYMin meet"'
    )
    names = (
        f'<title id="{prefix}-title">{escape(title)}</title>'
        f'<desc id="{prefix}-desc">{escape(description)}</desc>'
    )
    return opening + head.removeprefix("<svg") + ">" + names + tail
