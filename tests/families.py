"""Tiny random models of the families that are served with speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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

Family = tuple[Callable[[Any], PreTrainedModel], Callable[..., PretrainedConfig], dict[str, Any]]

FAMILIES: dict[str, Family] = {
    "llama": (LlamaForCausalLM, LlamaConfig, ROPED),
    "llama, grouped queries": (LlamaForCausalLM, LlamaConfig, ROPED | {"num_key_value_heads": 2}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, ROPED | {"tie_word_embeddings": True}),
    "opt": (OPTForCausalLM, OPTConfig, OPT),
    # As opt-350m: embeddings of another width than the layers, norms after the blocks.
    "opt, projected": (
        OPTForCausalLM,
        OPTConfig,
        OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    ),
    "gpt_neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig,
        {key: value for key, value in ROPED.items() if key != "num_key_value_heads"}
        # As Pythia: parallel residual, and a quarter of each head turned.
        | {"num_attention_heads": 2, "rotary_pct": 0.25, "use_parallel_residual": True},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, ROPED | {"num_key_value_heads": 2}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        ROPED | {"num_key_value_heads": 2, "head_dim": 8},
    ),
    "gemma": (
        GemmaForCausalLM,
        GemmaConfig,
        ROPED | {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 1.0}
        | SPECIAL,
    ),
    # Logits, residuals, embeddings and attention are scaled by constants.
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        ROPED
        | {
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
        },
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
    build, config, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    made = config(vocab_size=vocab, **(sizes | changes))
    made._attn_implementation = attention
    model = build(made)
    with torch.no_grad():
        for weight in model.parameters():
            # Fresh biases are 0 and norms 1 or 0: a forward that left them out would not show.
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()
