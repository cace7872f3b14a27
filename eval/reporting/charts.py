"""One dataset on one pair of axes: speed, Pareto, cost.

The colours are Okabe and Ito's, which can be told apart under every common form of colour
blindness; marker shapes repeat the distinction.

Labels of points are placed here and not by a library. On the demo's Pareto plot and on eight sets
of synthetic results (399 labels) `place_labels` left one label that overlaps another and none that
hides a marker or a line; textalloc 1.2.4 left 6 of the latter with its best settings found, with
leader lines at every label; adjustText 1.4.0 hid its marker or line with nearly all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from eval.measuring.results import Results, Run, fastest

INK, GRID = "#24292f", "#d0d7de"
POINT = "point"
"""gid of annotations that `place_labels` may move."""
DATA = "data"
"""gid of lines that labels must not hide."""


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


RULES = {
    "confidence": Look("confidence", "#009E73", "^"),
    "entropy": Look("entropy", "#4DAF4A", "v"),
    "cumulative": Look("cumulative", "#1B7837", "<"),
    "logit": Look("logit", "#66A61E", ">"),
    "margin": Look("margin", "#00796B", "p"),
    "numbers": Look("numbers", "#8FBC5A", "h"),
}
"""Training-free rules: shades of one colour, a marker each; the same in every drawing."""


def look_of(run: Run) -> Look:
    """How a method is drawn: as its family, training-free rules each in their own way."""
    key = family(run)
    return RULES.get(run.stop or "", LOOKS[key]) if key == "rule" else LOOKS[key]


def family(run: Run) -> str:
    """Key of LOOKS for a run."""
    if run.drafter is None:
        return "plain"
    if run.branching:
        return "tree"
    if run.drafter == "transformers":
        return "transformers"
    return run.rule.family if run.rule else "rule"


def draw_speed(axes: Axes, results: Results, dataset: str) -> None:
    """Bars of the speed-up over plain decoding (tokens/s where plain was not run)."""
    relative = results.plain(dataset) is not None
    _draw_bars(axes, results.of(dataset), "speedup" if relative else "tokens_per_second")
    if relative:
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlabel("speed-up over the target alone" if relative else "tokens per second")


def draw_efficiency(axes: Axes, results: Results, dataset: str) -> None:
    """Bars of the block efficiency, for methods that were not timed."""
    _draw_bars(axes, results.of(dataset), "block_efficiency")
    axes.set_xlabel("tokens per forward of the target")


def _draw_bars(axes: Axes, given: Sequence[Run], name: str) -> None:
    """One bar a run with the interval of that figure, the largest on top."""
    runs = sorted(given, key=lambda run: float(getattr(run, name)))
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
        if not run.lossless:
            bar.set(hatch="////", edgecolor="white", linewidth=0)
    errors = np.abs(bounds.T - values)
    axes.errorbar(values, rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5)
    winner = fastest(runs)
    for row, run, value, high in zip(rows, runs, values, bounds[:, 1], strict=True):
        text = {"speedup": f"{value:.2f}x", "tokens_per_second": f"{value:.0f}"}.get(
            name, f"{value:.2f}"
        )
        best = winner is not None and run is winner[0]
        axes.annotate(
            text + (" ★" if best else "") + ("" if run.lossless else " biased"),
            (max(value, high), row),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=8,
            fontweight="bold" if best else "normal",
        )
    axes.set_yticks(rows, [label(run.method) for run in runs])
    axes.set_xlim(0, float(np.max(np.maximum(values, bounds[:, 1]))) * 1.32)
    axes.grid(axis="y", visible=False)


def series(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ only in length or threshold, each series ordered by it."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        # A fixed length is the swept value itself; elsewhere it is only the cap.
        cap = None if run.fixed_length else run.length
        key = (run.draft, run.head, run.drafter, run.verifier, run.stop, cap, str(run.parameters))
        groups.setdefault(key, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: (run.length or 0, run.threshold or 0.0))
    return list(groups.values())


def draw_pareto(axes: Axes, results: Results, dataset: str) -> None:
    """Verification rate against discard rate of the chain methods; lower left is better.

    Trees are left out: they discard siblings by design, so their nodes do not compare.
    """
    for group in series([r for r in results.of(dataset) if r.drafter in ("chain", "transformers")]):
        look = look_of(group[0])
        axes.plot(
            [run.discard_rate for run in group],
            [run.verification_rate for run in group],
            color=look.colour,
            marker=look.marker,
            markersize=6,
            markerfacecolor=look.colour if group[0].lossless else "none",
            linewidth=1.4,
            linestyle="-" if group[0].verifier == "token" else "--",
            label=look.label,
            gid=DATA,
        )
        for run in group:
            values = np.array([run.discard_rate, run.verification_rate])
            bounds = [run.intervals[name] for name in ("discard_rate", "verification_rate")]
            errors = np.abs(np.transpose(bounds) - values)
            axes.errorbar(
                values[:1],
                values[1:],
                xerr=errors[:, :1],
                yerr=errors[:, 1:],
                fmt="none",
                ecolor=look.colour,
                elinewidth=0.7,
                alpha=0.55,
                zorder=0.8,
            )
            axes.annotate(
                _point_name(run),
                (run.discard_rate, run.verification_rate),
                (0, 0),
                textcoords="offset points",
                fontsize=7.5,
                ha="center",
                va="center",
                arrowprops={
                    "arrowstyle": "-",
                    "color": INK,
                    "alpha": 0.5,
                    "linewidth": 0.6,
                    "shrinkA": 0,
                    "shrinkB": 4.5,
                },
                gid=POINT,
            )
    axes.margins(0.14)
    axes.set_xlabel("discard rate  (N discarded / N)")
    axes.set_ylabel("verification rate  (N target / N)")


def _point_name(run: Run) -> str:
    """What tells a point from the others of its series."""
    verifier = "" if run.verifier == "token" else f"{run.verifier} "
    if run.drafter == "transformers":
        return label(f"HF K={run.length}")
    if run.fixed_length:
        return label(f"{verifier}K={run.length}")
    if "nodes" in run.parameters:
        return label(f"{verifier}{run.parameters['nodes']} nodes")
    stop = "" if family(run) == "head" else f"{run.stop} "
    value = "" if run.threshold is None else f"{run.threshold:g}"
    return label(f"{verifier}{stop}{value}")


def finish_pareto(axes: Axes, results: Results, dataset: str) -> None:
    """Join points of equal speed-up by SpecDec++ Eq. 5.1 with the dataset's fitted times.

    Grey lines t_d (1 + x) + (t_t - t_d) y = t_t / s for a few round values of the speed-up s, as
    far as the axes go.
    """
    fit = results.latency.get(dataset)
    if fit is None or not 0 < fit.t_draft < fit.t_target:
        return
    xlim, ylim = axes.get_xlim(), axes.get_ylim()
    base, slope = fit.t_draft / fit.t_target, 1 - fit.t_draft / fit.t_target
    slowness = [base * (1 + x) + slope * y for x in xlim for y in ylim]
    ticks = np.asarray(MaxNLocator(6).tick_values(1 / max(slowness), 1 / max(min(slowness), 0.05)))
    for speedup in ticks[ticks > 0].tolist():
        ends = [(1 / speedup - base * (1 + x)) / slope for x in xlim]
        axes.plot(xlim, ends, color=INK, alpha=0.45, linewidth=0.8, linestyle=":", zorder=0.5)
        if ends[0] <= ylim[0] or ends[1] >= ylim[1]:
            continue
        leaves_right = ends[1] > ylim[0]
        at_bottom = (1 / speedup - slope * ylim[0]) / base - 1
        axes.annotate(
            f"{speedup:g}x",
            (xlim[1], ends[1]) if leaves_right else (at_bottom, ylim[0]),
            (-2, 1) if leaves_right else (1, 2),
            textcoords="offset points",
            fontsize=7,
            alpha=0.7,
            ha="right" if leaves_right else "left",
            va="bottom",
        )
    axes.set(xlim=xlim, ylim=ylim)


PARTS = (("target", "#808080"), ("draft", "#0072B2"), ("overhead", "#E69F00"), ("rest", "#56B4E9"))


def draw_cost(axes: Axes, results: Results, dataset: str) -> None:
    """Milliseconds of an emitted token, of target, draft, overhead and the rest; 95 % intervals."""
    runs = sorted(results.of(dataset), key=lambda run: run.tokens_per_second or 0.0)
    left = np.zeros(len(runs))
    for part, colour in PARTS:
        widths = np.array([_milliseconds(run, part) for run in runs])
        axes.barh(range(len(runs)), widths, left=left, color=colour, height=0.72, label=part)
        left += widths
    fastest_first = np.array([run.intervals["tokens_per_second"][::-1] for run in runs])
    errors = np.abs(1000 / fastest_first.T - left)
    rows = np.arange(len(runs))
    axes.errorbar(left, rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5)
    axes.set_yticks(rows, [label(run.method) for run in runs])
    axes.set_xlabel("milliseconds per emitted token")
    axes.grid(axis="y", visible=False)


def _milliseconds(run: Run, part: str) -> float:
    known = run.seconds["draft"] + run.seconds["target"] + run.seconds["overhead"]
    seconds = max(0.0, run.seconds["total"] - known) if part == "rest" else run.seconds[part]
    return 1000 * seconds / run.tokens


# --- labels ---

# Offsets of a label from its marker in points, best first: eight sides, at growing distances.
_SIDES = ((1, 0.6), (-1, 0.6), (1, -0.6), (-1, -0.6), (0, 1.1), (0, -1.1), (1.3, 0), (-1.3, 0))
_OFFSETS = [(far * x, far * y) for far in (7, 11, 15, 20, 27, 35) for x, y in _SIDES]


def label(name: str, width: int = 30) -> str:
    """A name as matplotlib may draw it: one line, no mathematics, not too long."""
    flat = " ".join(name.split())
    short = flat if len(flat) <= width else flat[: width - 1] + "…"
    return short.replace("$", r"\$")


def place_labels(axes: Axes) -> None:
    """Move every annotation with the gid POINT to where it hides no marker, line or other text.

    Call it once the layout is final: positions are found in pixels.
    """
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    frame = axes.get_window_extent(renderer)
    texts = [child for child in axes.get_children() if isinstance(child, Annotation)]
    movable = [text for text in texts if text.get_gid() == POINT]
    taken = data_boxes(axes, figure.dpi / 72)
    taken += [extent(text, renderer) for text in texts if text not in movable]
    for text in movable:
        width = extent(text, renderer).width * 72 / figure.dpi
        best, fewest = (0.0, 0.0), np.inf
        for dx, dy in _OFFSETS:
            offset = (dx + float(np.sign(dx)) * width / 2, dy)
            text.set_position(offset)
            box = extent(text, renderer)
            inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            clashes = box.count_overlaps(taken) + (0 if inside else 9)
            if clashes < fewest:
                best, fewest = offset, clashes
            if clashes == 0:
                break
        text.set_position(best)
        taken.append(extent(text, renderer).padded(6))


def extent(text: Annotation, renderer: RendererBase) -> Bbox:
    """Box of the words in pixels, without the line that leads to their point."""
    text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)


def data_boxes(axes: Axes, scale: float) -> list[Bbox]:
    """What labels must not hide, in pixels: boxes along lines that show data and at their markers.

    Args:
        axes: with lines of the gid DATA.
        scale: pixels a point.
    """
    boxes = []
    for line in axes.get_lines():
        if line.get_gid() != DATA:
            continue
        corners = axes.transData.transform(np.asarray(line.get_xydata(), dtype=float))
        spots = [(x, y, 4.0) for x, y in corners]
        for start, end in pairwise(corners):
            steps = max(2, int(np.hypot(*(end - start)) / (4 * scale)))
            spots += [(*(start + (end - start) * t), 1.5) for t in np.linspace(0, 1, steps)]
        boxes += [
            Bbox.from_extents(x - r * scale, y - r * scale, x + r * scale, y + r * scale)
            for x, y, r in spots
        ]
    return boxes
