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
        num_attention_heads=4 * groups,
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
    """Set the first layer by least squares, and silence the rest."""
    reads, last = cast(BlockInput, states_input(draft)), len(decoder_layers(target)[1])
    width, size = reads.width, reads.blocks.size
    embedded, seen, final = [], [], []
    for row in fit_rows(rollouts):
        if len(row["completion_ids"]) <= size:
            continue
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=draft.device)
        first = len(row["prompt_ids"])
        read = target_taps(draft, [row], ids)
        assert read is not None
        embedded.append(reads.tokens(ids)[0, first:-1])
        seen.append(read[0, first - 1 : -2])
        final.append(unit(read_taps(target, [last], ids)[0, first:-1], 1))
    both = (torch.cat(each, dim=-1) for each in zip(embedded, seen, strict=True))
    reads.states.weight.copy_(ridge(zip(both, final, strict=True))[width:].T)
    contexts = [reads.contexts(each)[:, :width] for each in seen]
    tokens = [unit(each, 1) for each in embedded]
    mask = reads.tokens.weight[reads.blocks.mask]
    normed_mask = unit(mask[None], 1)
    # Later slots: of the anchor, the context before it, and the token before, one map for all.
    later = [
        (
            torch.cat(
                [t[:-step], c[:-step], t[step:], t.new_ones(len(t) - step, 1)], dim=-1
            ),
            y[step:] - mask,
        )
        for t, c, y in zip(tokens, contexts, final, strict=True)
        for step in range(1, size)
    ]
    of_anchor, of_context, of_before, constant = ridge(later).float().split([width, width, width, 1])
    print("later explained", _explained(later, torch.cat([of_anchor, of_context, of_before, constant])))
    # The last of these in few dimensions is the bias.
    spread = torch.cat(tokens).double()
    factor = torch.linalg.cholesky(spread.T @ spread / len(spread) + 1e-6 * torch.eye(width))
    left, strength, right = torch.linalg.svd(factor.T @ of_before.double(), full_matrices=False)
    rank = reads.blocks.rank
    into = torch.linalg.solve(factor.T, left[:, :rank] * strength[:rank].sqrt()).float()
    out = (right[:rank].T * strength[:rank].sqrt()).float()  # (H, r)
    predicted = torch.cat([x @ torch.cat([of_anchor, of_context, torch.zeros_like(of_before), constant]) + mask for x, _ in later])
    scale = predicted.square().mean(-1).sqrt().mean()
    print("scale", scale, "kept", (strength[:rank].square().sum()/strength.square().sum()).item())
    reads.markov.weight.copy_(unit(reads.tokens.weight, 1) @ into)
    head = cast(MarkovOutput, draft.lm_head)
    norm = draft.model.norm.norm.weight
    head.markov.copy_(head.weight * norm @ out / scale)
    # The first slot, which has the bias, too, in proportion to its own size.
    alone = [
        (torch.cat([t, c], dim=-1), y - e)
        for t, c, e, y in zip(tokens, contexts, embedded, final, strict=True)
    ]
    fitted = ridge(alone).float()
    x = torch.cat([each @ fitted for each, _ in alone]) + torch.cat(embedded)
    ratio = x.square().mean(-1).sqrt().mean() / scale
    now = [
        (both, y - ratio * t @ into @ out.T)
        for (both, y), t in zip(alone, tokens, strict=True)
    ]
    fitted = ridge(now).float()
    print("ratio", ratio)
    print("now explained", _explained(now, fitted))
    first_anchor, first_context = fitted.split(width)
    _set_attention(
        draft.model.layers[0].self_attn,
        draft.model.rotary_emb.inv_freq,
        torch.cat(contexts), torch.cat(tokens), normed_mask,
        first_anchor, first_context, of_anchor, of_context, constant[0],
    )
    for layer in draft.model.layers:
        layer.mlp.down_proj.weight.zero_()
    for layer in draft.model.layers[1:]:
        layer.self_attn.o_proj.weight.zero_()


def _explained(pairs, fitted):
    y = torch.cat([b for _, b in pairs]); p = torch.cat([a.float() @ fitted for a, _ in pairs])
    return 1 - ((y-p).square().sum() / (y - y.mean(0)).square().sum()).item()


