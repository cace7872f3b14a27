"""EAGLE-3 drafts: how they begin (`specdata.draft_models.eagle`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.config import check_layout
from distill.engine_layouts import LAYER, TOKENS, made_eagle3
from distill.states import fit_rows, ridge
from specdata.draft_models.states_draft import Norms, unit
from specdata.draft_models.taps import decoder_layers, read_taps

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What a new draft's config.json has of the target's."""
TURNED, AT_ITSELF = 8, 32.0
"""The share of a head's dimensions that a token knows itself by, and the score that this gives."""


@torch.no_grad()
def first_eagle3(
    target: PreTrainedModel, taps: Sequence[int], rollouts: Dataset
) -> PreTrainedModel:
    """A new draft of the target's last layer, all of whose norm flags are off.

    `fc` predicts the target's last state from the taps at the token before (ridge regression), and
    the target's final norm and output matrix make tokens of it. The token itself enters by
    attention alone, so that begins by looking at itself (`_attention_to_itself`), and adds what is
    left of that state. The target is of Llama's or Qwen's kind.
    """
    layer, last = layer_of(target, "eagle3"), decoder_layers(target)[1]
    text = target.config.get_text_config()
    inputs, outputs, tokens = [], [], []
    for row in fit_rows(rollouts):
        if len(row["completion_ids"]) < 2:
            continue
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
        read, first = read_taps(target, [*taps, len(last)], ids)[0], len(row["prompt_ids"])
        inputs.append(read[first - 1 : -2, : -text.hidden_size])
        outputs.append(read[first:-1, -text.hidden_size :])
        tokens.append(ids[0, first:-1])
    embedding = target.get_input_embeddings()
    norm = last[-1].get_parameter("input_layernorm.weight")
    fc = ridge(zip(inputs, outputs, strict=True)).to(norm)
    tensors = {TOKENS: embedding.weight, "model.embed_tokens.states.weight": fc.T}
    states = [each @ fc for each in inputs]
    reads = [
        torch.cat([unit(embedding(ids), 1), unit(each, 1) * norm], dim=-1)
        for ids, each in zip(tokens, states, strict=True)
    ]
    rests = [all_of_it - each for all_of_it, each in zip(outputs, states, strict=True)]
    for name, weight in _attention_to_itself(reads, rests, text).items():
        tensors[f"{LAYER}self_attn.{name}_proj.weight"] = weight.to(norm)
    for key, weight in last[-1].state_dict().items():
        name = key.removesuffix(".weight")
        if name == "mlp.down_proj":
            tensors[f"{LAYER}{key}"] = torch.zeros_like(weight)
        elif name == "input_layernorm":  # that of the state, which is what it read
            tensors[f"{LAYER}hidden_norm.weight"] = weight
            tensors[f"{LAYER}{key}"] = torch.ones_like(weight)
        elif name.endswith(("gate_proj", "up_proj")) or name == "post_attention_layernorm":
            tensors[f"{LAYER}{key}"] = weight
    tensors["norm.weight"] = target.base_model.norm.weight
    tensors["lm_head.weight"] = target.get_output_embeddings().weight
    ids = torch.arange(text.vocab_size)
    return made_eagle3(layer, taps, Norms(), tensors, ids, target, "the new draft")


def _attention_to_itself(
    reads: Sequence[Tensor], rests: Sequence[Tensor], text: Any
) -> dict[str, Tensor]:
    """Matrices of an attention that gives each token a linear map of what it reads itself.

    Queries and keys are one constant vector, nearly: what best predicts 1. In pairs of dimensions
    that are turned by different angles from token to token it is most like itself at distance 0.
    Values are the map of least squares, of the rank that they have, from the (n, 2 H) that are read
    of each text to the (n, H) that are to be added there.
    """
    width, heads = text.hidden_size, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or width // heads
    ones = (torch.cat([each, each.new_ones(len(each), 1)], dim=-1) for each in rests)
    fitted = ridge(zip(reads, ones, strict=True))
    added, constant = fitted[:, :width], fitted[:, width]
    made = sum(((each.double() @ added).T @ (each.double() @ added) for each in reads), 0.0)
    kept = torch.linalg.eigh(made).eigenvectors[:, -groups * size :]  # (H, rank)
    kept = nn.functional.pad(kept, (groups * size - kept.shape[1], 0))
    turned = max(1, size // TURNED)
    scale = (AT_ITSELF * size**0.5 / turned) ** 0.5
    of_head = torch.zeros(size, len(constant), dtype=torch.float64, device=constant.device)
    of_head[:turned] = scale * constant
    of_group = (kept / (heads // groups)).view(width, groups, 1, size)
    return {
        "q": of_head.repeat(heads, 1),
        "k": of_head.repeat(groups, 1),
        "v": (added @ kept).T,
        "o": of_group.expand(-1, -1, heads // groups, -1).reshape(width, heads * size),
    }


def layer_of(target: PreTrainedModel, layout: str) -> dict[str, Any]:
    """The sizes of a draft's layer that begins as a target's last. Raises ConfigError."""
    text = target.config.get_text_config()
    check_layout(layout, text.model_type, target.name_or_path)
    layer = {key: getattr(text, key) for key in SIZES if hasattr(text, key)}
    return {**layer, "num_hidden_layers": 1, "tie_word_embeddings": False}
