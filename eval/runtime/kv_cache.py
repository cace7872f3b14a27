"""Where keys and values are kept: one buffer a layer, of cells that are written in place.

A text of a batch owns a row; its tokens fill the row's cells from the left. Forgetting tokens is
forgetting a number; what is left in their cells is masked until it is written over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

# KVCache are added in steps of at least this many.
STEP = 256


class KVCache(Cache):  # type: ignore[misc]
    """A key-value cache of several texts for models of transformers.

    Before a forward, `place` says where the new tokens go; each layer's `update` then stores its
    keys and values there and returns the cells that may be attended to.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[Layer() for _ in range(layers)])

    def free(self) -> None:
        """Drop the buffers; new ones are made when they are needed."""
        for layer in self.layers:
            layer.keys = layer.values = None

    def make_room(self, rows: int, cells: int) -> bool:
        """Make buffers before a forward; False if no forward has shown their sizes yet."""
        layers: list[Layer] = self.layers
        if layers[0].like is None:
            return False
        for layer in layers:
            layer.make_room(rows, cells)
        return True

    def place(self, rows: slice, start: int, end: int, cells: Tensor | None = None) -> None:
        """Say where the tokens of the next forward go.

        Args:
            rows: which texts.
            start: cells that hold tokens already, in the fullest row.
            end: cells that the forward may attend to; the new tokens fill start to end.
            cells: (B, n) the cell of each new token, where rows differ.
        """
        for layer in self.layers:
            layer.rows, layer.start, layer.end, layer.cells = rows, start, end, cells

    def states(self, row: int, end: int) -> list[Tensor] | None:
        """Keys and values of every layer as views (1, heads, end, size) of one row.

        None before the first forward, which shows the sizes.
        """
        first = self.layers[0].keys
        fits = first is not None and row < first.shape[0] and end <= first.shape[2]
        if not fits and not self.make_room(row + 1, end):
            return None
        here = slice(row, row + 1)
        return [
            states[here, :, :end] for layer in self.layers for states in (layer.keys, layer.values)
        ]

    def move(self, row: int, source: list[int], target: int) -> None:
        """Copy cells of one row, in order, to those from `target` on."""
        for layer in self.layers:
            index = torch.tensor(source, device=layer.keys.device)
            for states in (layer.keys[row], layer.values[row]):
                states[:, target : target + len(source)] = states[:, index]

    def spread(self, row: int, length: int, copies: int) -> KVCache:
        """A cache of its own whose rows are `copies` of the first `length` cells of one row."""
        other = KVCache(len(self.layers))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if length:
                theirs.keys = mine.keys[row, :, :length].repeat(copies, 1, 1, 1)
                theirs.values = mine.values[row, :, :length].repeat(copies, 1, 1, 1)
        return other

    def gather(
        self, row: int, target: int, other: KVCache, rows: list[int], cells: list[int]
    ) -> None:
        """Store cells of another cache, given by row and cell, from `target` on."""
        self.place(slice(row, row + 1), target, target + len(rows))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            picked = [states[rows, :, cells] for states in (theirs.keys, theirs.values)]
            # (tokens, heads, size) -> (1, heads, tokens, size)
            keys, values = (states.transpose(0, 1).unsqueeze(0) for states in picked)
            mine.update(keys, values)


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """The buffers of one layer and where the next forward writes in them."""

    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = True
        self.rows = slice(0, 1)
        self.start = 0
        self.end = 0
        self.cells: Tensor | None = None
        # Empty tensors of the states' type and sizes, which stay when the buffers are freed.
        self.like: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made and builder by `update`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens and return all cells up to `end`."""
        self.like = key_states[:0, :, :0], value_states[:0, :, :0]
        self.make_room(self.rows.stop, self.end)
        keys, values = self.keys[self.rows, :, : self.end], self.values[self.rows, :, : self.end]
        if self.cells is None:
            keys[:, :, self.start :] = key_states
            values[:, :, self.start :] = value_states
        else:
            row = torch.arange(len(self.cells), device=keys.device).unsqueeze(1)
            keys[row, :, self.cells] = key_states.transpose(1, 2)
            values[row, :, self.cells] = value_states.transpose(1, 2)
        return keys, values

    def make_room(self, rows: int, cells: int) -> None:
        """Have buffers of at least this size; what is stored stays."""
        assert self.like is not None
        self.keys = _roomy(self.keys, self.like[0], rows, cells)
        self.values = _roomy(self.values, self.like[1], rows, cells)

    def get_seq_length(self) -> int:
        """KVCache before the new tokens."""
        return self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """KVCache that may be attended to, and where they begin."""
        return self.end, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


def _roomy(old: Tensor | None, like: Tensor, rows: int, cells: int) -> Tensor:
    if old is not None:
        if old.shape[0] >= rows and old.shape[2] >= cells:
            return old
        rows = max(rows, old.shape[0])
        cells = old.shape[2] if cells <= old.shape[2] else max(cells, 2 * old.shape[2])
    cells = -(-cells // STEP) * STEP
    # Zeros, not garbage: a masked cell still multiplies its value by 0, and 0 * nan is nan.
    builder = like.new_zeros(rows, like.shape[1], cells, like.shape[3])
    if old is not None:
        builder[: old.shape[0], :, : old.shape[2]] = old
    return builder
