"""Read a head in the format that SpecDec++ was released in, to decode with it here.

    draftsmith import-head FOLDER --out HEAD --draft meta-llama/Llama-2-7b-chat-hf

FOLDER holds the config.json and the weights that the official code's `save_pretrained` wrote. Give
HEAD to `AcceptanceHead.from_pretrained`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.run import say
from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder

# The weight of rejections in the loss of the released head (its README: layer=3, weight=6).
RELEASED_WEIGHT = 6.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the released head")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--draft", help="name of the draft whose hidden states it reads")
    parser.add_argument(
        "--rejection-weight",
        type=float,
        default=RELEASED_WEIGHT,
        help="weight of rejections in its training loss (default: %(default)s)",
    )


def main(given: argparse.Namespace) -> int:
    """Read a folder and write another; returns the exit status."""
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    from heads.released import from_released  # here: it needs torch

    head = from_released(given.folder, rejection_weight=given.rejection_weight, draft=given.draft)
    with atomic_folder(given.out) as temporary:
        head.save_pretrained(temporary)
    say(f"{given.out}: head of {head.depth} blocks, width {head.hidden_size}")
    return 0
