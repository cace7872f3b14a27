"""Tiny Llamas as GGUF files, written as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from distill.toy import train_tokenizer
from tests.support.chats import CHATML

TEXT = "She bought 12 apples at 3 each; def add(a, b): return a + b. What did she pay?"
QUANTISED = {"Q4_1": Kind.Q4_1, "Q8_0": Kind.Q8_0}


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=288)
    tokenizer.chat_template = CHATML
    return tokenizer


def small_llama() -> LlamaForCausalLM:
    """Llama of width 64 for `chat_tokenizer`, two query heads to a key head."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=288,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
            initializer_range=0.3,
        )
    ).eval()


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, quantised: str | None = None
) -> dict[str, torch.Tensor]:
    """Write a model with `chat_tokenizer`; return the weights that the file holds.

    Its matrices are in F32, or quantised.
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        weight, kind = tensor.float().numpy(), Kind.F32
        if quantised and weight.ndim == 2:
            kind = QUANTISED[quantised]
        held[name] = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        held[name] = torch.from_numpy(held[name].reshape(weight.shape))
        if count := heads.get(name.split(".")[-2]):
            weight = _interleaved(weight, count)
        stored = gguf.quants.quantize(weight, kind)
        writer.add_tensor(names.get_name(name, [".weight"]), stored, raw_dtype=kind)
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
