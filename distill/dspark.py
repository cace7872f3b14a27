"""Drafts in DSpark's form: how they begin (`specdata.draft_models.dspark`).

A random start learns little from few rollouts: the first token of a block is accepted as often as
the last, hardly ever. So the first layer begins as least squares, of the target's last state.

The first slot reads the anchor's embedding and the context before it; later slots read the same two
by maps of their own. Each of these four is a group of heads, which looks at the anchor or at the
nearest context, and which masks or anchors turn away from. What the token before adds to the state
of a later slot is the bias: a map of its embedding, of as many dimensions as the bias has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from datasets import Dataset
from scipy.optimize import nnls
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from distill.config import BLOCK, InitConfig, check_layout
from distill.states import fit_rows, ridge
from specdata.draft_models.depths import unused_token
from specdata.draft_models.draft_vocabulary import SIZE
from specdata.draft_models.dspark import BlockInput, MarkovOutput, dspark_class
from specdata.draft_models.states_draft import KEY, states_input, unit
from specdata.draft_models.taps import attach, decoder_layers, read_taps, record_of
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.models import positions
from specdata.storage.columns import value_counts

RANK = 64
"""Of the bias; published drafts have 256."""
GROUPS = 4
"""Of heads: the first slot's and later ones', at the anchor and at the nearest context."""
PEAK, REACH = 20.0, 6.0
"""Score of a head at the token that it looks at, and in how many tokens it falls e-fold, nearly.

A higher one begins nearer to the least squares, but a softmax that is sure has no gradient: such
heads hardly learn to look elsewhere, and the trained draft is worse.
"""


@torch.no_grad()
def first_dspark(
    target: PreTrainedModel,
    taps: list[int],
    rollouts: Dataset,
    init: InitConfig,
    special: Sequence[int],
) -> PreTrainedModel:
    """A new draft for a target of Llama's or Qwen's kind, of whose tokens some are special."""
    text: Any = target.config.get_text_config()
    check_layout("dspark", text.model_type, target.name_or_path)
    used = {*special, *value_counts(rollouts, "prompt_ids", "completion_ids")}
    mask = unused_token(used, text.vocab_size)
    draft = new_dspark(text, record_of(target, taps), init, mask)
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    draft.model.embed_tokens.tokens.weight.copy_(target.get_input_embeddings().weight)
    draft.lm_head.weight.copy_(target.get_output_embeddings().weight)
    draft.model.norm.norm.weight.copy_(target.base_model.norm.weight)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    attach(draft, target)
    for layer in draft.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    _fit(draft, target, taps, rollouts)
    return cast(PreTrainedModel, draft)


def new_dspark(text: Any, record: Mapping[str, Any], init: InitConfig, mask: int) -> Any:
    """The draft as its class makes it.

    Of a target whose text configuration and taps (`taps.record_of`) are given, as is the mask.
    """
    width = text.hidden_size
    size = (getattr(text, "head_dim", None) or width // text.num_attention_heads) // 2 * 2 or 2
    groups = -(-width // size)
    blocks = {"size": init.block or BLOCK, "mask": mask, "rank": min(RANK, width)}
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=init.layers,
        num_attention_heads=GROUPS * groups,
        num_key_value_heads=groups,
        head_dim=size,
        max_position_embeddings=positions(text),
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=False,
        **{KEY: {**record, "blocks": blocks}, SIZE: text.vocab_size},
    )
    draft: Any = dspark_class(Qwen3ForCausalLM)(config)
    draft.__class__ = Qwen3ForCausalLM
    return draft


def _fit(draft: Any, target: PreTrainedModel, taps: list[int], rollouts: Dataset) -> None:
    """Set the context's map, the bias and the attention of the first layer."""
    reads, last = cast(BlockInput, states_input(draft)), len(decoder_layers(target)[1])
    width, size = reads.width, reads.blocks.size
    embedded, seen, final = [], [], []
    for row in fit_rows(rollouts):
        if len(row["completion_ids"]) < 3:
            continue
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=draft.device)
        first, read = len(row["prompt_ids"]), read_taps(target, [*taps, last], ids)[0]
        embedded.append(reads.tokens(ids)[0, first:-1])
        seen.append(read[first - 1 : -2, :-width])
        final.append(unit(read[first:-1, -width:], 1))
    if not embedded:
        raise ConfigError(
            "a draft in DSpark's layout begins from completions of three tokens and more, and no "
            "rollout has one: raise rollouts.max_new_tokens and make the rollouts again"
        )
    largest = torch.cat(seen).square().mean(dim=0).sqrt().clamp(min=1e-6)
    reads.scale.copy_(2.0 ** -largest.log2().round())  # powers of two, so that nothing is rounded
    both = (torch.cat([x, g * reads.scale], dim=-1) for x, g in zip(embedded, seen, strict=True))
    reads.states.weight.copy_(ridge(zip(both, final, strict=True))[width:].T)
    contexts = [reads.contexts(each)[:, :width] for each in seen]
    tokens = [unit(each, 1) for each in embedded]
    mask = reads.tokens.weight[reads.blocks.mask]

    def later() -> Iterator[tuple[Tensor, Tensor]]:
        """Of a text and a later slot after the other: all together are many times the texts."""
        for token, context, state in zip(tokens, contexts, final, strict=True):
            for n in range(1, min(size, len(token))):
                x = (token[:-n], context[:-n], token[n:], token.new_ones(len(token) - n, 1))
                yield torch.cat(x, dim=-1), state[n:] - mask

    fitted = ridge(later()).float()
    of_anchor, of_context, of_before, constant = torch.split(fitted, [width, width, width, 1])
    # The token before, in as many dimensions as keep most of what it adds.
    spread = torch.cat(tokens).double()
    spread = spread.T @ spread / len(spread)
    spread.diagonal().add_(1e-6)
    root = torch.linalg.cholesky(spread)
    left, strength, right = torch.linalg.svd(root.T @ of_before.double())
    half = strength[: reads.blocks.rank].sqrt()
    w1 = torch.linalg.solve(root.T, left[:, : len(half)] * half).float()
    w2 = (right[: len(half)].T * half).float()
    reads.markov.weight.copy_(unit(reads.tokens.weight, 1) @ w1)
    # The final norm makes states of one size, which logits and the bias share.
    alone = torch.cat([of_anchor, of_context, torch.zeros_like(of_before), constant])
    scale = torch.cat([_sizes(x @ alone + mask) for x, _ in later()]).mean()
    head, norm = cast(MarkovOutput, draft.lm_head), draft.model.norm.norm.weight
    head.markov.copy_(head.weight * norm @ w2 / scale)

    now = [
        (torch.cat([token, context], dim=-1), state - x)
        for token, context, x, state in zip(tokens, contexts, embedded, final, strict=True)
    ]
    states = torch.cat([x for x, _ in now]) @ ridge(now).float() + torch.cat(embedded)
    bias = _sizes(states).mean() / scale * w1 @ w2.T  # which the first slot has, too
    now = [(x, y - x[:, :width] @ bias) for x, y in now]
    first_anchor, first_context = torch.split(ridge(now).float(), width)
    _set_attention(
        draft.model,
        torch.cat(contexts),
        torch.cat(tokens),
        unit(mask[None], 1),
        (first_anchor, first_context, of_anchor, of_context),
        constant[0],
    )


