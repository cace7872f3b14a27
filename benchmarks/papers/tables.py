"""A paper's tables and figures of records that were measured: pivots, in the paper's own layout.

A record is a flat mapping of keys (set, method, verifier, length, ...) and fields: a number, or a
figure with its interval. Which of them make a table's rows and columns is data, as are the figures
that the paper prints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.reporting.rendering import Table
from specdata.storage.files import atomic_write

Record = dict[str, Any]
ABSENT = ""
WORDS = {
    "set": "prompt set",
    "verifier": "verification",
    "name": "rule",
    "scheme": "rule",
    "of": "decoding",
    "measurement": "measured",
    "length": "draft length",
    "widths": "k-configuration",
    "k": "candidates",
    "alphabet": "tokens in the alphabet",
    "tokens left": "tokens that are left",
    "x": "probability of the first token",
    "weight": "weight of rejections",
    "acceptance": "acceptance probability",
    "share": "share of positions",
    "block_efficiency": "tokens per target call",
    "speedup": "speed-up over the target alone",
    "tokens_per_second": "tokens a second",
    "acceptance_rate": "accepted of drafted",
    "discard_rate": "discarded tokens an emitted token",
    "verification_rate": "target calls an emitted token",
    "over": "gain in percent",
    "saved": "time saved in percent",
    "t_draft": "seconds of a drafted token",
    "t_target": "seconds of a target call",
}
"""Keys and fields of records in words, with their unit; a protocol adds its own (`words`)."""


def selected(table: Mapping[str, Any], measured: Mapping[str, Sequence[Record]]) -> list[Record]:
    """The records that a table or figure is of: those of its measurements that `where` leaves."""
    names = [table["of"]] if isinstance(table["of"], str) else table["of"]
    where = {
        key: values if isinstance(values, list) else [values]
        for key, values in table.get("where", {}).items()
    }
    return [
        record
        for name in names
        for record in measured[name]
        if all(record.get(key, ABSENT) in values for key, values in where.items())
    ]


def pivot(table: Mapping[str, Any], records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Row label -> column label -> figure, both in the order in which records have them.

    Of several records of one row and column the last is shown, or the one whose field `best` is
    largest.
    """
    rows: dict[str, dict[str, Any]] = {}
    largest: dict[tuple[str, str], float] = {}
    for record in records:
        row, column = _label(record, table["rows"]), _label(record, table.get("columns", []))
        if "best" in table:
            figure = float(_middle(record[table["best"]]))
            if figure < largest.get((row, column), figure):
                continue
            largest[row, column] = figure
        for heading, field in table["values"].items():
            if record.get(field) is not None:
                alone = column and len(table["values"]) == 1
                name = column if alone else ", ".join(filter(None, [column, heading]))
                rows.setdefault(row, {})[name] = record[field]
    return rows


def _label(record: Record, keys: str | Sequence[str]) -> str:
    names = [keys] if isinstance(keys, str) else keys
    return ", ".join(_text(record[name]) for name in names if record.get(name) is not None)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def figure_text(figure: Any, digits: int) -> str:
    """A figure, with the deviation over seeds and the 95 % interval where it has them."""
    if not isinstance(figure, Mapping):
        return f"{figure:.{digits}f}" if isinstance(figure, float) else str(figure)
    text = f"{figure['value']:.{digits}f}"
    if figure.get("deviation") is not None:
        text += f" ± {figure['deviation']:.{digits}f}"
    if figure["low"] is None:  # of too few prompts
        return text
    return f"{text} [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"


def with_paper(
    table: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Any]],
    words: Mapping[str, str] = WORDS,
) -> Table:
    """A table with the paper's figures: in the same cell where we have it, else in own rows."""
    printed = paper_figures(table)
    every = [*rows.values(), *printed.values()]
    columns = list(dict.fromkeys(column for row in every for column in row))
    digits, shown = table.get("digits", 3), []
    for name, row in rows.items():
        paper, cells = printed.get(name, {}), []
        for column in columns:
            cell = figure_text(row[column], digits) if column in row else ABSENT
            beside = f"(paper: {paper[column]})" if column in paper else ABSENT
            cells.append(" ".join(filter(None, [cell, beside])))
        shown.append((name, cells))
    for name, paper in printed.items():
        if name not in rows:
            shown.append((f"paper: {name}", [f"{paper.get(c, ABSENT)}" for c in columns]))
    return Table([(column, "") for column in columns], shown, first=_words(table["rows"], words))


def _words(keys: str | Sequence[str], words: Mapping[str, str]) -> str:
    names = [keys] if isinstance(keys, str) else keys
    return ", ".join(words.get(name, name) for name in names)


