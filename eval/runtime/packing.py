"""Tokens of several sequences in one row: a forward pays for no padding outside its attention.

Sequences whose drafts differ in length would fill a rectangle with padding. Packed, their tokens
follow each other in one row through every layer of the model; only the attention lays them out by
slot, because each slot attends to its own keys and values. It is called through transformers'
`AttentionInterface`. Not all models pass on keyword arguments to it, so it is told in a context
variable which token is whose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eval.runtime.layout import Layout

PACKED = "draftsmith_packed"
"""What transformers knows the attention by."""

_PLACES: ContextVar[tuple[Tensor, Tensor]] = ContextVar("places of packed tokens")


@dataclass(frozen=True, slots=True)
class Packing:
    """The n tokens of several forwards in one row, over the slots 0 to B - 1 of a KV cache.

    Args:
        tokens: (1, n).
        positions: (1, n), in the sequences.
        slots: (1, n), whose sequence each token belongs to.
        cache_positions: (1, n), where its keys and values are written.
        columns: (1, n), its number among the tokens of its sequence; the longest has m tokens.
        visible: (B, m, end) boolean, the cache positions that each token attends to.
        ends: by slot, where in the row its tokens end.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    cache_positions: Tensor
    columns: Tensor
    visible: Tensor
    ends: dict[int, int]


def pack(forwards: Mapping[int, tuple[Sequence[int], Layout]]) -> Packing:
    """Put the tokens of several sequences into one row.

    Args:
        forwards: tokens and their layout, by slot.
    """
    rows: list[list[int]] = [[], [], [], [], []]
    starts, ends = [0] * (max(forwards) + 1), {}
    for slot, (tokens, layout) in forwards.items():
        count = len(tokens)
        columns = range(count)
        cached = range(layout.start, layout.start + count)
        for row, values in zip(
            rows, (tokens, layout.positions, [slot] * count, cached, columns), strict=True
        ):
            row.extend(values)
        starts[slot], ends[slot] = layout.start, len(rows[0])
    tokens, positions, slots, cache_positions, columns = torch.tensor(rows).unsqueeze(1)
    width, end = int(columns.max()) + 1, int(cache_positions.max()) + 1
    last_visible = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
    visible = torch.arange(end) <= last_visible.unsqueeze(-1)
    for slot, (_, layout) in forwards.items():
        if layout.visible is not None:
            count, seen = layout.visible.shape
            visible[slot, :count] = False
            visible[slot, :count, :seen] = layout.visible
    return Packing(tokens, positions, slots, cache_positions, columns, visible, ends)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model calls its attention through transformers' interface, and it is SDPA."""
    return bool(model._supports_attention_backend) and model.config._attn_implementation == "sdpa"


@contextmanager
def attending_packed(model: PreTrainedModel, slots: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, the model attends by `packed_attention`.

    Args:
        model: the model.
        slots: (n,) of each token.
        columns: (n,) its place among the tokens of its slot.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    AttentionInterface.register(PACKED, packed_attention)
    config._attn_implementation = PACKED
    places = _PLACES.set((slots, columns))
    try:
        yield
    finally:
        _PLACES.reset(places)
        config._attn_implementation = before


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from packed tokens to the keys and values of their own slots.

    Args:
        module: the attention layer.
        query: (1, heads, n, size).
        key: (B, key heads, end, size), of every slot.
        value: (B, key heads, end, size).
        attention_mask: (B, 1, m, end), additive.
        **kwargs: what else the model passes to its attention, such as its scaling.

    Returns:
        (1, n, heads, size).
    """
    slots, columns = (places.to(query.device) for places in _PLACES.get())
    _, heads, _, size = query.shape
    by_slot = query.new_zeros(len(key), attention_mask.shape[2], heads, size)
    by_slot[slots, columns] = query[0].transpose(0, 1)
    attended, _ = sdpa_attention_forward(
        module, by_slot.transpose(1, 2), key, value, attention_mask, **kwargs
    )
    return attended[slots, columns].unsqueeze(0), None
