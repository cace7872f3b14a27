"""Read a draft in a layout of engines, to decode with it.

    draftsmith import FOLDER --target TARGET --out DRAFT

FOLDER holds a config.json and safetensors in speculators' layout, or in that of a method's own
code, which vLLM and SGLang load, too. Every tensor must be there and known; a head beside them is
not read. Give DRAFT as models.draft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.run import say
from specdata.draft_kinds import kind_of
from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder
from specdata.storage.resume import read_record


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("folder", type=Path, help="the published draft")
    add("--out", type=Path, required=True, help="the folder to write")
    add("--target", required=True, help="the model that it was trained for")


def main(args: argparse.Namespace) -> int:
    """Read a folder and write another; returns the exit status."""
    config = args.folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{args.folder} must be a folder with a config.json, and has none")
    if args.out.exists():
        raise ConfigError(f"{args.out} exists: give another --out, or remove it")
    settings = read_record(config, (), "restore it")
    if kind_of(settings).reads_states:
        raise ConfigError(
            f"{args.folder} is a draft as this project has it and needs no import: name it as "
            "models.draft"
        )
    from distill.engine_layouts import read_published
    from distill.training import save_model
    from specdata.models import ends_first, load_model
    from specdata.saving import copy_tokenizer

    target = load_model(args.target)
    draft = read_published(args.folder, target)
    with atomic_folder(args.out) as temporary:
        save_model(draft, temporary)
        copy_tokenizer(args.target, temporary)
    taps = draft.config.target_states["taps"]
    say(f"{args.out}: {draft.config.draft_vocab_size:,} tokens, taps {taps}")
    if words := ends_first(draft, target, str(args.out)):
        say(words)
    return 0
