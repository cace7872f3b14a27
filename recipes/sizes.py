"""The contents of models' config.json, and sizes of what stages write; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.config import ARCHITECTURES, TOY_POSITIONS
from recipes.config import PipelineConfig
from recipes.layout import absolute, is_within
from specdata.prompts.reading import size_of
from specdata.sources import base_of_adapters, hub_source
from specdata.storage.files import read_object

# A model's weights, or adapters', as transformers and PEFT save them.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
# Bytes a stored token takes at most: an id; an id and a number for a further draw or top logit.
# A prompt's own ids come on top.
ROLLOUT_TOKEN, PAIR = 4, 8
# What the weights of a decoder follow from.
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
# Of a mixture of experts: how many there are follows from other names in each family.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


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
    """The language model's part of a model's config.json; empty if it is not on this machine.

    Raises:
        ConfigError: if it is a GGUF file that cannot be read.
    """
    if base := base_of_adapters(model):
        return described(base)
    folder = on_this_machine(model)
    try:
        values = read_object(folder / "config.json") if folder else {}
    except (OSError, ValueError):
        return {}
    values = values.get("text_config", values)
    return values if isinstance(values, dict) else {}


def sizes_of(config: PipelineConfig, model: str) -> Mapping[str, Any]:
    """The config.json of a model, as it is or as this run will make it; empty if unknown."""
    if config.toy is None or not is_made_here(config, model):
        return described(model)
    is_target = absolute(model) == absolute(config.models.target)
    toy = config.toy
    width = toy.target_width if is_target else toy.draft_width
    return {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 16 * 16,
        "num_attention_heads": 1,  # of the whole width: the sizes are those of several
        "num_hidden_layers": toy.target_layers if is_target else toy.draft_layers,
        "vocab_size": toy.vocab_size,
        "max_position_embeddings": TOY_POSITIONS,
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.0,
    }


def parameters(values: Mapping[str, Any], draft_vocabulary: int | None = None) -> int | None:
    """Weights of a dense decoder with layers as Llama's; biases, which few have, are left out.

    Args:
        values: what its config.json says of the language model.
        draft_vocabulary: rows of the output matrix, if its vocabulary is reduced.

    Returns:
        None if it says too little, or the model is another one.
    """
    sizes = [values.get(name) for name in NAMES]
    if not all(isinstance(size, int) for size in sizes):
        return None  # some families have a list of them, one for each layer
    if "rms_norm_eps" not in values or any(values.get(name) for name in EXPERTS):
        return None
    width, layers, heads, inner, vocabulary = (int(size) for size in sizes if size is not None)
    each = values.get("head_dim") or width // heads
    keys = (values.get("num_key_value_heads") or heads) * each
    layer = width * (2 * (heads * each + keys) + 3 * inner + 2)
    output = draft_vocabulary or values.get("draft_vocab_size")
    if output is None:
        output = 0 if values.get("tie_word_embeddings") else vocabulary
    return int(width * (vocabulary + output) + layers * layer + width)


def source_model(config: PipelineConfig) -> str:
    """The model that the draft has its hidden size from, if it is not a fresh one."""
    kind = config.draft.init.kind if config.draft else "model"
    if kind in ("target", "states") or config.models.draft is None:
        return config.models.target
    return config.models.draft


def reads_states(config: PipelineConfig) -> bool:
    """True if the draft reads its target's hidden states (`specdata.states_draft`)."""
    if config.draft and config.draft.init.kind != "model":
        return config.draft.init.kind == "states"
    return config.models.draft is not None and "target_states" in described(config.models.draft)


def draft_width(config: PipelineConfig) -> int | None:
    """The draft's hidden size, if it is known on this machine."""
    if config.draft and config.draft.init.kind == "fresh":
        return ARCHITECTURES[config.draft.init.architecture].hidden_size
    return width_of(sizes_of(config, source_model(config)))


def width_of(values: Mapping[str, Any]) -> int | None:
    """The hidden size, if config.json says it."""
    return next((values[name] for name in ("hidden_size", "n_embd") if name in values), None)


def draft_size(config: PipelineConfig) -> str:
    """The size of the draft as it is stored, in float32."""
    init = config.draft.init if config.draft else None
    values = dict(sizes_of(config, source_model(config)))
    if init is not None and init.kind == "fresh":
        values = {
            "vocab_size": sizes_of(config, config.models.target).get("vocab_size"),
            "rms_norm_eps": 0.0,
            "tie_word_embeddings": init.architecture == "toy",
            **asdict(ARCHITECTURES[init.architecture]),
        }
    elif init is not None and init.kind in ("target", "states"):
        values["num_hidden_layers"] = (
            init.layers if isinstance(init.layers, int) else len(init.layers)
        )
        if init.align or init.kind == "states":
            values["tie_word_embeddings"] = False
    count = parameters(values, init.vocabulary if init else None)
    if count is not None and init is not None and init.kind == "states":
        maps = 3 + len(init.taps or range(4))  # which make its input
        count += maps * values["hidden_size"] ** 2
    if count is None:
        return f"the draft, whose size follows from {source_model(config)}"
    return f"the draft, {in_bytes(4 * count)} of weights"


def rows_size(config: PipelineConfig, token_bytes: int) -> str:
    """The size on the disk of rollouts, or of what has as many rows, at so many bytes a token."""
    rollouts = config.rollouts
    most = rollouts.samples * rollouts.max_new_tokens  # tokens of a prompt's completions
    counts = [size_of(dataset, config.seed) for dataset in rollouts.sets]
    if None in counts:
        return f"at most {most:,} tokens a prompt, {in_bytes(most * token_bytes)}"
    prompts = sum(filter(None, counts))
    return (
        f"{rollouts.samples * prompts:,} completions, at most {most * prompts:,} tokens, "
        f"{in_bytes(most * prompts * token_bytes)}"
    )
