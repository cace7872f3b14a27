"""The pictures of a report, as PNG files and as SVG inside a page: no pyplot, no display.

The colours are Okabe and Ito's, which can be told apart under every common form of colour
blindness; marker shapes repeat the distinction.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.measuring.intervals import Interval, resamples
from eval.measuring.metrics import divide, prompt_ids
from eval.measuring.pooled import fastest, pool
from eval.measuring.results import Results, Run
from eval.reporting.rendering import Bar
from specdata.storage.files import atomic_write

INK, GRID = "#24292f", "#d0d7de"
HEIGHT = 4.3
"""Inches of a panel that does not grow with the number of methods."""
MIN_ROUNDS = 10
"""Positions drafted in fewer rounds than this are not shown."""
_LINE_STYLES = ("-", "--", ":", "-.")  # tell lines of one colour apart
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
    "svg.hashsalt": "report",  # makes ids, and so the bytes, depend on the input only
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True)
class Look:
    """Methods drawn alike."""

    label: str
    colour: str
    marker: str


LOOKS = {
    "plain": Look("target alone", "#808080", "X"),
    "fixed": Look("fixed length", "#0072B2", "o"),
    "head": Look("acceptance head", "#D55E00", "s"),
    "rule": Look("training-free rule", "#009E73", "^"),
    "cost": Look("cost rule", "#E69F00", "v"),
    "tree": Look("several drafts", "#CC79A7", "D"),
    "transformers": Look("transformers' own", "#56B4E9", "P"),
}


def look_of(run: Run) -> Look:
    """The look of a run's family of methods."""
    if run.method.decoder != "speculative":
        return LOOKS["plain" if run.method.decoder == "plain" else "transformers"]
    return LOOKS["tree" if run.method.branches else run.method.stop.family]


def label(name: str, width: int = 30) -> str:
    """A name as matplotlib may draw it: one line, no mathematics, not too long."""
    flat = " ".join(name.split())
    short = flat if len(flat) <= width else flat[: width - 1] + "…"
    return short.replace("$", r"\$")


# --- one dataset on one pair of axes ---


