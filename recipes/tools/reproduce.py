"""Run a paper's experiments on a pair, and print its tables.

draftsmith reproduce block --config my-pair.yaml

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same command goes on after a kill; page, JSON and figures are
written there, or to --out. Options of the configuration can be given, too (--models.draft FOLDER).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config import TOY
from recipes.papers.reproduce import PAPERS, reproduce
from recipes.run import say
from specdata.interruption import Interrupted, stopping_on_signals
from specdata.terminal import accept_any_text, tell, whole_number


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run the command line; returns the exit status, as a recipe's."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        program,
        "%(prog)s PAPER [--config FILE] [--quick] [--prompts N] [--out FOLDER] [--KEY VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paper", metavar="PAPER", help=", ".join(PAPERS))
    parser.add_argument("--config", default=TOY, help="the pair's YAML (default: the demo's pair)")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and settings: minutes")
    parser.add_argument(
        "--prompts", type=whole_number, metavar="N", help="of each set, not its `count`"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of page and figures (default: OUTPUT/papers/PAPER)"
    )
    given, rest = parser.parse_known_args(arguments)
    with stopping_on_signals():
        try:
            written = reproduce(
                given.paper,
                ["--config", str(given.config), *rest],
                quick=given.quick,
                prompts=given.prompts,
                out=given.out,
            )
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            return tell(error)
        except KeyboardInterrupt as stop:
            print("\ninterrupted: run the same command again to continue", file=sys.stderr)
            return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    text = written.read_text(encoding="utf-8")
    say("\n".join(line for line in text.splitlines() if not line.startswith("![")))
    say(f"look     {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
