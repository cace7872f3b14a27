"""Random drafts in DSpark's form, and what one drafts, written out: the published definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specdata.draft_models.draft_vocabulary import SIZE
from specdata.draft_models.dspark import dspark_class
from specdata.draft_models.states_draft import KEY
from specdata.draft_models.taps import attach, record_of

HEADS, GROUPS, RANK = 4, 2, 5


def block_draft(
    target: PreTrainedModel,
    *,
    size: int = 3,
    layers: int = 1,
    taps: Sequence[int] = (0, 1, 2),
    seed: int = 7,
) -> PreTrainedModel:
    """In the target's precision; its mask is the last token."""
    text: Any = target.config
    blocks = {"size": size, "mask": text.vocab_size - 1, "rank": RANK}
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **{KEY: {**record_of(target, taps), "blocks": blocks}, SIZE: text.vocab_size},
    )
    draft: Any = dspark_class(Qwen3ForCausalLM)(config)
    draft.__class__ = Qwen3ForCausalLM
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, float(weight.dim() == 1), 0.3)
    torch.nn.init.normal_(draft.lm_head.weight)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    draft.generation_config = target.generation_config
    attach(draft.to(target.dtype).eval(), target)
    return draft


@torch.inference_mode()
def defined(draft: Any, committed: list[int], path: list[int]) -> Tensor:
    """(H + r,) the state of the slot behind a path; deeper than the block, of its last slot."""
    w, reads = dict(draft.named_parameters()), draft.get_input_embeddings()
    record, config = draft.config.target_states, draft.config
    size, mask = record["blocks"]["size"], record["blocks"]["mask"]
    taps = reads.read_target(torch.tensor([committed]))[0, :-1]
    c = normed(linear(taps, reads.states.weight), reads.hidden_norm.weight)
    x = reads.tokens.weight[[committed[-1], *[mask] * (size - 1)]]
    at = torch.arange(len(c) + size)
    for index in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{index}."): each
            for name, each in w.items()
            if name.startswith(f"model.layers.{index}.")
        }
        read = torch.cat([c, normed(x, own["input_layernorm.weight"])])
        q, k, v = (
            linear(read, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, 8))
            for name in "qkv"
        )
        q, k = (
            turned(normed(each, own[f"self_attn.{name}_norm.weight"]), at)
            for name, each in (("q", q), ("k", k))
        )
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        scores = torch.einsum("qhs,khs->hqk", q[len(c) :], k) / 8**0.5  # nothing is hidden
        seen = torch.einsum("hqk,khs->qhs", scores.softmax(-1), v).flatten(1)
        x = x + linear(seen, own["self_attn.o_proj.weight"])
        inner = normed(x, own["post_attention_layernorm.weight"])
        gate = silu(linear(inner, own["mlp.gate_proj.weight"]))
        x = x + linear(gate * linear(inner, own["mlp.up_proj.weight"]), own["mlp.down_proj.weight"])
    last = normed(x, w["model.norm.norm.weight"])[min(len(path), size - 1)]
    return torch.cat([last, reads.markov.weight[(committed + path)[-1]]])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    single = x.float()  # as transformers does
    return weight * (single * torch.rsqrt(single.square().mean(-1, keepdim=True) + 1e-6)).to(x)


def turned(x: Tensor, at: Tensor) -> Tensor:
    """(T, heads, size) turned to positions (T,)."""
    size = x.shape[-1]
    angles = at[:, None] * (1.0 / 10000.0 ** (torch.arange(0, size, 2) / size))  # in float32
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    other = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
    return x * angles.cos() + other * angles.sin()
