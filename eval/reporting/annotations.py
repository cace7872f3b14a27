"""Names and labels in a figure: what may be written, and where it hides nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

POINT = "point"
"""gid of annotations that `place_labels` may move."""
DATA = "data"
"""gid of lines that labels must not hide."""

# Where a label may go from its marker, in points, best first: eight sides, ever farther out.
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
    taken = _obstacles(axes, figure.dpi / 72)
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
    """Box of the words alone in pixels, without the line that leads to their point."""
    text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)


def _obstacles(axes: Axes, scale: float) -> list[Bbox]:
    """Small boxes along every line that shows data, larger ones at its markers, in pixels."""
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
