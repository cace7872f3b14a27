"""Write a draft in EAGLE-3's layout, for engines.

    draftsmith export DRAFT --out FOLDER [--layout speculators]

DRAFT is one of `draft.init.layout: eagle3`, or an imported one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.run import say
from specdata.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the draft to release")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--layout",
        choices=("eagle", "speculators"),
        default="eagle",
        help="of EAGLE's own code, which vLLM and SGLang load (default), or speculators'",
    )


def main(given: argparse.Namespace) -> int:
    """Write a folder for engines; returns the exit status."""
    if not (given.folder / "config.json").is_file():
        raise ConfigError(f"{given.folder} must be a folder with a config.json, and has none")
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    from distill.eagle import write_eagle

    tokens, taps, target = write_eagle(given.folder, given.out, given.layout)
    say(f"{given.out}: {tokens:,} tokens, taps {taps}, for {target}")
    return 0
