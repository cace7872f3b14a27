"""What several files of tests use of `test_dspark_layout`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

H, INNER, SIZE, HEADS, GROUPS, RANK, BLOCK, MASK, KEPT = 16, 24, 6, 4, 2, 5, 3, 7, 40


IDS = [0, 2]


CONFIG: dict[str, Any] = {
    **{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False},
    **{"hidden_size": H, "intermediate_size": INNER, "head_dim": SIZE, "hidden_act": "silu"},
    **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False},
    **{"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS, "num_anchors": 512},
    **{"num_target_layers": 4, "markov_rank": RANK, "markov_head_type": "vanilla"},
    **{"enable_confidence_head": False, "confidence_head_with_markov": True},
    **{"sample_from_anchor": True, "torch_dtype": "bfloat16", "sliding_window": None},
}


def published(
    folder: Path, vocabulary: int, layers: int = 1, kept: int | None = None, **changes: Any
) -> dict[str, Tensor]:
    """Write a random draft as DeepSpec's code does; its tensors by their names there."""
    torch.manual_seed(0)
    inner, groups = HEADS * SIZE, GROUPS * SIZE
    shapes = {"fc": (H, len(IDS) * H), "hidden_norm": (H,), "norm": (H,)}
    shapes["markov_head.markov_w1"] = (vocabulary, RANK)
    shapes["markov_head.markov_w2"] = (kept or vocabulary, RANK)
    for n in range(layers):
        each = {"self_attn.q_proj": (inner, H), "self_attn.o_proj": (H, inner)}
        each |= {f"self_attn.{name}_proj": (groups, H) for name in "kv"}
        each |= {f"self_attn.{name}_norm": (SIZE,) for name in "qk"}
        each |= {"mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H)}
        each |= {"mlp.down_proj": (H, INNER), "input_layernorm": (H,)}
        each["post_attention_layernorm"] = (H,)
        shapes |= {f"layers.{n}.{name}": shape for name, shape in each.items()}
    made = {
        f"{name}.weight": 0.4 * torch.randn(shape) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    config = {**CONFIG, "num_hidden_layers": layers, "vocab_size": vocabulary}
    config |= {"layer_types": ["full_attention"] * layers}
    if kept:
        ids = torch.randperm(vocabulary)[:kept].sort().values
        made["lm_head.weight"] = torch.randn(kept, H)
        made["d2t"] = ids - torch.arange(kept)
        made["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
        config["draft_vocab_size"] = kept
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return made
