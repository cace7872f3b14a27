"""Read a published EAGLE-3 draft, to decode with it here, and write one for engines.

    draftsmith import-eagle3 FOLDER --target TARGET --out DRAFT
    draftsmith export-eagle3 DRAFT --out FOLDER [--layout speculators]

FOLDER holds a config.json and safetensors in speculators' layout, or in that of EAGLE's own code
(`midlayer.` or `layers.0.`), which vLLM and SGLang load, too. DRAFT is one of `draft.init.layout:
eagle3`, or an imported one: give it as models.draft. Every tensor must be there and known.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder
from specdata.terminal import accept_any_text, tell


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith import-eagle3") -> int:
    """Read a folder and write another; return the exit status."""
    parser = _parser(program, "the published draft")
    parser.add_argument("--target", required=True, help="the model that it was trained for")
    return _run(_import, parser.parse_args(arguments))


def export(
    arguments: Sequence[str] | None = None, program: str = "draftsmith export-eagle3"
) -> int:
    """Write a folder for engines; return the exit status."""
    parser = _parser(program, "the draft to release")
    parser.add_argument(
        "--layout",
        choices=("eagle", "speculators"),
        default="eagle",
        help="of EAGLE's own code, which vLLM and SGLang load (default), or speculators'",
    )
    return _run(_export, parser.parse_args(arguments))


def _parser(program: str, folder: str) -> argparse.ArgumentParser:
    accept_any_text()
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    return parser


def _run(work: Callable[[argparse.Namespace], str], given: argparse.Namespace) -> int:
    try:
        if not (given.folder / "config.json").is_file():
            raise ConfigError(f"{given.folder} must be a folder with a config.json, and has none")
        if given.out.exists():
            raise ConfigError(f"{given.out} exists: give another --out, or remove it")
        line = f"{given.out}: {work(given)}"
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    Console(highlight=False).print(line, markup=False, soft_wrap=True)
    return 0


def _import(given: argparse.Namespace) -> str:
    from distill.eagle3 import read_eagle3
    from distill.training import save_model
    from specdata.models import load_model
    from specdata.saving import copy_tokenizer

    draft = read_eagle3(given.folder, load_model(given.target))
    with atomic_folder(given.out) as temporary:
        save_model(draft, temporary)
        copy_tokenizer(given.target, temporary)
    return f"{draft.config.draft_vocab_size:,} tokens, taps {draft.config.target_states['taps']}"


def _export(given: argparse.Namespace) -> str:
    from distill.eagle3 import write_eagle3

    tokens, taps, target = write_eagle3(given.folder, given.out, given.layout)
    return f"{tokens:,} tokens, taps {taps}, for {target}"
