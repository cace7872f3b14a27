"""Tiny targets that bring a head along, as they are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from distill.config import InitConfig
from distill.drafts.mtp import of_shapes
from distill.drafts.plain import Source
from specdata.drafts.mtp import FAMILIES, FIRST
from specdata.drafts.taps import attach
from tests.support.initial import stored


def head_of(target: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """A head of random numbers for a tiny target, in memory, fed as vLLM does."""
    layers = target.config.num_hidden_layers
    torch.manual_seed(seed)
    draft = of_shapes(target, Source([], [layers], InitConfig(kind="mtp"))).to(target.dtype)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(0, 0.25) if weight.ndim > 1 else weight.uniform_(0.2, 1.8)
    attach(draft.eval(), target)
    return draft


_MIXED = {"mlp_layer_types": ["dense", "sparse"]}
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe_lite": _MIXED,
    "hy_v3": _MIXED,
    "exaone_moe": {**_MIXED, "layer_types": ["sliding_attention", "full_attention"]},
    "bailing_hybrid": {**_MIXED, "layer_types": ["linear_attention", "full_attention"]},
}
"""What a family has beside a head: a first layer of another kind."""
COPIES = {
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
}
"""What a layer behind the target's repeats of it."""
KEEP = 0.02
"""The size of new matrices."""


def with_head(folder: Path, family: str, *, dtype: Any = torch.float32, **changes: Any) -> Path:
    """A folder of a target of two layers and a head of random numbers, uneven norms included.

    Its layer is that of a model of one layer of the head's kind, which is saved beside it.
    """
    known, layers = FAMILIES[family], 2
    sizes = {"num_hidden_layers": layers, **SIZES.get(family, {}), **changes}
    stored(folder, family, **sizes)
    config = json.loads((folder / "config.json").read_text())
    one = {**sizes, **known.settings, "num_hidden_layers": 1}
    one |= {key: config[key][:1] for key, value in one.items() if value == FIRST}
    one = {key: value for key, value in one.items() if key in config}
    stored(folder.with_name(f"{folder.name}-layer"), family, **one)
    layer = load_file(folder.with_name(f"{folder.name}-layer") / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    head = {
        known.layer.format(layers) + name.removeprefix("model.layers.0."): each
        for name, each in layer.items()
        if name.startswith("model.layers.0.")
    }
    for part in known.parts:
        value = KEEP * drawn(width, 2 * width) if part == "fc" else 1 + drawn(width) / 4
        head[known.parts[part].format(layers) + ".weight"] = value
    if known.layer.startswith("model.layers."):
        for name, ours in COPIES.items():
            if ours in tensors:
                head[known.layer.format(layers) + name] = tensors[ours].clone()
    whole = {name: each.to(dtype).contiguous() for name, each in {**tensors, **head}.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, known.counts[0]: 1}))
    return folder
