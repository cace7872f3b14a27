"""Read a published EAGLE-3 draft: from the folders that engines load, to one that decodes here.

    draftsmith import-eagle3 FOLDER --target TARGET --out DRAFT

FOLDER holds a config.json and safetensors in speculators' layout, or in that of EAGLE's own code
(`midlayer.` or `layers.0.`), which vLLM and SGLang load, too. What is written is a folder like
those of `draft.init.kind: states`: give it as models.draft, with draft: null. Every tensor must be
there and known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder, read_object
from specdata.terminal import accept_any_text, tell

if TYPE_CHECKING:  # help is shown without torch
    from torch import Tensor
    from transformers import PreTrainedModel

IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Tensors that are the target's, or follow from others."""
RENAMED = {
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "fc.": "model.embed_tokens.states.",
    "fc_norm.": "model.embed_tokens.fc_norm.",
    "input_norm.": "model.embed_tokens.input_norm.",
    "embed_tokens.": "model.embed_tokens.tokens.",
    "lm_head.": "lm_head.",
}
TOKENS = "model.embed_tokens.tokens.weight"


def read_eagle3(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft of a published folder.

    Args:
        folder: with a config.json and safetensors.
        target: the model that it was trained for.

    Returns:
        The draft, in float32 and eval mode, which reads that target.

    Raises:
        ConfigError: if the folder is of another layout, tensors are missing or not known, or it
            does not fit the target.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from distill.initial import special_ids
    from specdata.draft_vocabulary import SIZE
    from specdata.eagle3 import Norms, eagle3_class
    from specdata.states_draft import KEY
    from specdata.taps import attach, record_of

    said = read_object(folder / "config.json")
    layer = said.get("transformer_layer_config", said)
    kind = layer.get("model_type", "llama")
    if kind != "llama" or layer.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"{folder} must have one layer of Llama's kind, it has "
            f"{layer.get('num_hidden_layers', 1)} of {kind}: others cannot be read"
        )
    theirs = target.config.get_text_config()
    layers = theirs.num_hidden_layers
    own = said.get("eagle_config", said)
    taps = own.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    norms = Norms(**{each.name: bool(said.get(each.name, False)) for each in fields(Norms)})
    tensors = _tensors(folder)
    rows = len(tensors["lm_head.weight"])
    added = tensors.pop("d2t", torch.zeros(rows, dtype=torch.long))
    if added.shape != (rows,):
        raise ConfigError(
            f"d2t in {folder} must have a number for each of the {rows} rows of lm_head, it has "
            f"the shape {[*added.shape]}"
        )
    ids = torch.arange(rows) + added
    if not (int(ids[0]) >= 0 and bool((ids.diff() > 0).all()) and int(ids[-1]) < theirs.vocab_size):
        raise ConfigError(
            f"d2t in {folder} must give ids below {theirs.vocab_size}, the target's vocabulary, in "
            "order and each once"
        )
    tensors.setdefault(TOKENS, target.get_input_embeddings().weight)
    known = {*LlamaConfig().to_dict(), "rope_theta", "rope_scaling"} - {"architectures", "dtype"}
    config = LlamaConfig.from_dict(
        {key: value for key, value in layer.items() if key in known}
        | {"vocab_size": theirs.vocab_size, "tie_word_embeddings": False, SIZE: rows}
    )
    setattr(config, KEY, {**record_of(target, taps), "layout": asdict(norms)})
    draft = eagle3_class(LlamaForCausalLM)(config)
    name = "model.norm.weight" if norms.norm_output else "lm_head.norm.weight"
    tensors[name] = tensors.pop("norm.weight")
    kept = {key: each.shape for key, each in draft.state_dict().items()}
    del kept["d2t"], kept["t2d"]
    found = {key: each.shape for key, each in tensors.items()}
    for what, names in (
        ("are missing", kept.keys() - found.keys()),
        ("are not known", found.keys() - kept.keys()),
        ("have another shape", {key for key in kept.keys() & found if kept[key] != found[key]}),
    ):
        if names:
            first = min(names)
            shapes = f"{[*found.get(first, ())]}, expected {[*kept.get(first, ())]}"
            raise ConfigError(
                f"{len(names)} tensors of {folder} {what} (as {first}, {shapes}): norm flags or "
                "taps in config.json are others, or it is of another target or layout"
            )
    draft.load_state_dict(tensors, strict=False)
    t2d = torch.zeros(theirs.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.d2t, draft.t2d = ids - torch.arange(rows), t2d
    draft.get_output_embeddings().vocabulary_ids = ids
    draft.__class__ = LlamaForCausalLM
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    attach(draft, target)
    return draft


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, by our names; `d2t` and `norm.weight` by theirs."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} must hold safetensors, and there are none: convert a .bin where you trust "
            "its origin, with torch.load(FILE, weights_only=True) and safetensors.torch.save_file"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        for name, each in load_file(file).items():
            plain = name.removeprefix("model.")
            if plain.startswith(IGNORED):
                continue
            former = next((each for each in RENAMED if plain.startswith(each)), "")
            found[plain.replace(former, RENAMED[former], 1) if former else plain] = each
    for name in ("lm_head.weight", "norm.weight", "model.embed_tokens.states.weight"):
        if name not in found:
            raise ConfigError(
                f"{folder} has no tensor {name.split('.')[0] if 'states' not in name else 'fc'}, "
                "which every EAGLE-3 draft has: it is of another kind, or incomplete"
            )
    return found


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith import-eagle3") -> int:
    """Read a folder and write another; return the exit status."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the published draft")
    parser.add_argument("--target", required=True, help="the model that it was trained for")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    given = parser.parse_args(arguments)
    try:
        _import(given)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    return 0


def _import(given: argparse.Namespace) -> None:
    from distill.training import save_model
    from specdata.models import copy_tokenizer, load_model

    if not (given.folder / "config.json").is_file():
        raise ConfigError(f"{given.folder} must be a folder with a config.json, and has none")
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    draft = read_eagle3(given.folder, load_model(given.target))
    with atomic_folder(given.out) as temporary:
        save_model(draft, temporary)
        copy_tokenizer(given.target, temporary)
    taps = draft.config.target_states["taps"]
    tokens = draft.config.draft_vocab_size
    line = f"{given.out}: {tokens:,} tokens, taps {taps}"
    Console(highlight=False).print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
