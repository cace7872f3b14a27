"""Write a draft in EAGLE-3's or DSpark's layout, for engines.

    draftsmith export DRAFT --out FOLDER [--layout speculators]
    draftsmith export DRAFT --out FOLDER [--head HEAD] [--target TARGET]

DRAFT is one of `draft.init.layout: eagle3` or `dspark`, or an imported one. DSpark's has a slot for
HEAD, of `head.kind: confidence`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.run import say
from specdata.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the draft to release")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--layout",
        choices=("eagle", "speculators"),
        help="of EAGLE-3: of EAGLE's own code, which vLLM and SGLang load (default), or "
        "speculators'",
    )
    parser.add_argument("--head", type=Path, help="of DSpark: its acceptance head")
    parser.add_argument("--target", help="its target, if that is not where it was at training")


def main(given: argparse.Namespace) -> int:
    """Write a folder for engines; returns the exit status."""
    if not (given.folder / "config.json").is_file():
        raise ConfigError(f"{given.folder} must be a folder with a config.json, and has none")
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    from distill.engine_layouts import of_layout, write_dspark, write_eagle

    in_blocks = of_layout(given.folder)[1].blocks is not None
    if wrong := given.layout if in_blocks else given.head:
        raise ConfigError(
            f"{wrong} cannot be given with {given.folder}: --layout is EAGLE-3's, of which engines "
            "ask no head, and --head is DSpark's"
        )
    if in_blocks:
        head = given.head and _confidence(given)
        written = write_dspark(given.folder, given.out, head, given.target)
    else:
        written = write_eagle(given.folder, given.out, given.layout or "eagle", given.target)
    tokens, taps, target = written
    say(f"{given.out}: {tokens:,} tokens, taps {taps}, for {target}")
    return 0


def _confidence(given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The weight (1, H + r) and bias (1,) of a head, whose sigmoid is the probability."""
    from heads import ConfidenceHead
    from heads.probe import check_head
    from recipes.run_eval import load_head
    from specdata.models import load_model

    head = load_head(given.head)
    if not isinstance(head, ConfidenceHead):
        raise ConfigError(
            f"{given.head} must be a head of kind confidence, the one form that engines ask, and "
            f"is of kind {head.kind}: train one with head.kind: confidence"
        )
    check_head(load_model(str(given.folder), target=given.target), head)
    output = head.output
    return output.weight.detach(), output.bias.detach() + math.log(head.rejection_weight)
