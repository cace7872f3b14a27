"""The sizes of models, from their config.json, and of what stages write; torch is not imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.config import ARCHITECTURES, TOY_POSITIONS
from recipes.config import PipelineConfig
from recipes.run import absolute, is_within
from specdata.prompts.reading import source_of
from specdata.sources import base_of_adapters, hub_source

# A model's weights, or adapters', as transformers and PEFT save them.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
# Bytes a stored token takes at most, measured on the demo: an id; an id, a drafted id and eight
# numbers; an id and a number for each further draw or kept logit. A prompt's own ids come on top.
ROLLOUT_TOKEN, LABEL_TOKEN, PAIR = 4, 40, 8
# Three numbers beside the kept logits.
LOGITS_TOKEN = 12
# results.json and what it is made of, a generation; the report with its plots.
GENERATION, REPORT = 2500, 2_800_000
# Features of heads that are as wide as the draft; the others are numbers.
VECTORS = ("hidden_before", "embedding", "hidden")
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
    """Whether a model is of the embedded pair, which this run trains."""
    return config.toy is not None and is_within(model, str(Path(config.output) / "pair"))


def is_without_weights(source: str) -> bool:
    """Whether a folder describes a model and does not hold it."""
    here = Path(source)
    return (here / "config.json").is_file() and not any(any(here.glob(each)) for each in WEIGHTS)


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
    """What a model's config.json says of the language model; empty if it is not on this machine.

    Raises:
        ConfigError: if it is a GGUF file that cannot be read.
    """
    if base := base_of_adapters(model):
        return described(base)
    here = on_this_machine(model)
    try:
        known = json.loads((here / "config.json").read_text("utf-8")) if here else {}
    except (OSError, ValueError):
        return {}
    known = known.get("text_config", known) if isinstance(known, dict) else {}
    return known if isinstance(known, dict) else {}


def sizes_of(config: PipelineConfig, model: str) -> Mapping[str, Any]:
    """What a model's config.json says, or will say if this run trains it; empty if unknown."""
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


def parameters(known: Mapping[str, Any], kept: int | None = None) -> int | None:
    """Weights of a dense decoder with layers as Llama's; biases, which few have, are left out.

    Args:
        known: what its config.json says of the language model.
        kept: rows of the output matrix, if its vocabulary is reduced.

    Returns:
        None if it says too little, or the model is another one.
    """
    sizes = [known.get(name) for name in NAMES]
    if not all(isinstance(size, int) for size in sizes):
        return None  # some families have a list of them, one for each layer
    if "rms_norm_eps" not in known or any(known.get(name) for name in EXPERTS):
        return None
    width, layers, heads, inner, vocabulary = (int(size) for size in sizes if size is not None)
    each = known.get("head_dim") or width // heads
    keys = (known.get("num_key_value_heads") or heads) * each
    layer = width * (2 * (heads * each + keys) + 3 * inner + 2)
    output = kept or known.get("draft_vocab_size")
    if output is None:
        output = 0 if known.get("tie_word_embeddings") else vocabulary
    return int(width * (vocabulary + output) + layers * layer + width)


def pair_size(config: PipelineConfig) -> str:
    """The weights of the embedded pair."""
    models = (config.models.target, str(config.models.draft))
    return f"target and draft, {_weights(sum(_parameters(config, each) for each in models))}"


def _parameters(config: PipelineConfig, model: str) -> int:
    return parameters(sizes_of(config, model)) or 0


def _weights(count: int) -> str:
    return f"{in_bytes(4 * count)} of weights"  # trained and stored in float32


def source_model(config: PipelineConfig) -> str:
    """The model that the draft has its hidden size from, if it is not a fresh one."""
    kind = config.draft.init.kind if config.draft else "model"
    if kind == "target" or config.models.draft is None:
        return config.models.target
    return config.models.draft


def draft_width(config: PipelineConfig) -> int | None:
    """The draft's hidden size, if it is known on this machine."""
    if config.draft and config.draft.init.kind == "fresh":
        return ARCHITECTURES[config.draft.init.architecture].hidden_size
    return _width(sizes_of(config, source_model(config)))


def _width(known: Mapping[str, Any]) -> int | None:
    return next((known[name] for name in ("hidden_size", "n_embd") if name in known), None)


