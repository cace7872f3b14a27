"""The picture of the benchmark: losses, how much data is enough, and which size pays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdata.storage.files import atomic_write

NAMES = {"instruct": "instructions", "maths": "maths", "code": "code"}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the parts that a report holds, as PNG."""
    panels = [
        (panel, report[part])
        for part, panel in (("objectives", _objectives), ("data", _data), ("size", _size))
        if part in report
    ]
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 5), layout="constrained")
    for number, (panel, part) in enumerate(panels, 1):
        panel(figure.add_subplot(1, len(panels), number), part)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _objectives(axes: Axes, part: Mapping[str, Any]) -> None:
    """The gain of each domain, for each loss."""
    rows = part["rows"]
    for number, (domain, name) in enumerate(NAMES.items()):
        gains = [row["domains"][domain]["gain"] for row in rows.values()]
        values = [gain["value"] for gain in gains]
        errors = [
            [gain["value"] - gain["low"] for gain in gains],
            [gain["high"] - gain["value"] for gain in gains],
        ]
        places = [place + 0.2 * (number - 1) for place in range(len(rows))]
        axes.errorbar(values, places, xerr=errors, fmt=".", label=name)
    axes.axvline(0.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [*rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("acceptance gained")
    axes.legend()


def _data(axes: Axes, part: Mapping[str, Any]) -> None:
    """Acceptance against rollouts."""
    for (how, points), style in zip(part["points"].items(), (".:", ".-"), strict=True):
        for number, (domain, name) in enumerate(NAMES.items()):
            found = [point["domains"][domain]["acceptance"] for point in points]
            axes.plot(
                [point["rollouts"] for point in points],
                [each["value"] for each in found],
                style,
                color=f"C{number}",
                label=f"{name}, {how}",
            )
    counts = [point["rollouts"] for points in part["points"].values() for point in points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({*counts}), [str(count) for count in sorted({*counts})])
    axes.minorticks_off()
    axes.set_xlabel("training rollouts of three domains")
    axes.set_ylabel("acceptance")
    axes.legend(fontsize=7)


def _size(axes: Axes, part: Mapping[str, Any]) -> None:
    """The speed-up against what a drafted token costs."""
    for name, row in part["rows"].items():
        best = row["speedup"]["block"]
        axes.errorbar(
            [row["cost"]],
            [best["value"]],
            yerr=[[best["value"] - best["low"]], [best["high"] - best["value"]]],
            fmt="o",
            markersize=4,
        )
        axes.annotate(name, (row["cost"], best["value"]), fontsize=7)
    axes.set_xlabel("time of a drafted token / time of the target")
    axes.set_ylabel("expected speed-up, block verification")
