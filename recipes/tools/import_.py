"""Read a draft in a layout of engines, or a head in SpecDec++'s format, to decode with it.

    draftsmith import FOLDER --target TARGET --out DRAFT
    draftsmith import FOLDER --draft meta-llama/Llama-2-7b-chat-hf --out HEAD

A draft's FOLDER holds a config.json and safetensors in speculators' layout, or in that of a
method's own code, which vLLM and SGLang load, too. Every tensor must be there and known; a head
beside them is not read. Give DRAFT as models.draft. A head's holds the config.json, which says
`num_layers`, and the weights that SpecDec++'s official code wrote. Give HEAD to
`AcceptanceHead.from_pretrained`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.run import say
from specdata.drafts import kind_of
from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder
from specdata.storage.resume import read_record

# The weight of rejections in the loss of the released head (its README: layer=3, weight=6).
RELEASED_WEIGHT = 6.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("folder", type=Path, help="the published draft or head")
    add("--out", type=Path, required=True, help="the folder to write")
    add("--target", help="of a draft: the model that it was trained for")
    add("--draft", help="of a head: name of the draft whose hidden states it reads")
    add(
        "--rejection-weight",
        type=float,
        default=RELEASED_WEIGHT,
        help="of a head: weight of rejections in its training loss (default: %(default)s)",
    )


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
    if settings.get("model_type") == "acceptance_head":
        raise ConfigError(f"{args.folder} is a head as this project has it and needs no import")
    if "num_layers" in settings:
        _import_head(args)
    elif args.target:
        import_draft(args.folder, args.target, args.out)
    else:
        raise ConfigError(
            f"{args.folder} is not of a head (its config.json has no num_layers), and a draft is "
            "read with the model that it was trained for: give --target"
        )
    return 0


def _import_head(args: argparse.Namespace) -> None:
    from heads.released import from_released  # here: it needs torch

    head = from_released(args.folder, rejection_weight=args.rejection_weight, draft=args.draft)
    with atomic_folder(args.out) as temporary:
        head.save_pretrained(temporary)
    say(f"{args.out}: head of {head.depth} blocks, width {head.hidden_size}")


def import_draft(folder: Path, target_name: str, out: Path) -> None:
    """Read a draft in a layout of engines, and write it as this project has it."""
    from distill.engine_layouts import read_published, with_layout
    from distill.training import save_model
    from specdata.models import ends_first, load_model
    from specdata.saving import copy_tokenizer
    from specdata.sources import config_of

    target = load_model(target_name)
    draft = read_published(folder, target)
    with atomic_folder(out) as temporary:
        save_model(draft, temporary)
        copy_tokenizer(target_name, temporary)
    taps = draft.config.target_states["taps"]
    say(f"{out}: {draft.config.draft_vocab_size:,} tokens, taps {taps}")
    settings, layout = with_layout(config_of(folder))
    if words := layout.doubtful_taps(settings):
        say(f"{words}: `draftsmith doctor {folder} --target {target_name}` measures both")
    if words := ends_first(draft, target, str(out)):
        say(words)
