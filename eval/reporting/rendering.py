"""Text made from the templates in `eval/reporting/templates`."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

NOT_MEASURED = "\N{EN DASH}"
"""The text for a number that does not exist."""


def render(template: str, **values: Any) -> str:
    """Fill a template; a value that the template needs and does not get is an error.

    Values in `*.html.jinja` are escaped as HTML. In Markdown a template escapes those that need it
    with the filter `md`, because most of a card is code in which nothing may be escaped.

    Args:
        template: name of a file in the folder of templates.
        values: what the template refers to.
    """
    return _environment().get_template(template).render(**values)


def escape_markdown(text: str) -> str:
    """Text that Markdown and HTML show as it is, within a line or a table cell."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(str(text).split()))


def format_number(value: float | None) -> str:
    """Four significant digits, or a dash for None."""
    return NOT_MEASURED if value is None else f"{value:.4g}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=select_autoescape(enabled_extensions=("html.jinja",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escape_markdown, "quoted": shlex.quote, "number": format_number}
    return environment
