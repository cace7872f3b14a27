"""Read a published EAGLE-3 draft, to decode with it here.

    draftsmith import-eagle3 FOLDER --target TARGET --out DRAFT

FOLDER holds a config.json and safetensors in speculators' layout, or in that of EAGLE's own code
(`midlayer.` or `layers.0.`), which vLLM and SGLang load, too. Every tensor must be there and known.
Give DRAFT as models.draft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.run import say
from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the published draft")
    parser.add_argument("--target", required=True, help="the model that it was trained for")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")


def check_folders(given: argparse.Namespace) -> None:
    """Refuse a folder that holds no draft, and one to write that is there."""
    if not (given.folder / "config.json").is_file():
        raise ConfigError(f"{given.folder} must be a folder with a config.json, and has none")
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")


def main(given: argparse.Namespace) -> int:
    """Read a folder and write another; returns the exit status."""
    check_folders(given)
    from distill.eagle import read_eagle3
    from distill.training import save_model
    from specdata.models import load_model
    from specdata.saving import copy_tokenizer

    draft = read_eagle3(given.folder, load_model(given.target))
    with atomic_folder(given.out) as temporary:
        save_model(draft, temporary)
        copy_tokenizer(given.target, temporary)
    taps = draft.config.target_states["taps"]
    say(f"{given.out}: {draft.config.draft_vocab_size:,} tokens, taps {taps}")
    return 0
