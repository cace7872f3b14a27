"""Output to a terminal, or to a file in its place: progress, and any text."""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from typing import TYPE_CHECKING, Any

from specdata.errors import USER_ERRORS, trouble_outside, without_passwords

if TYPE_CHECKING:
    from tqdm import tqdm

# Seconds between two lines of progress where there is no terminal to draw a bar on.
LINE_SECONDS = 5.0
_LINE = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def progress(
    total: int, label: str, unit: str, *, done: int = 0, is_shown: bool = True
) -> tqdm[Any]:
    """Show on stderr how far a piece of work is: a bar, or lines where stderr is no terminal.

    What it returns is told of each unit with `update`, and closed as a context. `done` are units of
    an earlier run; processes that print nothing show none.
    """
    from tqdm import tqdm

    shown: dict[str, Any] = {"file": sys.stderr}
    if not sys.stderr.isatty():
        shown = {"file": _Lines(), "mininterval": LINE_SECONDS, "bar_format": _LINE}
    shown |= {"total": total, "desc": label, "unit": unit, "initial": done}
    return tqdm(disable=not is_shown, **shown)


class _Lines(io.TextIOBase):
    """Turns what tqdm draws over and over into lines on stderr."""

    def write(self, text: str) -> int:
        """Write a line; what only moves or clears the cursor is left out."""
        if line := text.strip():
            sys.stderr.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """Flush stderr."""
        sys.stderr.flush()


def visible(text: str) -> str:
    """A text whose control characters, line breaks and tabs aside, are spelt out.

    Names come from files and folders; an escape sequence in one would command the terminal.
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1]
        for letter in text
    )


def tell(error: Exception) -> int:
    """Print an error that a user can act on, without passwords and control characters.

    Returns the exit status: 2 for unusable configuration or input, 1 for trouble while running.
    Raises the error again if it is a defect of the program.
    """
    from safetensors import SafetensorError

    outside = trouble_outside(error) or error
    if isinstance(error, USER_ERRORS):
        status, text = 2, f"error: {error}"
    elif isinstance(outside, OSError | SafetensorError):
        status, text = 1, f"error while running: {outside}. Nothing finished is lost: mend the "
        text += "cause and run the same command again"
    else:
        raise error
    text = re.sub(r"\[Errno -?\d+\] ", "", text)  # whoever reported it: what follows says it
    sys.stderr.write(f"{visible(without_passwords(text))}\n")
    return status


def whole_number(text: str) -> int:
    """A number of a command line, from 0 to 2**31 - 1: nothing that is counted has more."""
    if not text.isdecimal() or len(text) > 10 or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number below 2**31, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """A number of a command line that is above 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and finite, got {text!r}")
    return number


def accept_any_text() -> None:
    """Make stdout and stderr spell out what their encoding lacks, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