def paper_figures(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the paper's figures, row label -> column label -> figure.

    A row may be a list, of figures in the columns `paper_columns`.
    """
    printed = {}
    for name, row in table.get("paper", {}).items():
        listed = isinstance(row, list)
        cells = zip(table["paper_columns"], row, strict=True) if listed else row.items()
        printed[str(name)] = {str(column): value for column, value in cells if value is not None}
    return printed


def page(protocol: Mapping[str, Any], measured: Mapping[str, Sequence[Record]], of: str) -> str:
    """The Markdown page of a paper, of its records by measurement.

    `of` says what they were measured on, and by which command.
    """
    parts = [f"# {protocol['title']}", of, protocol["differs"].strip()]
    words = WORDS | protocol.get("words", {})
    for table in protocol["tables"]:
        body = with_paper(table, pivot(table, selected(table, measured)), words).markdown()
        cells = [*table["values"].values()] if len(table["values"]) == 1 else []
        if cells and "columns" in table:  # headings say only what differs
            cells = [f"Cells: {_words(cells, words)}; columns: {_words(table['columns'], words)}."]
            body = "\n\n".join([*cells, body])
        parts += [f"## {table['title']}", *filter(None, [table.get("note", "").strip()]), body]
    for figure in protocol["figures"]:
        parts += [f"## {figure['title']}", *filter(None, [figure.get("note", "").strip()])]
        parts.append(f"![{figure['title']}]({figure['name']}.svg)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def write_figure(
    path: Path,
    figure: Mapping[str, Any],
    measured: Mapping[str, Sequence[Record]],
    words: Mapping[str, str],
) -> None:
    """Draw a figure as SVG: lines or bars of one field over another, a panel a key."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from benchmarks.table import STYLE

    panels: dict[str, list[Record]] = {}
    for record in selected(figure, measured):
        panels.setdefault(_label(record, figure.get("panels", [])), []).append(record)
    columns = 2 if len(panels) == 4 else min(3, max(1, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    # Words stay words: a fifth of the size, and a reader can search them.
    look: dict[Any, Any] = {
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
        "svg.hashsalt": path.stem,  # makes ids, and so the bytes, depend on the input only
    }
    with mpl.rc_context({**STYLE, **look}):
        drawn = Figure(figsize=(4.2 * columns, 4.3 * lines), layout="constrained")
        FigureCanvasSVG(drawn)
        every = drawn.subplots(lines, columns, squeeze=False, sharey=True).flatten()
        for axes, (name, of_panel) in zip(every, panels.items(), strict=False):
            axes.set_title(name, loc="left", fontweight="bold")
            axes.set_xlabel(figure.get("x_label", _words(figure["x"], words)))
            _draw(axes, figure, of_panel)
        every[0].set_ylabel(figure.get("y_label", _words(figure["y"], words)))
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        shown, words = every[0].get_legend_handles_labels()
        if any(words):
            drawn.legend(shown, words, loc="outside lower center", ncols=2 * columns)
        with atomic_write(path) as temporary:
            drawn.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


def _draw(axes: Any, figure: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Each line of a panel, its interval as a band or whisker."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.get(figure["x"]) is not None and record.get(figure["y"]) is not None:
            groups.setdefault(_label(record, figure.get("lines", [])), []).append(record)
    for number, (name, points) in enumerate(groups.items()):
        if len(points) == 1 and isinstance(points[0][figure["x"]], str):  # not on the axis: a level
            middle = _middle(points[0][figure["y"]])
            axes.axhline(middle, color="0.4", linestyle=":", linewidth=1.2, label=name)
            continue
        if figure.get("kind") == "front":
            # The points that none beats in both, where less is better.
            points = sorted(points, key=lambda each: [_middle(each[figure[axis]]) for axis in "xy"])
            least = itertools.accumulate((_middle(each[figure["y"]]) for each in points), min)
            points = [
                each
                for each, before in zip(points, [math.inf, *least], strict=False)
                if _middle(each[figure["y"]]) < before
            ]
        middles = [_middle(record[figure["y"]]) for record in points]
        low, high = (
            [_middle(record[figure["y"]], side) for record in points] for side in ("low", "high")
        )
        over = [_middle(record[figure["x"]]) for record in points]
        if figure.get("kind") == "bars":
            width = 0.8 / len(groups)
            places = [place + width * number for place in range(len(points))]
            spans = [[m - a for m, a in zip(middles, low, strict=True)]]
            spans.append([b - m for m, b in zip(middles, high, strict=True)])
            axes.bar(places, middles, width, yerr=spans, label=name, error_kw={"elinewidth": 0.8})
            axes.set_xticks([n + 0.4 - width / 2 for n in range(len(points))], map(str, over))
        else:
            # Fronts run along one field, which may not be in the order of what was varied.
            (line,) = axes.plot(over, middles, marker="o", markersize=3, linewidth=1.2, label=name)
            if low != high:
                axes.fill_between(over, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _middle(figure: Any, part: str = "value") -> Any:
    if not isinstance(figure, Mapping):
        return figure
    return figure["value"] if figure[part] is None else figure[part]
