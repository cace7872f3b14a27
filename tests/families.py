"""Tiny random models of the families that are served with speculative decoding."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.tiny import END

SPECIAL = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0}
ROPED = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
} | SPECIAL
OPT = {
    "hidden_size": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 16,
    "init_std": 0.4,
} | SPECIAL

Family = tuple[type[PreTrainedModel], dict[str, Any]]

FAMILIES: dict[str, Family] = {
    "llama": (transformers.LlamaForCausalLM, ROPED),
    "llama, grouped queries": (transformers.LlamaForCausalLM, ROPED | {"num_key_value_heads": 2}),
    "llama, tied": (transformers.LlamaForCausalLM, ROPED | {"tie_word_embeddings": True}),
    "opt": (transformers.OPTForCausalLM, OPT),
    # As opt-350m: embeddings of another width than the layers, norms after the blocks.
    "opt, projected": (
        transformers.OPTForCausalLM,
        OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "gpt_neox": (
        transformers.GPTNeoXForCausalLM,
        {key: value for key, value in ROPED.items() if key != "num_key_value_heads"}
        # As Pythia: parallel residual, and a quarter of each head turned.
        | {"num_attention_heads": 2, "rotary_pct": 0.25, "use_parallel_residual": True},
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, ROPED | {"num_key_value_heads": 2}),
    "qwen3": (transformers.Qwen3ForCausalLM, ROPED | {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma": (
        transformers.GemmaForCausalLM,
        ROPED | {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 1.0}
        | SPECIAL,
    ),
    # Logits, residuals, embeddings and attention are scaled by constants.
    "granite": (
        transformers.GraniteForCausalLM,
        ROPED
        | {
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
        },
    ),
}
# Windows in every layer, in some, chunks, an indexer, and windows in the attention's own code.
WINDOWED: dict[str, Family] = {
    "mistral": (transformers.MistralForCausalLM, ROPED | {"sliding_window": 5}),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        ROPED
        | {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": (
        transformers.Llama4ForCausalLM,
        ROPED
        | {
            "head_dim": 4,
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 0],
        },
    ),
    "deepseek_v32": (
        transformers.DeepseekV32ForCausalLM,
        ROPED
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
        | {"v_head_dim": 8, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 6}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
        # An embedding of zeros scores every key alike, so that which are read is left open.
        | {"pad_token_id": None},
    ),
    "gpt_neo": (
        transformers.GPTNeoForCausalLM,
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "max_position_embeddings": 128,
            "initializer_range": 0.7,
        }
        | SPECIAL,
    ),
}
# Recurrent layers read chains alone.
RECURRENT: dict[str, Family] = {
    "qwen3_next": (
        transformers.Qwen3NextForCausalLM,
        ROPED
        | {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "falcon_h1": (
        transformers.FalconH1ForCausalLM,
        ROPED
        | {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 4},
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.7}
        | SPECIAL,
    ),
}


def tiny(
    family: str,
    seed: int,
    *,
    vocab: int = 40,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Any:
    """A random model of a family, by default in float64 so that rounding decides nothing."""
    build, sizes = (FAMILIES | WINDOWED | RECURRENT)[family]
    torch.manual_seed(seed)
    made = build.config_class(vocab_size=vocab, **(sizes | changes))
    made._attn_implementation = attention if build._supports_sdpa else "eager"
    made._experts_implementation = "eager"  # others have no kernels in float64
    model = build(made)
    with torch.no_grad():
        for weight in model.parameters():
            # Fresh biases are 0 and norms 1 or 0: a forward that left them out would not show.
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()