def _set_attention(
    body: Any,
    contexts: Tensor,
    tokens: Tensor,
    mask: Tensor,
    maps: tuple[Tensor, Tensor, Tensor, Tensor],
    constant: Tensor,
) -> None:
    """Have the first layer's groups of heads add linear maps of the anchor and of the context.

    Keys tell contexts, anchors and masks apart, and queries anchors and masks, by linear functions
    of what is read. In some pairs of dimensions, which turn with the position, scores fall with
    the distance; in the slowest they do not.
    """
    attention = body.layers[0].self_attn
    size, width = attention.head_dim, contexts.shape[1]
    groups = attention.k_proj.out_features // size
    many = mask.expand(len(tokens), -1)
    zeros, ones = tokens.new_zeros(len(tokens), 1), tokens.new_ones(len(tokens), 1)
    is_mask = ridge([(contexts, zeros), (tokens, zeros), (many, ones)])[:, 0].float()
    is_anchor = _at_least_one(tokens, many)
    side = _at_least_one(torch.cat([contexts, -tokens]), many)  # of contexts, not of tokens
    pairs = size // 2
    slow = max(1, pairs // 8)
    near, still = contexts.new_zeros(2, pairs)
    near[: pairs - slow] = _nearness(body.rotary_emb.inv_freq[: pairs - slow]).to(near).sqrt()
    still[pairs - slow :] = slow**-0.5
    near, still = near.repeat(2), still.repeat(2)
    key = torch.outer(near + still, side) + torch.outer(still - near, is_mask)
    at_context, at_anchor, at_mask = near, -still, still - near
    looks = [(at_anchor, at_mask), (at_context, at_mask)]  # of anchors and of masks
    looks += [(at_anchor, at_anchor), (at_anchor, at_context)]
    queries = [torch.outer(one, is_anchor) + torch.outer(other, is_mask) for one, other in looks]
    attention.k_proj.weight.copy_(key.repeat(groups, 1))
    attention.q_proj.weight.copy_(torch.cat(queries).repeat(groups, 1))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((PEAK / size**0.5) ** 0.5)
    nn.init.eye_(attention.v_proj.weight)
    # Turned away, an anchor reads itself, and a mask a mask.
    first_anchor, first_context, of_anchor, of_context = maps
    first_anchor = first_anchor - of_anchor - of_context
    rest = constant - mask[0] @ (first_anchor + first_context)
    first_anchor = first_anchor + torch.outer(is_mask, rest)
    maps = (first_anchor, first_context, of_anchor, of_context)
    whole = torch.stack([nn.functional.pad(each.T, (0, groups * size - width)) for each in maps])
    parts = whole.view(GROUPS, width, groups, size).permute(1, 2, 0, 3)
    attention.o_proj.weight.copy_(parts.flatten(1))


def _at_least_one(x: Tensor, mask: Tensor) -> Tensor:
    """(H,) a linear function of 1 or more on vectors (n, H), by squared hinges, and 0 on masks."""
    function = x.new_zeros(x.shape[1])
    for _ in range(16):
        short = x[x @ function < 1]
        if not len(short):
            break
        wanted = [(short, short.new_ones(len(short), 1)), (10 * mask, mask.new_zeros(len(mask), 1))]
        function = ridge(wanted)[:, 0].float()
    return function


def _nearness(frequencies: Tensor) -> Tensor:
    """(n,) shares of pairs of dimensions, 1 together, by which scores fall with the distance."""
    distance = torch.arange(512.0, dtype=torch.float64)
    turned = (distance[:, None] * frequencies.double().cpu()).cos()
    weight = 1.0 + 7.0 * (distance < 2 * REACH)  # near tokens matter most
    wanted = torch.exp(-distance / REACH)
    shares, _ = nnls((turned * weight[:, None]).numpy(), (wanted * weight).numpy())
    return torch.tensor(shares / shares.sum())


def _sizes(states: Tensor) -> Tensor:
    """(n,) root mean squares of states (n, H)."""
    return states.square().mean(dim=-1).sqrt()
