"""Tiny random models of every family of transformers: any configuration, made small."""

import re
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.tiny import END

WINDOW = 8
LAYERS = r"(num_)?(hidden_)?layers|n_layers?|num_blocks"
# Most that a field of a configuration may be, by its name; the first that fits.
MOST = {
    r"qk_head_dim": 16,
    r"rotary_dim": 4,
    r"type_vocab_size": 2,
    r".*vocab_size.*": 96,
    r"hidden_size_per_layer_input|router_hidden_size|embed.*_dim|.*_rank|hc_lowrank": 16,
    r"hidden_size|n_embd|d_model|emb_dim|dim|word_embed_proj_dim|lru_width|embedding_size": 32,
    r".*(intermediate|ffn).*(size|dim)(_mlp)?|ffn_dim|dff|dim_ff|d_inner|n_inner": 48,
    LAYERS: 4,
    r"(.*num_)?(attention_)?heads|n_heads?|(mamba|linear)_(n|num)_(value_)?heads": 4,
    r".*(num_key_value|kv|linear_num_key|kv_n)_heads": 2,
    r"index_n_heads": 16,  # fewer have many scores of exactly 0, whose order is nobody's
    r".*head_dim|head_size|mamba_d_head|kv_channels|dim_head|attention_head_size": 8,
    r"(sliding_|attention_)?window(_size)?|attention_chunk_size|local_attention": WINDOW,
    r".*experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts": 2,
    r".*num.*experts|n_routed_experts": 4,
    r"n_group|num_expert_group|topk_group|o_groups|.*n_?groups": 1,
    r"index_topk|index_topk_blocks": 6,
    r".*chunk_size|block_size|index_block_size": 4,
    r".*(state_size|d_state)": 8,
    r"(max_position_embedding|n_position|max_seq_len|n_ctx|context_length).*": 128,
    # What is trained is what is compared; PhiMoE's router draws experts in training.
    r".*drop.*|.*pdrop|.*jitter_noise": 0.0,
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
    "dots1": SPARSE | {"n_shared_experts": 1, "layer_types": HALF},
    # Its windows have heads of their own, 64 of width 256 if they are not said.
    "dots3_note_text": {f"swa_num_{kind}_heads": 4 for kind in ("attention", "key_value")}
    | {f"swa_{kind}_lora_rank": 16 for kind in ("q", "kv")}
    | {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
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
    "nemotron": {"num_key_value_heads": 2},
    # transformers' state of it has room for keys as wide as values alone.
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "qk_dim_factor": 1.0},
}
"""What a family needs beside that, by its configuration's model_type."""

Family = dict[str, dict[str, Any]]
FAMILIES: Family = {
    "llama": {"num_key_value_heads": 4},
    "llama, grouped queries": {},
    "llama, tied": {"tie_word_embeddings": True},
    "opt": {},
    # As opt-350m: embeddings of another width than the layers, norms after the blocks.
    "opt, projected": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "gpt_neox": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gpt2": {},
    # Logits, residuals, embeddings and attention are scaled by constants.
    "granite": {
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
    },
}
"""Those that are served with speculative decoding, by model_type and what is special."""
# Windows in every layer, in some, chunks, an indexer, and windows in the attention's own code.
WINDOWED: Family = {
    name: {} for name in ("mistral", "gemma3_text", "llama4_text", "deepseek_v32", "gpt_neo")
}
# Recurrent layers read chains alone.
RECURRENT: Family = {name: {} for name in ("qwen3_next", "falcon_h1", "mamba")}
# Registered with the configuration of what they are part of.
PARTS = {"emu3_text_model": "Emu3ForCausalLM", "mllama_text_model": "MllamaForCausalLM"}


def most(name: str, value: Any) -> Any:
    """The value of a field, made small."""
    caps = [cap for fits, cap in MOST.items() if re.fullmatch(fits, name)]
    return min(value, caps[0]) if type(value) in (int, float) and caps else value


