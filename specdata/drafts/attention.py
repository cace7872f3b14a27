"""Attention along long texts in training, in which nothing is as large as a text squared.

Tokens that are read along a text attend to it up to somewhere, and to a few others of their own
round. A mask has a row for each token and a column for each other, which takes more memory than all
else in a training. So queries are taken some at a time, in the order of what they attend to; that
of the text which none of them sees is left out, and nothing is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

NAME = "draftsmith_along"
"""The name by which transformers knows the attention."""
LONG, ROWS = 1024, 128
"""Tokens from which on masks of all of them are avoided, and queries that are taken at a time."""


class Seen(NamedTuple):
    """The keys that N tokens of B texts attend to: T contexts, and others behind them.

    Args:
        last: (B, N) the last context that each attends to; -1: none.
        extra_keys: (B, N, m) places behind the contexts; -1: none.
        reads_first: whether the first context is seen by others than itself.
    """

    contexts: int
    last: Tensor
    extra_keys: Tensor
    reads_first: bool = True


_SEEN: ContextVar[Seen] = ContextVar("what tokens along texts attend to")


def attention_along(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Seen, **options: Any
) -> Tensor:
    """Attention of N queries to what they see, (B, heads, N, size).

    `queries` are (B, heads, N, size), `keys` and `values` (B, groups, T + others, size); `options`
    are those of `scaled_dot_product_attention`.
    """
    last, order = seen.last.sort(dim=1, stable=True)
    extra_keys = seen.extra_keys.gather(1, order[..., None].expand_as(seen.extra_keys))
    ends: list[int] = (last.amax(dim=0) + 1).tolist()
    index = order[:, None, :, None]
    queries = queries.gather(2, index.expand_as(queries))
    parts = []
    for first in range(0, len(ends), ROWS):
        rows = slice(first, first + ROWS)
        part = Seen(seen.contexts, last[:, rows], extra_keys[:, rows], seen.reads_first)
        end = ends[rows][-1]
        asked = queries[:, :, rows], keys, values, part, end, options
        parts.append(checkpoint(_attention, *asked, use_reentrant=False))
    attended = torch.cat(parts, dim=2)
    back: Tensor = attended.gather(2, index.argsort(dim=2).expand_as(attended))
    return back


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Seen, end: int, options: dict[str, Any]
) -> Tensor:
    """Attention of a few queries, none of which attends to contexts from `end` on."""
    rows, heads, count, _ = queries.shape
    extra_keys = seen.extra_keys
    itself = torch.eye(count, dtype=torch.bool, device=extra_keys.device)
    near = (itself[..., None] & (extra_keys >= 0)[:, None]).flatten(2)
    mask = _additive(torch.cat([_sees(seen, end), near], dim=-1), queries.dtype)
    places = (seen.contexts + extra_keys.clamp(min=0)).flatten(1)[:, None, :, None]

    def gathered(each: Tensor) -> Tensor:
        near = each.gather(2, places.expand(rows, each.shape[1], -1, each.shape[-1]))
        known = torch.cat([each[:, :, :end], near], dim=2)
        return known.repeat_interleave(heads // each.shape[1], dim=1)

    return nn.functional.scaled_dot_product_attention(
        queries, gathered(keys), gathered(values), mask, **options
    )


@contextmanager
def attending_along(
    model: PreTrainedModel, seen: Seen, others: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Let a model's forward with the mask that is given attend to what is seen, inside the block.

    The mask is one of all tokens, (B, 1, N, T + others), where texts are short, or the model does
    not attend by SDPA through transformers' interface.
    """
    config = model.config.get_text_config()
    if not (
        seen.contexts > LONG
        and model._supports_attention_backend
        and config._attn_implementation == "sdpa"
    ):
        yield _mask(seen, others, dtype)
        return
    AttentionInterface.register(NAME, _attend)
    before, config._attn_implementation = config._attn_implementation, NAME
    token = _SEEN.set(seen)
    try:
        yield torch.zeros(len(seen.last), 1, 1, 1, dtype=dtype, device=seen.last.device)
    finally:
        _SEEN.reset(token)
        config._attn_implementation = before


def _mask(seen: Seen, others: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, N, T + others) the additive mask of all tokens."""
    sees = nn.functional.pad(_sees(seen, seen.contexts), (0, others + 1))
    extra_keys = torch.where(seen.extra_keys < 0, others, seen.extra_keys)  # the last is none
    places = seen.contexts + extra_keys
    sees = sees.scatter(-1, places, True)[..., :-1]
    return _additive(sees, dtype)


def _sees(seen: Seen, end: int) -> Tensor:
    """(B, N, end) bool which of the first contexts each token attends to."""
    sees = torch.arange(end, device=seen.last.device) <= seen.last[..., None]
    if not seen.reads_first:
        sees[..., :1] &= (seen.last[..., None] == 0) & (seen.extra_keys.shape[-1] == 0)
    return sees


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: (B, heads, N, size) -> (B, N, heads, size)."""
    seen = _SEEN.get()
    attended = attention_along(query, key, value, seen, scale=scaling, dropout_p=dropout)
    return attended.transpose(1, 2), None
