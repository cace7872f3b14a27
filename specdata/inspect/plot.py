"""The summary of a stored dataset as a picture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdata.inspect.summary import ACCEPTANCE, BINS, Summary
from specdata.storage.files import atomic_write

COLOURS = {"overlap": "#0072b2", "accept_prob": "#d55e00"}
# Means over fewer rows than this are noise; they are left out of the curve by position.
LEAST_ROWS = 5


def draw(summary: Summary, path: Path) -> None:
    """Write a PNG: lengths and finish reasons, and for labels the acceptance."""
    rows = 2 if summary.acceptance else 1
    figure = Figure(figsize=(11, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False)
    _lengths(axes[0, 0], summary)
    _finish(axes[0, 1], summary)
    if summary.acceptance:
        _histogram(axes[1, 0], summary)
        _by_position(axes[1, 1], summary)
    state = "" if summary.manifest["finished"] else " (unfinished)"
    name = str(summary.folder).replace("$", r"\$")
    figure.suptitle(f"{name}: {summary.rows} rows{state}", fontsize=10)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _lengths(axes: Axes, summary: Summary) -> None:
    longest = max(
        (max(group.prompts | group.completions) for group in summary.groups.values()), default=1
    )
    bins = np.linspace(0, longest + 1, min(longest + 2, 50)).tolist()
    for name, colour in (("prompts", "#999999"), ("completions", "#009e73")):
        lengths: Counter[int] = Counter()
        for group in summary.groups.values():
            lengths.update(getattr(group, name))
        axes.hist(
            list(lengths),
            weights=list(lengths.values()),
            bins=bins,
            alpha=0.6,
            color=colour,
            label=name,
        )
    axes.set(title="Lengths", xlabel="tokens", ylabel="rows")
    axes.legend(frameon=False)


def _finish(axes: Axes, summary: Summary) -> None:
    groups = sorted(summary.groups.items(), reverse=True)
    reasons = sorted({reason for _, group in groups for reason in group.finish})
    left = np.zeros(len(groups))
    for reason in reasons:
        shares = np.array([group.finish[reason] / group.rows for _, group in groups])
        axes.barh([name.replace("$", r"\$") for name, _ in groups], shares, left=left, label=reason)
        left += shares
    axes.set(title="Finish reasons", xlabel="share of rows", xlim=(0, 1))
    if reasons:
        axes.legend(loc="lower left")


def _histogram(axes: Axes, summary: Summary) -> None:
    edges = np.linspace(0, 1, BINS + 1)
    for name, spread in summary.acceptance.items():
        shares = spread.histogram / max(1.0, spread.histogram.sum())
        label = f"{ACCEPTANCE[name]}, mean {spread.mean:.3f}"
        axes.stairs(shares, edges, color=COLOURS[name], label=label)
    axes.set(title="Acceptance", xlabel="acceptance at a position", ylabel="share of positions")
    axes.legend(frameon=False)


def _by_position(axes: Axes, summary: Summary) -> None:
    for name, spread in summary.acceptance.items():
        there = spread.counts >= min(LEAST_ROWS, spread.counts.max(initial=0))
        means = spread.sums[there] / np.maximum(1.0, spread.counts[there])
        axes.plot(np.flatnonzero(there), means, color=COLOURS[name], label=ACCEPTANCE[name])
    axes.set(title="Mean acceptance by position", xlabel="position in the completion", ylim=(0, 1))
    axes.legend(frameon=False)
