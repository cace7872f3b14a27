"""Drafts in DSpark's form: how they begin (`specdata.draft_models.dspark`).

Without training they would begin with noise, and learn little from few rollouts. So the first slot
begins as the least squares of our other layouts, its state the target's last one as predicted
from the anchor's embedding and the target's states at the token before it. One group of
heads looks at the token itself, the other at the nearest context. The bias is the part of such a
map that a token's embedding decides, in few dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, set_seed

from distill.config import BLOCK, InitConfig, check_layout
from distill.states import fit_rows, ridge
from specdata.draft_models.depths import unused_token
from specdata.draft_models.draft_vocabulary import SIZE
from specdata.draft_models.dspark import BlockInput, MarkovOutput, dspark_class
from specdata.draft_models.states_draft import KEY, states_input, unit
from specdata.draft_models.taps import attach, decoder_layers, read_taps, record_of
from specdata.generation import special_ids
from specdata.target_states import target_taps

RANK = 64
"""Of the bias; drafts that were published have 256."""
PEAK, REACH, SLOW = 60.0, 6.0, 16.0
"""Score of a head at the token that it looks at, and in how many tokens it falls e-fold, nearly."""


@torch.no_grad()
def first_dspark(
    target: PreTrainedModel,
    taps: list[int],
    rollouts: Dataset,
    init: InitConfig,
    special: Sequence[int],
    seed: int,
) -> PreTrainedModel:
    """A new draft for a target of Llama's or Qwen's kind, of whose tokens some are special."""
    text: Any = target.config.get_text_config()
    check_layout("dspark", text.model_type, target.name_or_path)
    used = {*chain.from_iterable(chain(rollouts["prompt_ids"], rollouts["completion_ids"]))}
    mask = unused_token(used | {*special}, text.vocab_size)
    width = text.hidden_size
    size = getattr(text, "head_dim", None) or width // text.num_attention_heads
    groups = max(1, width // size)
    set_seed(seed)
    record = {
        **record_of(target, taps),
        "blocks": {"size": init.block or BLOCK, "mask": mask, "rank": RANK},
    }
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=init.layers,
        num_attention_heads=2 * groups,
        num_key_value_heads=groups,
        head_dim=size,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=False,
        **{KEY: record, SIZE: text.vocab_size},
    )
    draft: Any = dspark_class(Qwen3ForCausalLM)(config)
    draft.__class__ = Qwen3ForCausalLM
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    draft.model.embed_tokens.tokens.weight.copy_(target.get_input_embeddings().weight)
    draft.lm_head.weight.copy_(target.get_output_embeddings().weight)
    draft.model.norm.norm.weight.copy_(target.base_model.norm.weight)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    attach(draft, target)
    _fit(draft, target, taps, rollouts)
    return cast(PreTrainedModel, draft)


def _fit(draft: Any, target: PreTrainedModel, taps: list[int], rollouts: Dataset) -> None:
    """Set the first layer by least squares, and silence what else there is."""
    reads, last = cast(BlockInput, states_input(draft)), len(decoder_layers(target)[1])
    embedded, seen, final, contexts = [], [], [], []
    for row in fit_rows(rollouts):
        if len(row["completion_ids"]) < 2:
            continue
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=draft.device)
        first = len(row["prompt_ids"])
        read = target_taps(draft, [row], ids)
        assert read is not None
        contexts.append(read[0])
        embedded.append(reads.tokens(ids)[0, first:-1])
        seen.append(read[0, first - 1 : -2])
        final.append(unit(read_taps(target, [last], ids)[0, first:-1], 1))
    both = (torch.cat(each, dim=-1) for each in zip(embedded, seen, strict=True))
    width = reads.width
    reads.states.weight.copy_(ridge(zip(both, final, strict=True))[width:].T)
    layer = draft.model.layers[0]
    attention = layer.self_attn
    size = attention.head_dim
    contexts = [reads.contexts(each)[:, :width] for each in contexts]
    tokens = [unit(each, 1) for each in embedded]
    near = [reads.contexts(each)[:, :width] for each in seen]
    read_by = [torch.cat(each, dim=-1) for each in zip(tokens, near, strict=True)]
    rests = [y - e for y, e in zip(final, embedded, strict=True)]
    fitted = ridge(zip(read_by, rests, strict=True)).float()
    mask = unit(reads.tokens.weight[reads.blocks.mask][None], 1)
    sides = [(each, each.new_ones(len(each), 1)) for each in contexts]
    sides += [(each, -each.new_ones(len(each), 1)) for each in (*tokens, mask.expand(4096, -1))]
    is_context = ridge(sides)[:, 0].float()
    nearness = _nearness(size, draft.model.rotary_emb.inv_freq)
    direction = SLOW * torch.outer(nearness.sqrt().repeat(2), is_context)  # (size, H)
    heads = attention.q_proj.out_features // size
    groups = attention.k_proj.out_features // size
    strength = (PEAK / size**0.5) ** 0.5
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(strength)
    attention.k_proj.weight.copy_(direction.repeat(groups, 1))
    # Heads 2 g and 2 g + 1 share the keys of group g.
    signs = torch.tensor([1.0, -1.0]).repeat(heads // 2).repeat_interleave(size)
    attention.q_proj.weight.copy_(direction.repeat(heads, 1) * signs[:, None])
    value = torch.zeros_like(attention.v_proj.weight)
    value[:width, :width] = torch.eye(width)[: len(value)]
    attention.v_proj.weight.copy_(value)
    of_token, of_context = fitted[:width].T, fitted[width:].T  # (H, H)
    parts = torch.stack([of_token, of_context]).view(2, width, groups, size)
    attention.o_proj.weight.copy_(parts.permute(1, 2, 0, 3).flatten(1))
    layer.mlp.down_proj.weight.zero_()
    for other in draft.model.layers[1:]:
        other.self_attn.o_proj.weight.zero_()
        other.mlp.down_proj.weight.zero_()
    nn.init.normal_(reads.markov.weight, std=RANK**-0.5)
    cast(MarkovOutput, draft.lm_head).markov.zero_()


def _nearness(size: int, frequencies: Tensor) -> Tensor:
    """(size / 2,) shares of a head's pairs of dimensions, of which scores fall with distance."""
    distance = torch.arange(512.0, dtype=torch.float64)
    turned = (distance[:, None] * frequencies.double().cpu()).cos()
    weights = 1.0 + 7.0 * (distance < 12)
    import scipy.optimize

    shares, _ = scipy.optimize.nnls(
        (turned * weights[:, None]).numpy(), (torch.exp(-distance / REACH) * weights).numpy()
    )
    shares = torch.tensor(shares)
    return (shares / shares.sum()).float()
