"""What drafts say along known texts at each token of a round, for training and measuring.

A round that begins after position t drafts the tokens at t + 1, t + 2, ...: place s of it, counted
from 0, is read at t + s. `along_rounds` gives the states there, of a whole text at a time, of each
kind of draft (`Place`):

- a plain draft reads the text once, and every place is alike;
- a draft on its target's states reads it once for each place, first after the target's states, then
  after its own of the time before, as while decoding (training-time test: Li et al. 2025, EAGLE-3,
  arXiv:2503.01840);
- a draft in blocks (`draft_models.dspark`) reads blocks behind the target's states, of which
  training samples some;
- a draft with masks (`draft_models.depths`) reads it once, and behind it the masks of the rounds
  that begin in it, each of which sees the text up to its round and the masks before it. Training
  keeps them of fewer rounds the deeper they stand (PARD, arXiv:2504.18583, section 3), so
  that of four depths the layers read 2.5 tokens for each of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from specdata.cache import cache_argument
from specdata.draft_models.attention import Seen, attending_along
from specdata.draft_models.depths import MASK, add_masks, depths_of
from specdata.draft_models.dspark import BlockInput, BlockModel, read_blocks
from specdata.draft_models.states_draft import before, states_input
from specdata.errors import ConfigError
from specdata.lm_head import LMHead, body_of
from specdata.models import positions
from specdata.processes import in_group, largest_of_all
from specdata.storage.columns import list_lengths, value_counts

DECAY = 0.8
"""Weight of each place of a round over the one before it (EAGLE-3's)."""
KEPT, LEAST_KEPT = 0.7, 0.2
"""Share of the rounds of depth d - 1 that are kept at depth d, and the least share of all."""
WHOLE, BLOCKS = 0.25, 256
"""Share of the blocks of a text that training reads beyond their first slot, and blocks that are
read at a time, at most."""
GOLDEN = (5**0.5 - 1) / 2


class Place(NamedTuple):
    """One place of every round along texts.

    Attributes:
        states: (B, T, H) the draft's last; at position t of a round that began at t - s.
        kept: (B, T) bool where they are read.
        share: of the rounds, that were kept.
    """

    states: Tensor
    kept: Tensor
    share: float = 1.0


def along_rounds(
    draft: LMHead,
    ids: Tensor,
    count: int,
    *,
    attention: Tensor | None = None,
    taps: Tensor | None = None,
    begins: Tensor | None = None,
    dropping: int | None = None,
) -> Iterator[Place]:
    """The states of a draft along texts at each place of a round.

    Args:
        draft: a gradient reaches it.
        ids: (B, T); padding is on the right, where no token sees it.
        count: how many places; a plain draft, of which all are alike, gives one.
        attention: (B, T), 1 at tokens, for a plain draft.
        taps: (B, T, states) the target's, if the draft reads any.
        begins: (B, T) bool where rounds begin that are asked for, by default anywhere; prompts,
            which nobody drafts, are most of a batch. Places after the first have no meaning
            elsewhere, and at t < s.
        dropping: a number, other in each step, that decides which rounds lose their masks; None:
            none does.
    """
    reads = states_input(draft.model)
    if taps is not None and reads is not None and reads.blocks:
        yield from in_blocks(draft.model, ids, taps, count, begins=begins, dropping=dropping)
    elif taps is not None:
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        for states in readings(draft.model, ids, taps, count, begins):
            yield Place(states, everywhere)
    elif depths_of(draft.model) > 1:
        yield from after_masks(draft.model, ids, count, begins=begins, dropping=dropping)
    else:
        states = draft.states(ids, attention, trained=True)
        yield Place(states, torch.ones_like(ids, dtype=torch.bool))


def readings(
    model: PreTrainedModel, ids: Tensor, taps: Tensor, count: int, begins: Tensor | None = None
) -> Iterator[Tensor]:
    """The draft's last states along texts, after the target's states and then after its own.

    Reading s at position t is what drafting gives at the (s + 1)-th token of a round that began at
    t - s: it attends to the readings of 0 up to there, and to reading r at t - s + r.

    Arguments are those of `along_rounds`.
    """
    reads = states_input(model)
    assert reads is not None
    body, cache, length = body_of(model), DynamicCache(), ids.shape[1]
    at = torch.arange(length, device=ids.device)
    rows, places = torch.arange(len(ids), device=ids.device)[:, None], at.expand(len(ids), -1)
    x, later = reads.after_target(ids, before(taps)), places
    if begins is not None:
        later = window(begins)  # (B, W) the positions of later readings
    own = at.new_zeros(*ids.shape, 0)
    for step in range(count):
        seen = Seen(length, places - step, own, reads.reads_first)
        with attending_along(model, seen, step * places.shape[1], x.dtype) as mask:
            states: Tensor = body(
                inputs_embeds=x,
                attention_mask=mask,
                position_ids=places,
                use_cache=True,
                **{cache_argument(body): cache},
            )[0]
        if step:
            everywhere = states.new_zeros(*ids.shape, states.shape[-1])
            states = everywhere.index_put((rows, places), states)
        yield states
        if step + 1 == count:
            return
        places = later
        x = reads.after_own(ids[rows, places], before(states)[rows, places])
        width = places.shape[1]
        # Each sees reading r of its round, which is so many places before it.
        same = torch.arange(width, device=ids.device)[:, None] + torch.arange(-step, 1).to(at)
        other = width * torch.arange(step + 1, device=ids.device)
        own = torch.where(same < 0, -1, same + other).expand(len(ids), -1, -1)


def ranks(begin: Tensor, step: int) -> Tensor:
    """Evenly spread numbers in [0, 1) of rounds, others in each step; float32 would run out."""
    return (begin.double() + step * GOLDEN**2) * GOLDEN % 1.0


def in_blocks(
    model: PreTrainedModel,
    ids: Tensor,
    taps: Tensor,
    count: int,
    *,
    begins: Tensor | None = None,
    dropping: int | None = None,
) -> Iterator[Place]:
    """The states of a draft in blocks that begin along texts (`draft_models.dspark`).

    State s at position t is that of slot s of the block that began at t - s; beyond its last slot,
    that one, with the bias by the token at t. Training reads the first slot of all blocks, as a
    draft learns most from it, and the others of a share of them (`WHOLE`). Arguments are those of
    `along_rounds`.
    """
    reads = cast(BlockInput, states_input(model))
    (rows, length), size = ids.shape, depths_of(model)
    row = torch.arange(rows, device=ids.device)[:, None]
    at = torch.arange(length, device=ids.device).expand(rows, -1)
    begin = at if begins is None else window(begins)
    share, whole = 1.0, begin.shape[1]
    kept = torch.ones_like(begin, dtype=torch.bool)
    if dropping is not None:  # evenly spread, and the same ones whatever else is in the batch
        share = WHOLE
        rank, order = ranks(begin, dropping).sort(dim=1)
        kept, begin = rank < share, begin.gather(1, order)
        whole = max(1, int(kept.sum(dim=1).max()))
    body, width = cast(BlockModel, body_of(model)), begin.shape[1]
    parts = math.ceil(width / BLOCKS)
    reading: Callable[..., Any] = read_blocks
    if dropping is not None and (parts > 1 or body.config.num_hidden_layers > 1):
        # Else what all layers make of all slots would be kept, most of the memory of a training.
        reading = partial(checkpoint, read_blocks, use_reentrant=False)
    if dropping is not None and in_group():
        parts = largest_of_all(parts)  # ZeRO-3 gathers the layers for each, in all processes alike
    found, first = [], 0
    padded = nn.functional.pad(begin, (0, max(0, parts - width)))
    for part in padded.tensor_split(parts, dim=1):
        found.append(reading(body, ids, taps, part, size, whole=max(0, whole - first)))
        first += part.shape[1]
    read = torch.cat([each.last_hidden_state for each in found], dim=1)[:, :width]
    # (B, A, size, H + r)
    for step in range(count):
        there = read[:, :, min(step, size - 1)]
        if step >= size:
            token = ids.gather(1, (begin + step).clamp(max=length - 1))
            there = torch.cat([there[..., : reads.width], reads.markov(token)], dim=-1)
        states = read.new_zeros(rows, length, read.shape[-1])
        states = states.index_put((row, begin), there)
        is_kept = torch.zeros_like(ids, dtype=torch.bool)
        is_kept[row, begin] = kept if step else True
        yield Place(
            nn.functional.pad(states, (0, 0, step, 0))[:, :length],
            nn.functional.pad(is_kept, (step, 0))[:, :length],
            share if step else 1.0,
        )


def after_masks(
    model: PreTrainedModel,
    ids: Tensor,
    count: int,
    *,
    begins: Tensor | None = None,
    dropping: int | None = None,
) -> Iterator[Place]:
    """The states of a draft after texts' tokens, and then after masks.

    State s at position t is what drafting gives at the (s + 1)-th token of a round that began at
    t - s; deeper than its masks, their last one. Arguments are those of `along_rounds`.
    """
    (rows, length), masks = ids.shape, depths_of(model) - 1
    at = torch.arange(length, device=ids.device)
    row = torch.arange(rows, device=ids.device)[:, None]
    begin = at.expand(rows, -1) if begins is None else window(begins)
    shares = [1.0] * masks
    rank = torch.zeros(begin.shape, device=ids.device)
    if dropping is not None:  # evenly spread, and nested: a mask sees those before it
        shares = [max(LEAST_KEPT, KEPT**depth) for depth in range(1, masks + 1)]
        rank, order = ranks(begin, dropping).sort(dim=1)
        begin = begin.gather(1, order)
    kept = [max(1, int((rank < share).sum(dim=1).max())) for share in shares]
    at_mask = torch.cat([begin[:, :each] for each in kept], dim=1)  # (B, M), depth by depth
    depth = torch.cat([at.new_full((each,), number) for number, each in enumerate(kept)])
    group = torch.cat([torch.arange(each, device=ids.device) for each in kept])
    mask_ids = torch.full_like(at_mask, getattr(model.config, MASK))
    # A mask sees those of its round down to itself.
    down = torch.arange(masks, device=ids.device)
    first = torch.tensor([0, *kept[:-1]], device=ids.device).cumsum(0)
    own = torch.where(down <= depth[:, None], first + group[:, None], -1)
    own = nn.functional.pad(own, (0, 0, length, 0), value=-1)
    seen = Seen(length, torch.cat([at.expand(rows, -1), at_mask], dim=1), own.expand(rows, -1, -1))
    device = ids.device.type
    in_half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if in_half else model.dtype
    places = torch.cat([at.expand(rows, -1), at_mask + 1 + depth], dim=1)
    with attending_along(model, seen, len(depth), dtype) as mask:
        read = body_of(model)(
            input_ids=torch.cat([ids, mask_ids], dim=1),
            attention_mask=mask,
            position_ids=places.clamp(max=positions(model.config) - 1),  # masks may stand beyond
            use_cache=False,
        )[0]
    along, *ahead = read.split([length, *kept], dim=1)
    yield Place(along, torch.ones_like(ids, dtype=torch.bool))
    for step in range(1, count):
        deepest = min(step, masks) - 1
        here = begin[:, : kept[deepest]]
        states = torch.zeros_like(along).index_put((row, here), ahead[deepest])
        states = nn.functional.pad(states, (0, 0, step, 0))[:, :length]
        is_kept = torch.zeros_like(ids, dtype=torch.bool)
        is_kept[row, here] = rank[:, : here.shape[1]] < shares[deepest]
        is_kept = nn.functional.pad(is_kept, (step, 0))[:, :length]
        yield Place(states, is_kept, shares[deepest])


def window(begins: Tensor) -> Tensor:
    """(B, T) bool -> (B, W) consecutive positions that hold all that are wanted of each row."""
    length = begins.shape[1]
    at = torch.arange(length, device=begins.device)
    first = torch.where(begins, at, length).amin(dim=1)
    last = torch.where(begins, at, -1).amax(dim=1)
    width = max(1, int((last - first).max()) + 1)
    return first.clamp(max=length - width)[:, None] + at[:width]


def of_round(learnt: Tensor, step: int) -> Tensor:
    """(B, T) bool positions whose tokens are learnt -> those whose round began at such a one."""
    return learnt & nn.functional.pad(learnt, (step, 0))[:, : learnt.shape[1]]


def weights_of(count: int) -> list[float]:
    """Of the places of a round, 1 together."""
    each: list[Any] = [DECAY**step for step in range(count)]
    return [weight / sum(each) for weight in each]


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
        found = after_masks(model, longer, masks + 1, begins=begins)
        states = torch.stack([each.states[0, size - 1 + s] for s, each in enumerate(found)])
        gap = float((states - expected).norm() / expected.norm())
    except (RuntimeError, TypeError, ValueError, IndexError, ConfigError) as error:
        raise ConfigError(_REFUSED.format(type(model).__name__, error)) from error
    if not gap < 1e-2:
        raise ConfigError(_REFUSED.format(type(model).__name__, f"states differ by {gap:.1e}"))


_REFUSED = (
    "draft.depths needs a draft whose attention takes any mask, and {} does not ({}): leave it out"
)
