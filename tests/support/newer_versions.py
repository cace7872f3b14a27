"""Print each package whose version here is not that of constraints.txt, with both versions.

`make smoke` prints it where a test failed: what is new since the suite passed is the first suspect.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

if __name__ == "__main__":
    for line in CONSTRAINTS.read_text().splitlines():
        name, separator, pinned = line.partition("==")
        with suppress(PackageNotFoundError):
            if separator and (found := version(name)) != pinned:
                print(f"{name}: {pinned} in constraints.txt, {found} here")  # noqa: T201
