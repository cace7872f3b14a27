"""Run a paper's experiments on a pair, and print its tables.

draftsmith reproduce block --config my-pair.yaml

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same command goes on after a kill; page, JSON and figures are
written there, or to --out. Options of the configuration can be given, too (--models.draft FOLDER).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.config import TOY
from recipes.papers.reproduce import PAPERS, reproduce
from recipes.run import say
from specdata.terminal import whole_number


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line; further options are those of the configuration."""
    parser.usage = (
        "%(prog)s PAPER [--config FILE] [--quick] [--prompts N] [--out FOLDER] "
        "[--drafts DRAFT ...] [--KEY VALUE ...]"
    )
    add = parser.add_argument
    add("paper", metavar="PAPER", help=", ".join(PAPERS))
    add("--config", default=TOY, help="the pair's YAML (default: the demo's pair)")
    add("--quick", action="store_true", help="fewer prompts and settings: minutes")
    add("--prompts", type=whole_number, metavar="N", help="of each set, not its `count`")
    add("--drafts", nargs="+", default=[], metavar="DRAFT", help="further ones (mcsd)")
    add("--out", type=Path, help="folder of page and figures (default: OUTPUT/papers/PAPER)")


def main(given: argparse.Namespace) -> int:
    """Run the protocol; returns the exit status, as a recipe's."""
    written = reproduce(
        given.paper,
        ["--config", str(given.config), *given.further],
        quick=given.quick,
        prompts=given.prompts,
        out=given.out,
        drafts=given.drafts,
    )
    text = written.read_text(encoding="utf-8")
    say("\n".join(line for line in text.splitlines() if not line.startswith("![")))
    say(f"look     {written}")
    return 0
