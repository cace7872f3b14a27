"""Layers of Llama's kind, for drafts on states of targets whose own layers cannot be silenced.

Logits are made of what leaves a target's last layer by RMSNorm or LayerNorm, whose weights are kept
in several ways, and by rows, which may be scaled and have a bias. The draft's states are the
*normed* ones (as EAGLE's, arXiv:2401.15077), so its own norms have an epsilon that makes them the
identity: before its norm, states of Gemma 3 differ in size by 100 between dimensions and the norm's
weights by 1,000, and one learning rate fits no two of them. A soft cap is left out: q need not have
p's form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from distill.states import silence
from distill.training import take_special_ids
from specdata.draft_vocabulary import replace_output
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.taps import decoder_layers

SMALL = 1e-3
"""Size of a state at which a norm's epsilon shows, and of a logit which a soft cap leaves."""
LARGE = 2.0**10
"""Size of states at which the norms of a draft would show; exact in any precision."""


@torch.no_grad()
def llama_draft(
    target: PreTrainedModel, layers: int, positions: int, seed: int
) -> tuple[PreTrainedModel, Callable[[Tensor], Tensor]]:
    """A model of silent layers with the target's embedding and output rows.

    And what makes its states of those that leave the target's last layer.
    """
    text, head = target.config.get_text_config(), find_lm_head(target)
    embed = target.get_input_embeddings()
    ids = torch.arange(text.vocab_size, device=embed.get_parameter("weight").device)
    tokens, found = embed(ids), _final_norm(target, text.hidden_size)  # Gemma's tokens are scaled
    rows: Any = getattr(head.embedding, "weight", None)
    if rows is None or rows.shape != tokens.shape or found is None:
        raise ConfigError(
            "draft.init.kind states needs a target that makes logits of its last states by RMSNorm "
            f"or LayerNorm and a matrix as large as its input embedding, {[*tokens.shape]}, and "
            f"{type(target).__name__} does not: use kind target, fresh or model"
        )
    weight, bias, epsilon, is_centred = found
    set_seed(seed)
    sizes = _sizes(text) | {"num_hidden_layers": layers, "max_position_embeddings": positions}
    config = LlamaConfig(vocab_size=1, rms_norm_eps=LARGE**2, tie_word_embeddings=False, **sizes)
    draft: Any = LlamaForCausalLM._from_config(config, dtype=rows.dtype).to(rows.device)
    for module in draft.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.fill_(LARGE)
    draft.set_input_embeddings(nn.Embedding(len(rows), text.hidden_size, _weight=tokens))
    slope = float(head.logit_transform(torch.tensor([SMALL], dtype=torch.float64))) / SMALL
    constant = nn.functional.linear(bias.to(rows), rows, getattr(head.embedding, "bias", None))
    output = nn.Linear(text.hidden_size, len(rows), bias=bool(constant.any()), device="meta")
    size = float(weight.abs().median())
    output.weight = nn.Parameter(slope * size * rows)
    if output.bias is not None:
        output.bias = nn.Parameter(slope * constant)
    replace_output(draft, output)
    silence(draft)
    take_special_ids(draft, target.generation_config)
    draft.config.vocab_size = text.vocab_size

    def normed(left: Tensor) -> Tensor:
        x = left.double() - is_centred * left.double().mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
        return (x * scale * (weight / size).to(x)).to(left)

    return draft.eval(), normed


def _final_norm(target: PreTrainedModel, width: int) -> tuple[Tensor, Tensor, float, bool] | None:
    """Weight (H,), bias (H,), epsilon of a target's last norm, and whether it takes the mean off.

    Found by trying states in the place of what leaves the last layer; None if it is no such norm.
    """
    signs = torch.ones(width, dtype=torch.float64).index_fill_(0, torch.arange(1, width, 2), -1.0)
    tried = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).double()
    states = torch.cat(
        [torch.outer(torch.tensor([1.0, -1.0, SMALL, -SMALL]).to(signs), signs), tried]
    )

    def instead(_module: nn.Module, _inputs: object, output: Any) -> Any:
        left = output if isinstance(output, Tensor) else output[0]
        given = states.to(left)[None]
        if left.shape != given.shape:
            return output
        return given if left is output else (given, *output[1:])

    hook = decoder_layers(target)[1][-1].register_forward_hook(instead)
    try:
        ids = torch.zeros(1, len(states), dtype=torch.long, device=target.device)
        made = hidden_states(target, ids)[0].double().cpu()
    finally:
        hook.remove()
    if made.shape != states.shape:
        return None
    bias, twice, small = (made[0] + made[1]) / 2, made[0] - made[1], made[2] - made[3]
    left = max(SMALL**2, float((small.norm() / twice.norm()) ** 2))  # s^2 (1 + e) / (s^2 + e)
    epsilon = float(f"{SMALL**2 * max(0.0, 1 - left) / max(SMALL**2, left - SMALL**2):.3g}")
    weight = twice / 2 * signs * (1 + epsilon) ** 0.5
    accuracy = 1e-3 if target.dtype in (torch.float32, torch.float64) else 3e-2
    for is_centred in (False, True):
        x = states - is_centred * states.mean(dim=-1, keepdim=True)
        remade = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight + bias
        if (remade - made)[4:].abs().amax() <= accuracy * made[4:].abs().amax():
            return weight, bias, epsilon, is_centred
    return None


def _sizes(text: Any) -> dict[str, Any]:
    """Of a layer: the target's, where it has such. Attention is full."""

    def size(name: str, otherwise: int) -> int:
        value = getattr(text, name, None)
        return value if type(value) is int and value > 0 else otherwise

    width = text.hidden_size
    choices = (size("num_attention_heads", width), max(1, width // 64))
    heads = next((each for each in choices if width % (2 * each) == 0), 1)
    groups = size("num_key_value_heads", heads)
    rope = getattr(text, "rope_parameters", None) or {}  # of each kind of layer, if they differ
    theta = rope.get("full_attention", rope).get("rope_theta", 10_000.0)
    return {
        "hidden_size": width,
        "intermediate_size": size("intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else heads,
        "head_dim": size("head_dim", width // heads) // 2 * 2 or 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
