"""The curve of AUROC and saving against training rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specdata.storage.files import atomic_write

NAMES = {"instruct": "instructions", "maths": "maths", "code": "code"}


def draw_curve(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw AUROC and saving of each domain against rollouts a domain, as PNG.

    Args:
        points: domain -> its `rollouts`, and figures with intervals.
        path: of the PNG.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key, label, scale in (
        (left, "auroc", "AUROC, once drawn", 1.0),
        (right, "saving_over_best_k", "time saved against the best fixed length, %", 100.0),
    ):
        for number, (domain, name) in enumerate(NAMES.items()):
            rollouts = [point[domain]["rollouts"] for point in points]
            found = [point[domain][key] for point in points]
            axes.plot(rollouts, [scale * f["value"] for f in found], ".-", label=name)
            axes.fill_between(
                rollouts,
                [scale * f["low"] for f in found],
                [scale * f["high"] for f in found],
                alpha=0.15,
                color=f"C{number}",
                linewidth=0,
            )
        axes.set_xscale("log", base=2)
        counts = sorted({point[domain]["rollouts"] for point in points for domain in NAMES})
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlabel("training rollouts of the domain")
        axes.set_ylabel(label)
    left.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
