"""The contents of models' config.json, and sizes of what stages write; torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.config import ARCHITECTURES, BLOCK, TOY_POSITIONS
from recipes.config import PipelineConfig
from recipes.layout import absolute, is_within, makes_initial_draft
from specdata.config import PromptSet
from specdata.draft_kinds import kind_of
from specdata.draft_kinds.kind import DraftKind
from specdata.prompts.catalogue import EMBEDDED
from specdata.prompts.reading import is_remote, raw_prompts
from specdata.sources import base_of_adapters, hub_source
from specdata.storage.files import read_object

# A model's weights, or adapters', as transformers and PEFT save them.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
# Bytes a stored token takes at most: an id; an id and a number for a further draw or top logit.
# A prompt's own ids come on top.
ROLLOUT_TOKEN, PAIR = 4, 8


def in_bytes(count: float) -> str:
    """A number of bytes with its unit."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= limit:
            return f"about {count / limit:.1f} {unit}"
    return f"{count:.0f} bytes"


def is_made_here(config: PipelineConfig, model: str) -> bool:
    """True if a model is of the embedded pair, which this run trains."""
    return config.toy is not None and is_within(model, str(Path(config.output) / "pair"))


def is_without_weights(source: str) -> bool:
    """True if a folder describes a model and does not hold it."""
    path = Path(source)
    return (path / "config.json").is_file() and not any(any(path.glob(each)) for each in WEIGHTS)


def on_this_machine(model: str) -> Path | None:
    """The folder of a model: its own, or the one that the Hub's cache keeps of it."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache  # here: few plans need it

    source, revision = hub_source(model)
    try:
        path = try_to_load_from_cache(source, "config.json", revision=revision or "main")
    except ValueError:  # no Hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def described(model: str) -> Mapping[str, Any]:
    """The language model's part of a model's config.json; empty if it is not on this machine."""
    if base := base_of_adapters(model):
        return described(base)
    folder = on_this_machine(model)
    try:
        values = read_object(folder / "config.json") if folder else {}
    except (OSError, ValueError):
        return {}
    values = values.get("text_config", values)
    return values if isinstance(values, dict) else {}


def generation_of(name: str) -> Mapping[str, Any]:
    """A model's generation_config.json; empty if it is not on this machine."""
    folder = on_this_machine(base_of_adapters(name) or name)
    try:
        return read_object(folder / "generation_config.json") if folder else {}
    except (OSError, ValueError):
        return {}


def sizes_of(config: PipelineConfig, model: str) -> Mapping[str, Any]:
    """The config.json of a model, as it is or as this run will make it; empty if unknown."""
    if config.toy is None or not is_made_here(config, model):
        return described(model)
    is_target = absolute(model) == absolute(config.models.target)
    toy = config.toy
    return {
        "hidden_size": toy.target_width if is_target else toy.draft_width,
        "num_hidden_layers": toy.target_layers if is_target else toy.draft_layers,
        "vocab_size": toy.vocab_size,
        "max_position_embeddings": TOY_POSITIONS,
    }


def source_model(config: PipelineConfig) -> str:
    """The model that the draft has its hidden size from, if it is not a fresh one."""
    kind = config.draft.init.kind if config.draft else "model"
    if kind in ("target", "states") or config.models.draft is None:
        return config.models.target
    return config.models.draft


def kind_in(config: PipelineConfig) -> DraftKind:
    """The kind of the draft, as it is or as this run will make it, but for masks."""
    if config.draft and config.draft.init.kind != "model":
        return config.draft.init.form
    return kind_of(described(config.models.draft) if config.models.draft else {})


def reads_states(config: PipelineConfig) -> bool:
    """True if the draft reads its target's hidden states (`draft_models.states_draft`)."""
    return kind_in(config).reads_states


def block_of(config: PipelineConfig) -> int | None:
    """Tokens of a block, if the draft drafts in blocks."""
    if not (kind := kind_in(config)).in_blocks:
        return None
    if config.draft and config.draft.init.kind != "model":
        return config.draft.init.block or BLOCK
    try:
        return int(kind.depths(described(str(config.models.draft))))
    except (KeyError, TypeError, ValueError):  # loading it says what is wrong
        return None


def draft_width(config: PipelineConfig) -> int | None:
    """The draft's hidden size, if it is known on this machine."""
    if config.draft and config.draft.init.kind == "fresh":
        return ARCHITECTURES[config.draft.init.architecture].hidden_size
    return width_of(sizes_of(config, source_model(config)))


def width_of(values: Mapping[str, Any]) -> int | None:
    """The hidden size, if config.json says it."""
    return next((values[name] for name in ("hidden_size", "n_embd") if name in values), None)


def draft_size(config: PipelineConfig) -> str:
    """The size of the draft as it is stored, in float32: known if it was given, on this machine."""
    given = None if makes_initial_draft(config) else str(config.models.draft)
    folder = on_this_machine(base_of_adapters(given) or given) if given else None
    weights = sum(map(_weights, folder.glob("*.safetensors"))) if folder else 0
    return f"the draft, {in_bytes(4 * weights)} of weights" if weights else "the draft"


def _weights(file: Path) -> int:
    """The number of weights in a safetensors file, of its header alone; 0 if that is damaged."""
    from safetensors import SafetensorError, safe_open  # here: they import numpy

    try:
        with safe_open(file, "np") as stored:
            names = stored.keys()
            return sum(math.prod(stored.get_slice(name).get_shape()) for name in names)
    except SafetensorError:
        return 0


def prompt_count(sets: Sequence[PromptSet], seed: int) -> int | None:
    """Prompts that are read of sets, files counted; None if one on the Hub is read whole."""
    counts = [
        dataset.count
        if dataset.name in EMBEDDED or is_remote(dataset)
        else sum(1 for _ in raw_prompts(dataset, seed, has_template=True))
        for dataset in sets
    ]
    return sum(counts) if all(counts) else None


def rows_size(config: PipelineConfig, token_bytes: int, share: float = 1.0) -> str:
    """The size on the disk of rollouts, or of what has as many rows, at so many bytes a token.

    Of split train, of a `share` of them.
    """
    rollouts = config.rollouts
    most = rollouts.samples * rollouts.max_new_tokens  # tokens of a prompt's completions
    train = [each for each in rollouts.sets if each.split == "train"]
    others = [each for each in rollouts.sets if each.split != "train"]
    learnt, rest = (prompt_count(some, config.seed) for some in (train, others))
    if learnt is None or rest is None:
        return f"at most {most:,} tokens a prompt, {in_bytes(most * token_bytes)}"
    prompts = round(share * learnt) + rest
    return (
        f"{rollouts.samples * prompts:,} completions, at most {most * prompts:,} tokens, "
        f"{in_bytes(most * prompts * token_bytes)}"
    )