def small(name: str, layers: int = 4, **changes: Any) -> Any:
    """A small configuration of a family: a layer of each of its kinds, and `layers` at least."""
    kind = CONFIG_MAPPING[name]
    whole = kind()
    fields, count = whole.to_dict(), whole.num_hidden_layers
    by_layer = {
        key: each
        for key, each in fields.items()
        if isinstance(each, list) and len(each) == count and count > 4
    }
    types = [each for key, each in by_layer.items() if "type" in key]
    kinds = [tuple(str(each[layer]) for each in types) for layer in range(count)]
    first = sorted({kinds.index(each) for each in kinds})
    chosen = (first * layers)[: max(layers, len(first))]
    made = {key: most(key, value) for key, value in fields.items() if most(key, value) != value}
    made |= {key: len(chosen) for key in made if re.fullmatch(LAYERS, key)}
    made |= {key: [most(key, each[layer]) for layer in chosen] for key, each in by_layer.items()}
    # Nothing ends a text, so that it is several windows long.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if fields.get(key):
            made[key] = 0
    if fields.get("tie_word_embeddings"):  # tied, a random model repeats its last token
        made["tie_word_embeddings"] = False
    if "sliding_window" in fields and fields["sliding_window"] is None:
        made["sliding_window"] = WINDOW
    if "kv_lora_rank" in fields:  # latent attention has as many heads of keys
        made["num_key_value_heads"] = 4
    if "head_dim" in fields and fields["head_dim"] is None:
        made["head_dim"] = 8
    return kind(**made | CHANGES.get(name, {}) | changes)


def build(
    name: str, seed: int = 0, *, layers: int = 4, attention: str = "sdpa", **changes: Any
) -> Any:
    """A random model of a family whose greedy texts are no repetitions, and which nothing ends."""
    config = small(name, layers, **changes)
    part = PARTS.get(name)
    kind = getattr(transformers, part) if part else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = attention if kind._supports_sdpa else "eager"
    config._experts_implementation = "eager"  # others have no kernels in float64
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
            else:  # fresh biases are 0 and norms 1 or 0: a forward without them would not show
                weight.add_(0.2 * torch.randn_like(weight))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tiny(
    family: str,
    seed: int,
    *,
    vocab: int = 40,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Any:
    """One of two layers that ends texts, by default in float64 so that rounding decides nothing."""
    changes = {**(FAMILIES | WINDOWED | RECURRENT).get(family, {}), **changes}
    changes = {"layers": 2, "bos_token_id": 0, "eos_token_id": END, "pad_token_id": 0, **changes}
    name = family.partition(",")[0]
    model = build(name, seed, attention=attention, vocab_size=vocab, **changes)
    model.generation_config.eos_token_id = END
    return model.to(dtype)


def nearby(family: str, **changes: Any) -> Any:
    """A draft that agrees with the model now and then, so that caches are cropped in the middle."""
    draft, noise = tiny(family, 2, **changes), tiny(family, 3, **changes)
    with torch.no_grad():
        for mine, other in zip(draft.parameters(), noise.parameters(), strict=True):
            mine.add_(0.1 * other)
    return draft


BUDGET = 24


def greedy(model: Any, prompt: Tensor, budget: int = BUDGET) -> list[int]:
    """The tokens that transformers decodes greedily."""
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    out = model.generate(prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=budget)
    return [int(token) for token in out[0, len(prompt) :]]


# Encoders, or decoders of one, with a causal head; readers of images, sounds or states.
ENCODERS = """
bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert
roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xmod
"""
OTHERS = """
blt fuyu git got_ocr2 moss_transcribe_diarize musicgen_decoder musicgen_melody_decoder moshi
gemma3 gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant phi4_multimodal
"""
NOT_DECODERS = {*ENCODERS.split(), *OTHERS.split()}
"""Registered by transformers as causal language models, and none that decodes text by itself."""


@cache
def classes() -> dict[str, Any]:
    """The classes of causal language models by their configuration's model_type, each once."""
    found: dict[str, Any] = {}
    for models in MODEL_FOR_CAUSAL_LM_MAPPING.values():
        for model in models if isinstance(models, tuple) else (models,):
            found.setdefault(model.config_class.model_type, model)
    return {name: model for name, model in found.items() if name not in NOT_DECODERS}


NO_CACHE = "refused: no cache of transformers"
OWN_STATE = "refused: a state of their own kind"
NO_POSITIONS = "refused: positions of their own kind"
OWN_STATES = "deepseek_v4 dory minimax mllama_text_model qwen4_exp_text recurrent_gemma xlstm"
# Every other family decodes chains and batches, and trees unless its kind of cache forbids them.
REFUSED = {
    "cpmant": NO_POSITIONS,
    **dict.fromkeys(("openai-gpt", "reformer", "rwkv", "xlnet"), NO_CACHE),
    **dict.fromkeys(OWN_STATES.split(), OWN_STATE),
}
