"""Every family of causal language models of the installed transformers, small, against `generate`.

`python -m tests.test_families` writes the table of docs/targets.md from what the families here do.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata.errors import CacheNotRewindableError, ConfigError

ENCODER = "an encoder, or the decoder of one, with a causal head: not decoded by itself"
OTHER = "reads something else than text: images, sounds or another model's states"
NOT_DECODERS = {
    **dict.fromkeys(
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert "
        "data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet "
        "rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta "
        "xlm-roberta-xl xmod".split(),
        ENCODER,
    ),
    **dict.fromkeys(
        "blt fuyu git got_ocr2 moss_transcribe_diarize musicgen_decoder musicgen_melody_decoder "
        "moshi gemma3 gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant "
        "phi4_multimodal".split(),
        OTHER,
    ),
}
"""Registered by transformers as causal language models, and none that decodes text by itself."""
WINDOW = 8
# Most that a field of a configuration may be, by its name; the first that fits.
MOST = {
    r"qk_head_dim": 16,
    r"rotary_dim": 4,
    r"type_vocab_size": 2,
    r".*vocab_size.*": 96,
    r"hidden_size_per_layer_input|router_hidden_size|embed.*_dim|.*_rank|hc_lowrank": 16,
    r"hidden_size|n_embd|d_model|emb_dim|dim|word_embed_proj_dim|lru_width|embedding_(size|dim)": 32,
    r".*(intermediate|ffn).*(size|dim)(_mlp)?|ffn_dim|dff|dim_ff|d_inner|n_inner": 48,
    r"(num_)?(hidden_)?layers|n_layers?|num_blocks": 4,
    r"(.*num_)?(attention_)?heads|n_heads?|(mamba|linear)_(n|num)_(value_)?heads": 4,
    r".*(num_key_value|kv|linear_num_key|kv_n)_heads": 2,
    r"index_n_heads": 16,  # fewer have many scores of exactly 0, whose order is nobody's
    r".*head_dim|head_size|mamba_d_head|kv_channels|dim_head|attention_head_size": 8,
    r"sliding_window(_size)?|attention_chunk_size|local_attention|attention_window_size|window_size": (
        WINDOW
    ),
    r".*experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts": 2,
    r".*num.*experts|n_routed_experts": 4,
    r"n_group|num_expert_group|topk_group|o_groups|.*n_?groups": 1,
    r"index_topk|index_topk_blocks": 6,
    r".*chunk_size|block_size|index_block_size": 4,
    r".*(state_size|d_state)": 8,
    r"(max_position_embedding|n_position|max_seq_len|n_ctx|context_length).*": 128,
}
HALF = ["sliding_attention", "full_attention"] * 2
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": HALF, "rope_parameters": dict.fromkeys(HALF, ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": SPARSE,
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "index_topk": 3,
    },
    "dots1": SPARSE | {"layer_types": HALF},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": HALF},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": HALF},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "mllama_text_model": {"cross_attention_layers": []},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlstm": {"qk_head_dim": 4, "v_head_dim": 8},
}
"""What a family needs beside that, by its configuration's model_type."""


@cache
def classes() -> dict[str, Any]:
    """The classes of causal language models by their configuration's model_type, each once."""
    found: dict[str, Any] = {}
    for models in MODEL_FOR_CAUSAL_LM_MAPPING.values():
        for model in models if isinstance(models, tuple) else (models,):
            found.setdefault(model.config_class.model_type, model)
    return {name: model for name, model in found.items() if name not in NOT_DECODERS}


def most(name: str, value: Any) -> Any:
    """The value of a field, made small."""
    if type(value) is int:
        return min([value, *(cap for fits, cap in MOST.items() if re.fullmatch(fits, name))][:2])
    return value


def small(name: str) -> Any:
    """A small configuration of a family, with a layer of each of its kinds, some twice."""
    kind = classes()[name].config_class
    whole = kind()
    fields = whole.to_dict()
    count = whole.num_hidden_layers
    by_layer = {key: each for key, each in fields.items() if isinstance(each, list) and len(each) == count and count > 4}
    kinds = [tuple(str(each[layer]) for key, each in by_layer.items() if "type" in key) for layer in range(count)]
    first = sorted({kinds.index(each) for each in kinds})
    chosen = (first * 4)[: max(4, len(first))]
    changes = {key: most(key, value) for key, value in fields.items() if most(key, value) != value}
    for key, each in by_layer.items():
        if key not in MOST:
            changes[key] = [each[layer] for layer in chosen]
    for key in list(changes):
        if re.fullmatch(r"(num_)?(hidden_)?layers|n_layers?|num_blocks", key):
            changes[key] = len(chosen)
    # Nothing ends a text: those of every family cross several windows.
    changes |= {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(key)}
    if fields.get("tie_word_embeddings"):  # tied, a random model repeats its last token
        changes["tie_word_embeddings"] = False
    if "sliding_window" in fields and fields["sliding_window"] is None:
        changes["sliding_window"] = WINDOW
    if "kv_lora_rank" in fields:  # latent attention has as many heads of keys
        changes["num_key_value_heads"] = 4
    if "head_dim" in fields and fields["head_dim"] is None:
        changes["head_dim"] = 8
    changes |= CHANGES.get(name, {})
    return kind(**changes)


def build(name: str, seed: int = 0) -> Any:
    """A random model of a family whose greedy texts are no repetitions."""
    torch.manual_seed(seed)
    model = classes()[name](small(name)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
            else:
                weight.add_(0.2 * torch.randn_like(weight))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def noisy(model: Any, share: float = 0.1) -> Any:
    """A draft whose tokens are accepted now and then."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(share * 0.25 * torch.randn_like(weight))
    return draft


PROMPTS = [torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(count)) for count in (20, 3, 11)]
BUDGET = 24
CASES = {
    "chain": DecodeConfig(temperature=0.0, length=4),
    "tree": DecodeConfig(temperature=0.0, verifier="rrs_wor", drafter="tree", widths=(2, 2)),
}


def greedy(model: Any, prompt: Tensor) -> list[int]:
    """The tokens that transformers decodes greedily."""
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    out = model.generate(prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=BUDGET)
    return [int(token) for token in out[0, len(prompt) :]]
