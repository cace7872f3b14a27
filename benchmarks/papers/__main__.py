"""Run a paper's experiments on a pair, and print its tables.

make papers PAPER="block --config my-pair.yaml"

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same command goes on after a kill; page and JSON are written
there, or to --out. Options of the configuration can be given, too (--models.draft FOLDER).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.reproduce import PAPERS, reproduce
from recipes.config import TOY
from recipes.recipe import interrupted
from recipes.run import say
from specdata.interruption import stopping_on_signals
from specdata.terminal import accept_any_text, tell, whole_number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the protocol of a command line; returns the exit status, as a recipe's."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.papers",
        "%(prog)s PAPER [--config FILE] [--quick] [--prompts N] [--out FOLDER] [--KEY VALUE ...]",
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paper", metavar="PAPER", help=", ".join(PAPERS))
    add("--config", default=TOY, help="the pair's YAML (default: the demo's pair)")
    add("--quick", action="store_true", help="fewer prompts and settings: minutes")
    add("--prompts", type=whole_number, metavar="N", help="of each set, not its `count`")
    add("--out", type=Path, help="folder of page and JSON (default: OUTPUT/papers/PAPER)")
    args, further = parser.parse_known_args(arguments)
    with stopping_on_signals():
        try:
            written = reproduce(
                args.paper,
                ["--config", str(args.config), *further],
                quick=args.quick,
                prompts=args.prompts,
                out=args.out,
            )
        except KeyboardInterrupt as stop:
            return interrupted(stop)
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            return tell(error)
    say(written.read_text(encoding="utf-8"))
    say(f"look     {written}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
