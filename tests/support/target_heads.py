"""Tiny targets that bring a head along, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdata.draft_kinds.mtp import FAMILIES, PARTS
from tests.support.initial import stored

SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
}
"""What a family has beside a head: a first layer of another kind."""
KEEP = 0.02
"""The size of new matrices."""


def with_head(folder: Path, family: str, *, dtype: Any = torch.float32, **changes: Any) -> Path:
    """A folder of a target of two layers and a head of random numbers, uneven norms included.

    Its layer is that of a model of one layer of the head's kind, which is saved beside it.
    """
    known, layers = FAMILIES[family], 2
    sizes = {"num_hidden_layers": layers, **SIZES.get(family, {}), **changes}
    stored(folder, family, **sizes)
    one = {**sizes, **known.settings, "num_hidden_layers": 1}
    stored(folder.with_name(f"{folder.name}-layer"), family, **one)
    layer = load_file(folder.with_name(f"{folder.name}-layer") / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    head = {
        known.layer.format(layers) + name.removeprefix("model.layers.0."): each
        for name, each in layer.items()
        if name.startswith("model.layers.0.")
    }
    for part in PARTS:
        value = KEEP * drawn(width, 2 * width) if part == "fc" else 1 + drawn(width) / 4
        head[known.parts[part].format(layers) + ".weight"] = value
    for theirs, ours in known.copies.items():
        head[theirs.format(layers)] = tensors[ours].clone()
    whole = {name: each.to(dtype).contiguous() for name, each in {**tensors, **head}.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, known.counts[0]: 1}))
    return folder
