"""Drafts with masks: how they get them, and what they say along texts.

A text is read once, and behind it the masks of the rounds that begin in it, each of which sees the
text up to its round and the masks before it. Training keeps them of fewer rounds the deeper they
stand (PARD, arXiv:2504.18583, section 3), so that of four depths the layers read 2.5 tokens for
each of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from distill.drafts import plain
from distill.rounds import Place, Texts, placed, ranks, window
from specdata.drafts.attention import Seen, attending_along
from specdata.drafts.depths import add_masks, depths_of
from specdata.drafts.masks import MASK
from specdata.drafts.states_network import states_input
from specdata.errors import ConfigError
from specdata.lm_head import LMHead, body_of
from specdata.models import positions
from specdata.storage.columns import list_lengths, value_counts

begin, of_shapes = plain.begin, plain.of_shapes  # masks come with training: `with_masks`
KEPT, LEAST_KEPT = 0.7, 0.2
"""Share of the rounds of depth d - 1 that are kept at depth d, and the least share of all."""


def states_by_place(draft: LMHead, texts: Texts) -> Iterator[Place]:
    """The states of a draft after texts' tokens, and then after masks."""
    return after_masks(draft.model, texts)


def after_masks(model: PreTrainedModel, texts: Texts) -> Iterator[Place]:
    """The states of a draft after texts' tokens, and then after masks.

    State s at position t is what drafting gives at the (s + 1)-th token of a round that began at
    t - s; deeper than its masks, their last one.
    """
    ids, count, _, _, begins, dropping = texts
    (rows, length), masks = ids.shape, depths_of(model) - 1
    index = torch.arange(length, device=ids.device)
    begin = index.expand(rows, -1) if begins is None else window(begins)
    shares = [1.0] * masks
    rank = torch.zeros(begin.shape, device=ids.device)
    if dropping is not None:  # evenly spread, and nested: a mask sees those before it
        shares = [max(LEAST_KEPT, KEPT**depth) for depth in range(1, masks + 1)]
        rank, order = ranks(begin, dropping).sort(dim=1)
        begin = begin.gather(1, order)
    kept = [max(1, int((rank < share).sum(dim=1).max())) for share in shares]
    at_mask = torch.cat([begin[:, :each] for each in kept], dim=1)  # (B, M), depth by depth
    depth = torch.cat([index.new_full((each,), number) for number, each in enumerate(kept)])
    group = torch.cat([torch.arange(each, device=ids.device) for each in kept])
    mask_ids = torch.full_like(at_mask, getattr(model.config, MASK))
    # A mask sees those of its round down to itself.
    down = torch.arange(masks, device=ids.device)
    first = torch.tensor([0, *kept[:-1]], device=ids.device).cumsum(0)
    extra_keys = torch.where(down <= depth[:, None], first + group[:, None], -1)
    extra_keys = nn.functional.pad(extra_keys, (0, 0, length, 0), value=-1)
    last = torch.cat([index.expand(rows, -1), at_mask], dim=1)
    seen = Seen(length, last, extra_keys.expand(rows, -1, -1))
    device = ids.device.type
    in_half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if in_half else model.dtype
    places = torch.cat([index.expand(rows, -1), at_mask + 1 + depth], dim=1)
    with attending_along(model, seen, len(depth), dtype) as mask:
        read = body_of(model)(
            input_ids=torch.cat([ids, mask_ids], dim=1),
            attention_mask=mask,
            position_ids=places.clamp(max=positions(model.config) - 1),  # masks may stand beyond
            use_cache=False,
        )[0]
    after_tokens, *ahead = read.split([length, *kept], dim=1)
    yield Place(after_tokens, torch.ones_like(ids, dtype=torch.bool))
    for step in range(1, count):
        deepest = min(step, masks) - 1
        here = begin[:, : kept[deepest]]
        is_kept = rank[:, : here.shape[1]] < shares[deepest]
        yield placed(ahead[deepest], here, step, length, is_kept, shares[deepest])


def with_masks(
    draft: PreTrainedModel, depths: int, special: Sequence[int], *rollouts: Dataset
) -> None:
    """Let a draft learn to propose `depths` tokens after one forward.

    With 1, as many as it has learnt to; one on its target's states has no masks to learn.
    """
    if depths == 1 and states_input(draft) is None:
        depths = depths_of(draft)
    if depths == 1:
        return
    columns = ("prompt_ids", "completion_ids")
    lengths = np.hstack([list_lengths(each, *columns) for each in rollouts])
    longest, completion = lengths.sum(axis=0).max(), lengths[1].max()
    used = {*special}.union(*(value_counts(each, *columns) for each in rollouts))
    if depths > completion:
        raise ConfigError(
            f"draft.depths must be at most {completion}, the tokens of the longest completion, got "
            f"{depths}: lower it, or raise rollouts.max_new_tokens"
        )
    add_masks(draft, depths, used)
    check_masks(draft, longest)


@torch.no_grad()
def check_masks(model: PreTrainedModel, longest: int) -> None:
    """Make sure that one pass gives a draft's states after masks, as a forward would.

    Found out by trying, at full length: what a window hides is seen only beyond it.
    """
    masks, tokens = depths_of(model) - 1, len(model.get_input_embeddings().weight)
    size = min(longest, positions(model.config) - masks)
    ids = torch.arange(size, device=model.device)[None] * 7919 % tokens
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[0, -1] = True
    after = torch.cat([ids, ids.new_full((1, masks), getattr(model.config, MASK))], dim=1)
    try:
        expected = body_of(model)(input_ids=after, use_cache=False)[0][0, size - 1 :]
        longer = torch.cat([ids, ids.new_zeros(1, masks)], dim=1)  # room for later places
        begins = nn.functional.pad(begins, (0, masks))
        found = after_masks(model, Texts(longer, masks + 1, begins=begins))
        states = torch.stack([each.states[0, size - 1 + s] for s, each in enumerate(found)])
        gap = float((states - expected).norm() / expected.norm())
    except (RuntimeError, TypeError, ValueError, IndexError, ConfigError) as error:
        raise ConfigError(_REFUSED.format(type(model).__name__, error)) from error
    if not gap < 1e-2:
        raise ConfigError(_REFUSED.format(type(model).__name__, f"states differ by {gap:.1e}"))


_REFUSED = (
    "draft.depths needs a draft whose attention takes any mask, and {} does not ({}): leave it out"
)
