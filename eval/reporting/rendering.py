"""Text made from the templates of `eval`'s rooms, and what a page's sections hold."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from eval.measuring.intervals import Interval
from specdata.prompts.reading import is_file
from specdata.sources import hub_source

NOT_MEASURED = "\N{EN DASH}"
"""The text for a number that does not exist."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a picture.

    Args:
        value: its length, with the interval that is its whisker.
        mark: where a line crosses it, such as the target alone, or a ceiling; None draws none.
        look: "best" in the accent colour, for what surely wins; "first" dark, "biased" hollow.
    """

    name: str
    value: Interval
    text: str
    mark: float | None = None
    look: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whatever shows it: the terminal, the page, a card or a document.

    Args:
        columns: heading and how to read it, of every column after the name; the deciding one
            first, which a phone shows. None: the rows are facts, names and words.
        rows: name and cells; of a cell such as "2.55x [2.28, 2.91]" a page sets the brackets small.
        wins: names of the rows that are green: lossless, and better by an interval above zero.
    """

    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[tuple[str, Sequence[str]]] = ()
    first: str = "method"
    note: str = ""
    wins: Collection[str] = ()

    def markdown(self) -> str:
        """Headings and rows as Markdown, without the note."""
        headings = [self.first, *(name for name, _ in self.columns)]
        lines = [headings, *([name, *cells] for name, cells in self.rows)]
        rows = [f"| {' | '.join(map(_in_cell, line))} |\n" for line in lines]
        rows.insert(1, f"| --- |{' ---: |' * len(self.columns)}\n")
        return "".join(rows)


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page, folded."""

    title: str
    sentence: str
    table: Table = Table()


def render(template: str, **values: Any) -> str:
    """Fill a template of a room's folder `templates`; a value that it lacks is an error.

    Values in `*.html.jinja` are escaped as HTML. In Markdown a template escapes those that need it
    with the filter `md`, because most of a card is code in which nothing may be escaped.
    """
    return _environment().get_template(template).render(**values)


def hub_refusal(name: str) -> str | None:
    """Why the Hub would refuse a repository's name; None if it would not."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None if "/" in name else "it has no owner"


def hub_id(name: str | None) -> str | None:
    """The Hub id in a name, without its revision; None for a folder, a file or a URL."""
    if name is None or is_file(name) or Path(name).exists():
        return None
    source, _ = hub_source(name)
    return None if hub_refusal(source) else source


def public_name(name: str) -> str:
    """A Hub id as it is; of a folder only its last part, so that no local path is published."""
    if hub_id(name) is not None:
        return name
    path = Path(name)
    # The pipeline calls its model folders "model"; the folder around it says which.
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def source_and_revision(name: str) -> tuple[str, str | None]:
    """A Hub id and its revision, if it has one, as other libraries take them; or a folder."""
    return hub_source(name) if hub_id(name) else (name, None)


def source_arguments(name: str) -> str:
    """The arguments of `from_pretrained` in code."""
    source, revision = source_and_revision(name)
    return json.dumps(source) + (f", revision={json.dumps(revision)}" if revision else "")


def escape_markdown(text: str) -> str:
    """Text that Markdown and HTML show as it is, within a line or a table cell."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(str(text).split()))


def _in_cell(text: str) -> str:
    """Text as a cell of a Markdown table; brackets around figures stay as they are."""
    return re.sub(r"\\\[([-+\d., ]*)\\\]", r"[\1]", escape_markdown(text))


def format_number(value: float | None) -> str:
    """Four significant digits, or a dash for None."""
    return NOT_MEASURED if value is None else f"{value:.4g}"


def longest(bars: Sequence[Bar]) -> float:
    """The right end of a picture: no bar, whisker or mark lies beyond it."""
    ends = [bar.value.high for bar in bars if bar.value.exists]
    return max(*ends, *(max(bar.value.value, bar.mark or 0.0) for bar in bars), 0.0)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(sorted(Path(__file__).parents[1].glob("*/templates"))),
        autoescape=select_autoescape(enabled_extensions=("html.jinja",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escape_markdown, "quoted": shlex.quote, "number": format_number}
    environment.filters |= {"longest": longest, "source": source_arguments}
    return environment