def _set_attention(attention, frequencies, contexts, tokens, mask, first_anchor, first_context, later_anchor, later_context, constant):
    """Four groups of heads: of the first slot and of later ones, at the anchor and at the nearest context."""
    size, width = attention.head_dim, contexts.shape[1]
    groups = attention.k_proj.out_features // size
    many = mask.expand(len(tokens), -1)
    zeros, ones = tokens.new_zeros(len(tokens), 1), tokens.new_ones(len(tokens), 1)
    is_mask = ridge([(contexts, zeros), (tokens, zeros), (many, ones)])[:, 0].float()
    is_anchor = _at_least_one(tokens, many)
    side = _at_least_one(torch.cat([contexts, -tokens]), many)
    print("wrong", (contexts @ side < 0.1).float().mean(), (tokens @ side > -0.1).float().mean(), (tokens @ is_anchor < 0.1).float().mean())
    print("kinds", [[(f"{(x @ y).mean().item():.3f}", f"{(x @ y).std().item():.3f}") for y in (side, is_anchor, is_mask)] for x in (contexts, tokens, many)])
    pairs = size // 2
    slow = max(1, pairs // 8)
    near = torch.zeros(pairs)
    near[: pairs - slow] = _nearness(frequencies[: pairs - slow]).sqrt()
    still = torch.zeros(pairs)
    still[pairs - slow :] = slow**-0.5
    near, still = near.repeat(2), still.repeat(2)
    key = torch.outer(near + still, side) + torch.outer(still - near, is_mask)
    attention.k_proj.weight.copy_(SLOW * key.repeat(groups, 1))
    at_context, at_anchor, at_mask = near, -still, still - near
    queries = [
        torch.outer(anchor, is_anchor) + torch.outer(mask, is_mask)
        for anchor, mask in (
            (at_anchor, at_mask), (at_context, at_mask), (at_anchor, at_anchor), (at_anchor, at_context)
        )
    ]
    attention.q_proj.weight.copy_(SLOW * torch.cat(queries).repeat(groups, 1))
    strength = (2**0.5 * PEAK / size**0.5) ** 0.5
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(strength)
    value = torch.zeros_like(attention.v_proj.weight)
    value[:width, :width] = torch.eye(width)[: len(value)]
    attention.v_proj.weight.copy_(value)
    # An anchor in the later groups reads itself, a mask in the first ones itself.
    first_anchor = first_anchor - later_anchor - later_context
    rows = torch.cat([tokens, many])
    wanted = torch.cat([tokens @ first_anchor, (constant - mask @ first_context).expand(len(many), -1)])
    first_anchor = ridge([(rows, wanted)]).float()
    maps = torch.stack([first_anchor.T, first_context.T, later_anchor.T, later_context.T])
    parts = maps.view(4, width, groups, size).permute(1, 2, 0, 3)
    attention.o_proj.weight.copy_(parts.flatten(1))


def _at_least_one(x: Tensor, mask: Tensor) -> Tensor:
    """(H,) a linear function of 1 or more on vectors (n, H), 0 on masks: squared hinges."""
    function = x.new_zeros(x.shape[1])
    masks = 10 * mask, mask.new_zeros(len(mask), 1)
    for _ in range(15):
        short = x[x @ function < 1]
        if not len(short):
            break
        function = ridge([(short, short.new_ones(len(short), 1)), masks])[:, 0].float()
    return function


def _nearness(frequencies: Tensor) -> Tensor:
    """(n,) shares of a head's pairs of dimensions, of which scores fall with distance."""
    distance = torch.arange(512.0, dtype=torch.float64)
    turned = (distance[:, None] * frequencies.double().cpu()).cos()
    weights = 1.0 + 7.0 * (distance < 12)
    import scipy.optimize

    shares, _ = scipy.optimize.nnls(
        (turned * weights[:, None]).numpy(), (torch.exp(-distance / REACH) * weights).numpy()
    )
    shares = torch.tensor(shares)
    return (shares / shares.sum()).float()