def draft_size(config: PipelineConfig) -> str:
    """The size of the draft, if it is on this machine or will be made here."""
    init = config.draft.init if config.draft else None
    known = dict(sizes_of(config, source_model(config)))
    if init is None or (init.kind == "model" and not init.vocabulary):
        assert config.models.draft is not None  # the configuration's own check
        model = base_of_adapters(config.models.draft) or config.models.draft
        here = on_this_machine(model)
        stored = sum(path.stat().st_size for path in here.glob("*.safetensors")) if here else 0
        if stored:
            return f"the draft, {in_bytes(stored)}"
    elif init.kind == "fresh":
        known = {
            "vocab_size": sizes_of(config, config.models.target).get("vocab_size"),
            "rms_norm_eps": 0.0,
            "tie_word_embeddings": init.architecture == "toy",
            **asdict(ARCHITECTURES[init.architecture]),
        }
    elif init.kind == "target":
        count = init.layers if isinstance(init.layers, int) else len(init.layers)
        known["num_hidden_layers"] = count
        if init.align:
            known["tie_word_embeddings"] = False
    made = parameters(known, init.vocabulary if init else None)
    if made is None:
        return f"the draft, whose size follows from {source_model(config)}"
    return f"the draft, {_weights(made)}"


def head_size(config: PipelineConfig) -> str:
    """The size of the head, and of what its training keeps until it is done."""
    assert config.head is not None
    width, head = draft_width(config), config.head
    if width is None:
        return f"the head, of depth {head.depth}; its width is that of {source_model(config)}"
    if head.kind == "specdec++":
        weights = head.depth * (width * width + width) + width + 1
    else:
        vectors = sum(name in VECTORS for name in head.features)
        numbers = len(head.features) - vectors
        # Each vector has a norm's two rows and a matrix, each number and each of three moments a
        # row. A block is a norm and two matrices with biases, of twice the width inside.
        weights = vectors * width * (head.width + 2) + (numbers + 3) * head.width
        weights += head.depth * head.width * (4 * head.width + 4) + 2 * head.width + 1
    size = f"the head, {_weights(weights)}"
    trained = [wanted for wanted in config.rollouts.sets if wanted.split == "train"]
    if head.cache == "disk" and all(wanted.count for wanted in trained):
        labels = sum(wanted.count or 0 for wanted in trained) * config.rollouts.samples
        labels *= config.rollouts.max_new_tokens
        states = 1 + config.labels.draws * ("consumed" in head.moments)
        kept = in_bytes(2 * labels * states * width)  # in bfloat16
        size += f"; until it is done, the draft's states along the training rollouts, {kept}"
    return size


def rows_size(config: PipelineConfig, token_bytes: Callable[[str], int]) -> str:
    """How much is stored of rollouts, or of labels, which have as many rows.

    `token_bytes` gives the bytes of a completion token in rows of a split.
    """
    rollouts = config.rollouts
    most = rollouts.samples * rollouts.max_new_tokens  # tokens of a prompt's completions
    if not all(wanted.count for wanted in rollouts.sets):
        largest = max(token_bytes(wanted.split) for wanted in rollouts.sets)
        return f"at most {most:,} tokens a prompt, {in_bytes(most * largest)}"
    prompts = sum(wanted.count for wanted in rollouts.sets)
    stored = most * sum(wanted.count * token_bytes(wanted.split) for wanted in rollouts.sets)
    # Only conversations have later turns, and embedded sets hold none.
    more = " (more with later turns)" if any(map(source_of, rollouts.sets)) else ""
    return (
        f"{rollouts.samples * prompts:,} completions{more}, at most {most * prompts:,} tokens, "
        f"{in_bytes(stored)}"
    )


def rollout_bytes(config: PipelineConfig, _split: str) -> int:
    """Bytes of a token of rollouts, with its state if that is stored and its width known."""
    if not config.rollouts.keep_states:
        return ROLLOUT_TOKEN
    width = _width(sizes_of(config, config.models.target)) or 0
    return ROLLOUT_TOKEN + width * (4 if config.models.dtype_of("target") == "float32" else 2)


def label_bytes(config: PipelineConfig, split: str) -> int:
    """Bytes that the labels of one completion token take at most, in rows of a split."""
    several = split == "train" and config.sampling.temperature > 0
    draws = config.labels.draws - 1 if several else 0
    return LABEL_TOKEN + PAIR * (draws + config.labels.top_logits)


def eval_size(config: PipelineConfig) -> str:
    """How much an evaluation writes."""
    sets, methods = config.eval.sets, len(config.eval.methods)
    if not all(wanted.count for wanted in sets):
        return f"results, samples and report.html, {in_bytes(methods * GENERATION)} a prompt"
    prompts = sum(wanted.count for wanted in sets)
    generations = prompts * methods
    return (
        f"results, samples and report.html: {prompts:,} prompts x {methods} methods = "
        f"{generations:,} generations of at most {config.eval.max_new_tokens} tokens, "
        f"{in_bytes(generations * GENERATION + REPORT)}"
    )
