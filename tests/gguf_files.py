"""Tiny Llamas as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from distill.toy import train_tokenizer
from tests.chats import CHATML

TEXT = "She bought 12 apples at 3 each; def add(a, b): return a + b. What did she pay?"
QUANTISED = {"Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0}
# transformers' names of a layer's weights -> llama.cpp's.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=288)
    tokenizer.chat_template = CHATML
    return tokenizer


def small_llama(seed: int = 0, *, layers: int = 2, tied: bool = True) -> LlamaForCausalLM:
    """Llama of width 64 for `chat_tokenizer`, two query heads to a key head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=288,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
            initializer_range=0.3,
        )
    ).eval()


def names(layers: int, *, tied: bool) -> dict[str, str]:
    """transformers' names of a Llama's weights -> llama.cpp's."""
    found = {ours: theirs for ours, theirs in OUTER.items() if not (tied and ours == "lm_head")}
    for layer in range(layers):
        for ours, theirs in LAYER.items():
            found[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in found.items()}


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    quantised: str | None = None,
) -> dict[str, torch.Tensor]:
    """Write a model with `chat_tokenizer`; return the weights that the file holds.

    Args:
        path: the file.
        model: the Llama.
        quantised: how matrices are stored; None is F32.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    held = {}
    for ours, theirs in names(config.num_hidden_layers, tied=config.tie_word_embeddings).items():
        weight = model.state_dict()[ours].float().numpy()
        heads = {"attn_q.weight": config.num_attention_heads}
        heads["attn_k.weight"] = config.num_key_value_heads
        count = heads.get(theirs.split(".", 2)[-1])
        stored = weight if count is None else _interleaved(weight, count)
        kind = QUANTISED[quantised] if quantised and weight.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(stored, kind)
        writer.add_tensor(theirs, data, raw_dtype=kind)
        back = gguf.quants.dequantize(data, kind).reshape(weight.shape)
        held[ours] = torch.from_numpy(back if count is None else _in_halves(back, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = chat_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a head in llama.cpp's order: rotated pairs side by side, not half a head apart."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, width))


def _in_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of `_interleaved`."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))