def draw_bars(axes: Axes, results: Results, dataset: str) -> None:
    """One bar a method with its interval, the largest on top.

    Of the speed-up; of tokens a second where plain decoding was not run.
    """
    name, heading = "speedup", "speed-up over the target alone"
    if results.plain(dataset) is None:
        name, heading = "tokens_per_second", "tokens per second"
    runs = sorted(results.of(dataset), key=lambda run: float(getattr(run, name)))
    values = np.array([getattr(run, name) for run in runs], float)
    bounds = np.array([run.intervals[name] for run in runs])
    rows = np.arange(len(runs))
    looks = [look_of(run) for run in runs]
    bars = axes.barh(
        rows,
        values,
        color=[look.colour for look in looks],
        label=[look.label for look in looks],
        height=0.72,
    )
    for bar, run in zip(bars, runs, strict=True):
        if not run.method.lossless:
            bar.set(hatch="////", edgecolor="white", linewidth=0)
    errors = np.abs(bounds.T - values)
    axes.errorbar(values, rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5)
    winner = fastest(pool(results, [dataset]))
    for row, run, value, high in zip(rows, runs, values, bounds[:, 1], strict=True):
        best = winner is not None and run.name == winner[0].name
        text = f"{value:.0f}" if name == "tokens_per_second" else f"{value:.2f}"
        text += "x" if name == "speedup" else ""
        axes.annotate(
            text + (" ★" if best else "") + ("" if run.method.lossless else " biased"),
            (max(value, high), row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            fontweight="bold" if best else "normal",
        )
    if name == "speedup":
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_yticks(rows, [label(run.name) for run in runs])
    axes.margins(x=0.32)
    axes.set_xlabel(heading)
    axes.grid(axis="y", visible=False)


def positions_of(run: Run) -> list[Interval]:
    """Share of the rounds drafting each position that accepted it and all before it.

    Positions that fewer than MIN_ROUNDS rounds drafted are left out.
    """
    prompts = prompt_ids(run.generations)
    row = {name: index for index, name in enumerate(prompts)}
    drafted, accepted = np.zeros((2, len(prompts), len(run.acceptance_by_position)))
    for each in run.generations:
        depth = len(each.drafted_by_position)
        drafted[row[each.prompt_id], :depth] += each.drafted_by_position
        accepted[row[each.prompt_id], :depth] += each.accepted_by_position
    enough = int((drafted.sum(axis=0) >= MIN_ROUNDS).sum())  # deeper ones are drafted less often
    weights = resamples(len(prompts))
    shares = divide(weights @ accepted, weights @ drafted)
    return [Interval.of(shares[:, place]) for place in range(enough)]


def draw_positions(axes: Axes, results: Results, dataset: str) -> None:
    """Acceptance by position of the longest run of each kind that drafts every position.

    An adaptive rule goes on where it expects acceptance: the tokens that it drafts far out are the
    easy ones, and its curve lies higher for that alone. So adaptive rules are not drawn.
    """
    longest: dict[tuple[object, ...], Run] = {}
    fixed = [run for run in results.of(dataset) if run.method.fixed_length]
    fixed.sort(key=lambda run: (run.method.branches, run.method.deepest))
    for run in fixed:
        method = run.method
        kind = (run.draft, method.decoder, method.verifier, str(method.verifier_args))
        longest[(method.name,) if method.branches else kind] = run
    for run in longest.values():
        found, look = positions_of(run), look_of(run)
        places = range(1, len(found) + 1)
        axes.plot(
            places,
            [each.value for each in found],
            color=look.colour,
            marker=look.marker,
            markersize=4.5,
            linewidth=1.4,
            markerfacecolor=look.colour if run.method.lossless else "none",
            linestyle=_style(axes, look),
            label=label(run.name, 22),
        )
        axes.fill_between(
            places,
            [each.low for each in found],
            [each.high for each in found],
            color=look.colour,
            alpha=0.12,
            linewidth=0,
        )
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted, of the rounds that drafted it")


def _style(axes: Axes, look: Look) -> str:
    before = sum(line.get_color() == look.colour for line in axes.get_lines())
    return _LINE_STYLES[before % len(_LINE_STYLES)]


# --- whole figures ---


DRAW = {"speedup": draw_bars, "acceptance": draw_positions}


def plot(kind: str, results: Results, datasets: Sequence[str]) -> Figure:
    """Draw one kind of figure, one panel a dataset, all with the same limits.

    Args:
        kind: key of `DRAW`; bars, a row a method, share the other axis alone.
        results: what to draw.
        datasets: at least one of its datasets.
    """
    is_bars = kind == "speedup"
    methods = max(len(results.of(dataset)) for dataset in datasets)
    height = 1.3 + 0.27 * methods if is_bars else HEIGHT
    columns = min(3, len(datasets))
    rows = -(-len(datasets) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        first: Axes | None = None
        entries: dict[str, Artist] = {}
        for index, dataset in enumerate(datasets):
            shared = None if is_bars else first
            axes = figure.add_subplot(rows, columns, index + 1, sharex=first, sharey=shared)
            first = first or axes
            axes.set_title(label(dataset, 28), loc="left", fontweight="bold")
            DRAW[kind](axes, results, dataset)
            artists, words = axes.get_legend_handles_labels()
            entries.update(dict(zip(words, artists, strict=True)))
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=3 * columns
        )
    return figure


def drawings(results: Results) -> list[str]:
    """Acceptance by position, one <svg> a dataset, which a phone can read; with equal limits."""
    datasets, svgs = results.datasets(), []
    limits = plot("acceptance", results, datasets).axes[0]
    for index, dataset in enumerate(datasets):
        figure = plot("acceptance", results, [dataset])
        figure.axes[0].set_xlim(limits.get_xlim())
        figure.axes[0].set_ylim(limits.get_ylim())
        title = f"Acceptance by position, {dataset}"
        svgs.append(to_svg(figure, prefix=f"acceptance{index}", title=title))
    return svgs


def write_png(path: Path, figure: Figure) -> None:
    """Save at 150 dots an inch on white, whole or not at all."""
    with atomic_write(path) as temporary, mpl.rc_context(STYLE):
        figure.savefig(
            temporary, format="png", dpi=150, facecolor="white", metadata={"Software": None}
        )


def to_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Return an inline <svg> that takes the page's ink, so that it is readable in dark mode.

    Args:
        figure: what to write.
        prefix: makes the ids of this figure unique within the page.
        title: short text for assistive technology.
    """
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
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
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


# --- the table of verifiers ---


def verifier_picture(bars: Sequence[Bar], path: Path) -> None:
    """Write bars grouped by the kind of draft, each with its whisker and its ceiling, as a PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.6 + 0.26 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        groups = list(dict.fromkeys(bar.group for bar in bars))
        rows = np.array([n + 0.7 * groups.index(bar.group) for n, bar in enumerate(bars)])
        values = np.array([bar.value.value for bar in bars])
        whiskers = np.abs(np.array([[b.value.low, b.value.high] for b in bars]).T - values)
        colours = [look.colour for look in LOOKS.values()][1:]
        for row, bar in zip(rows, bars, strict=True):
            colour = colours[groups.index(bar.group) % len(colours)]
            hatch, edge = ("////", "white") if bar.look == "biased" else ("", colour)
            axes.barh(row, bar.value.value, color=colour, height=0.8, hatch=hatch, edgecolor=edge)
            if bar.mark is not None:
                axes.plot([bar.mark, bar.mark], [row - 0.45, row + 0.45], color=INK)
        axes.errorbar(values, rows, xerr=whiskers, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        axes.set_yticks(rows, [label(f"{bar.group}: {bar.name}", 60) for bar in bars])
        axes.invert_yaxis()
        axes.set_xlabel("expected tokens a call of the target; line: ceiling")
        FigureCanvasAgg(figure)
    write_png(path, figure)
