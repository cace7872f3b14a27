"""The sizes of models that `--plan` states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from recipes.sizes import described, parameters

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 97,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
        LlamaConfig(**SMALL, tie_word_embeddings=False),
        Qwen3Config(**SMALL, head_dim=16, num_key_value_heads=2),
    ],
    ids=["llama, tied", "llama", "qwen3"],
)
def test_weights_are_counted_from_config_json(config: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    counted = parameters(described(str(tmp_path)))
    # Qwen3 norms queries and keys, too: two rows of a head a layer.
    norms = sum(p.numel() for name, p in made.named_parameters() if name.endswith("k_norm.weight"))
    assert counted is not None
    assert counted + 2 * norms == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize(
    "change", [{"num_experts": 4}, {"num_attention_heads": [6, 6, 4]}, {"vocab_size": None}]
)
def test_other_models_have_no_known_size(change: dict[str, Any], tmp_path: Path) -> None:
    known = {**SMALL, "rms_norm_eps": 1e-5, **change}
    (tmp_path / "config.json").write_text(json.dumps(known))
    assert parameters(described(str(tmp_path))) is None
