"""All depths of a draft that proposes several tokens after one forward, in one pass over a text.

Behind the text stand the masks of the rounds that begin in it, each of which sees the text up to
its round and the masks before it. Training keeps them of fewer rounds the deeper they stand (PARD,
arXiv:2504.18583, section 3), so that of four depths the layers read 2.5 tokens for each of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.batches import tokens_of
from distill.states import window
from specdata.depths import MASK, add_masks, depths_of
from specdata.errors import ConfigError
from specdata.lm_head import body_of
from specdata.models import positions
from specdata.states_draft import before, final_norm, states_input
from specdata.taps import capturing_taps, decoder_layers

KEPT, LEAST_KEPT = 0.7, 0.2
"""Share of the rounds of depth d - 1 that are kept at depth d, and the least share of all."""
GOLDEN = (5**0.5 - 1) / 2


def share_kept(depth: int) -> float:
    """The share of the rounds of which the mask at a depth is read in training."""
    return max(LEAST_KEPT, KEPT**depth)


def read_ahead(
    model: PreTrainedModel,
    ids: Tensor,
    count: int,
    *,
    taps: Tensor | None = None,
    begins: Tensor | None = None,
    dropping: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The draft's last states along texts: after their tokens, and then after masks.

    State s at position t is what drafting gives at the (s + 1)-th token of a round that began at
    t - s; deeper than its masks, their last one.

    Args:
        model: the draft; a gradient reaches it.
        ids: (B, T); padding is on the right, where no token sees it.
        count: how many.
        taps: (B, T, states) the target's, if the draft reads any.
        begins: (B, T) bool where rounds begin that are asked for, by default anywhere.
        dropping: a number, other in each step, that decides which rounds lose their masks; None:
            none does.

    Yields:
        For s = 0, 1, ...: (B, T, H), and (B, T) bool where they are those of a round.
    """
    (rows, length), masks, reads = ids.shape, depths_of(model) - 1, states_input(model)
    at = torch.arange(length, device=ids.device)
    row = torch.arange(rows, device=ids.device)[:, None]
    begin = at.expand(rows, -1) if begins is None else window(begins)
    shares = [1.0] * masks
    rank = torch.zeros(begin.shape, device=ids.device)
    if dropping is not None:  # evenly spread, and nested: a mask sees those before it
        shares = [share_kept(depth) for depth in range(1, masks + 1)]
        rank, order = ((begin + dropping * GOLDEN**2) * GOLDEN % 1.0).sort(dim=1)
        begin = begin.gather(1, order)
    kept = [max(1, int((rank < share).sum(dim=1).max())) for share in shares]
    at_mask = torch.cat([begin[:, :each] for each in kept], dim=1)  # (B, M), depth by depth
    depth = torch.cat([at.new_full((each,), number) for number, each in enumerate(kept)])
    group = torch.cat([torch.arange(each, device=ids.device) for each in kept])
    if reads is None:
        mask_ids = torch.full_like(at_mask, getattr(model.config, MASK))
        inputs = {"input_ids": torch.cat([ids, mask_ids], dim=1)}
    else:
        assert taps is not None
        states = before(taps)
        x = reads.masks_after(ids[row, begin], states[row, begin])[:, group, depth]
        inputs = {"inputs_embeds": torch.cat([reads.after_target(ids, states), x], dim=1)}
    total = length + len(depth)
    visible = torch.zeros(rows, total, total, dtype=torch.bool, device=ids.device)
    visible[:, :length, :length] = at <= at[:, None]
    visible[:, length:, :length] = at <= at_mask[..., None]
    visible[:, length:, length:] = (group == group[:, None]) & (depth <= depth[:, None])
    device = ids.device.type
    in_half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if in_half else model.dtype
    mask = torch.zeros(visible.shape, dtype=dtype, device=ids.device)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    left: list[Tensor] = []
    with capturing_taps(model, [len(decoder_layers(model)[1])] if reads else [], left.append):
        places = torch.cat([at.expand(rows, -1), at_mask + 1 + depth], dim=1)
        along = body_of(model)(
            attention_mask=mask[:, None],
            position_ids=places.clamp(max=positions(model.config) - 1),  # masks may stand beyond
            use_cache=False,
            **inputs,
        )[0]
    yield along[:, :length], torch.ones_like(ids, dtype=torch.bool)
    ahead = (left[0] if left else along)[:, length:].split(kept, dim=1)
    path = along.new_zeros(rows, length, along.shape[-1])
    for step in range(1, count):
        of_depth = ahead[min(step, masks) - 1]
        here = begin[:, : of_depth.shape[1]]
        states = along.new_zeros(path.shape)
        states = states.index_put((row, here), of_depth.to(states))
        states = nn.functional.pad(states, (0, 0, step, 0))[:, :length]
        if reads is not None:
            path = reads.after_own(ids, before(path))
            states = final_norm(model)(states + path)
        is_kept = torch.zeros_like(ids, dtype=torch.bool)
        is_kept[row, here] = rank[:, : here.shape[1]] < shares[min(step, masks) - 1]
        yield states, nn.functional.pad(is_kept, (step, 0))[:, :length]


def with_masks(
    drafts: Sequence[PreTrainedModel], depths: int, special: Sequence[int], *rollouts: Dataset
) -> None:
    """Let plain drafts with the same weights learn to propose `depths` tokens after one forward.

    With 1, as many as they have learnt to.
    """
    if depths == 1 and states_input(drafts[0]) is None:
        depths = depths_of(drafts[0])
    if depths == 1:
        return
    used, longest, completion = {*special}, 0, 0
    for row in chain.from_iterable(map(tokens_of, rollouts)):
        text = row["prompt_ids"] + row["completion_ids"]
        used.update(text)
        longest = max(longest, len(text))
        completion = max(completion, len(row["completion_ids"]))
    if depths > completion:
        raise ConfigError(
            f"draft.depths must be at most {completion}, the tokens of the longest completion, got "
            f"{depths}: lower it, or raise rollouts.max_new_tokens"
        )
    for each in drafts:
        add_masks(each, depths, used)
    check_masks(drafts[-1], longest)


@torch.no_grad()
def check_masks(model: PreTrainedModel, longest: int) -> None:
    """Make sure that one pass gives a plain draft's states after masks, as a forward would.

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
        found = read_ahead(model, longer, masks + 1, begins=begins)
        states = torch.stack([each[0, size - 1 + s] for s, (each, _) in enumerate(found)])
        gap = float((states - expected).norm() / expected.norm())
    except (RuntimeError, TypeError, ValueError, IndexError, ConfigError) as error:
        raise ConfigError(_REFUSED.format(type(model).__name__, error)) from error
    if not gap < 1e-2:
        raise ConfigError(_REFUSED.format(type(model).__name__, f"states differ by {gap:.1e}"))


_REFUSED = (
    "draft.depths needs a draft whose attention takes any mask, and {} does not ({}): leave it out"
)
