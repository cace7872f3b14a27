"""A paper's tables of records that were measured: pivots, in the paper's own layout.

A record is a flat mapping of keys (set, method, verifier, length, ...) and fields: a number, or a
figure with its interval. Which of them make a table's rows and columns is data, as are the figures
that the paper prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.reporting.rendering import Table

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
    "k": "candidates",
    "alphabet": "tokens in the alphabet",
    "x": "probability of the first token",
    "weight": "weight of rejections",
    "acceptance": "acceptance probability",
    "block_efficiency": "tokens per target call",
    "over": "gain in percent",
    "saved": "time saved in percent",
}
"""Keys and fields of records in words, with their unit; a protocol adds its own (`words`)."""


def selected(table: Mapping[str, Any], measured: Mapping[str, Sequence[Record]]) -> list[Record]:
    """The records that a table is of: those of its measurements that `where` leaves."""
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
            figure = float(record[table["best"]]["value"])
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
    return "\n\n".join(part.strip() for part in parts) + "\n"
