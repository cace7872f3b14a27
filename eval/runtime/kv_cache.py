"""The KV cache: one buffer of keys and one of values a layer, written in place.

Buffers of equal sizes are parts of one block: to look at those of each layer, or to move tokens in
them, takes Python as long as a small draft takes to read a token. Each sequence of a batch has a
slot, a row of the buffers, and its tokens take the slot's cache positions from the left. Dropping
tokens changes only the number of positions in use; what they left behind is masked until it is
written over. So layers with a window keep every token, too: what they may see is a mask
(`eval.runtime.masks`). Layers with a recurrent state are in `eval.runtime.recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from eval.runtime.recurrent import StateLayer

# Buffers have a multiple of this many cache positions.
CAPACITY_STEP = 64

Places = Sequence[Tensor]
"""Of n tokens in one row their slots, columns and cache positions, (n,) each (`layout.Packing`);
empty where the tokens follow what their slot holds."""

DummyLayer: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
"""A layer that keeps nothing; before transformers 5.23, one of recurrent states, left empty."""


class KVCache(Cache):  # type: ignore[misc]
    """Keys and values of several sequences, for models of transformers.

    Before a forward, `place` says where the new tokens go; each layer's `update` then stores their
    keys and values there and returns those of all positions that may be attended to.
    """

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        super().__init__(layers=[kind.layer() for kind in kinds])
        attending = [layer for layer in self.layers if isinstance(layer, CacheLayer)]
        indexers = [layer.indexer for layer in attending if isinstance(layer, IndexedLayer)]
        self.stores: list[CacheLayer] = [*attending, *indexers]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        # Blocks (n, slots, heads, capacity, size), and the numbers of their n buffers among all
        # keys and values, layer by layer.
        self._blocks: list[tuple[Tensor, list[int]]] = []
        self._expected = 1  # slots

    def expect(self, slots: int) -> None:
        """Make the next buffers for so many slots, so that they are not enlarged for each."""
        self._expected = slots

    def free(self) -> None:
        """Drop the buffers and states; new ones are made when they are needed."""
        self._blocks, self._expected = [], 1
        for layer in self.stores:
            layer.keys = layer.values = None
        for states in self.recurrent:
            states.free()

    def reserve(self, slots: int, capacity: int) -> bool:
        """Have blocks of at least (n, slots, heads, capacity, size); what is stored stays.

        False if no forward has shown the number of heads and their size yet.
        """
        if not self.stores or self.stores[0].template is None:
            return False
        if self._fits(slots, capacity):
            return True
        buffers: list[tuple[CacheLayer, str, Tensor]] = []
        alike: dict[Any, list[int]] = {}
        for layer in self.stores:
            assert layer.template is not None
            for name, like in zip(("keys", "values"), layer.template, strict=True):
                alike.setdefault((like.shape, like.dtype, like.device), []).append(len(buffers))
                buffers.append((layer, name, like))
        slots, self._blocks = max(slots, self._expected), []
        for numbers in alike.values():
            owners = [buffers[number] for number in numbers]
            held = [getattr(layer, name) for layer, name, _ in owners]
            block = _enlarged(held, owners[0][2], slots, capacity)
            for place, (layer, name, _) in enumerate(owners):
                setattr(layer, name, block[place])
            self._blocks.append((block, numbers))
        return True

    def _fits(self, slots: int, capacity: int) -> bool:
        if not self._blocks:
            return False
        _, most_slots, _, most, _ = self._blocks[0][0].shape
        return slots <= most_slots and capacity <= most

    def place(
        self,
        slots: slice,
        start: int,
        end: int,
        places: Places = (),
        first: int = 0,
    ) -> None:
        """Set where the tokens of the next forward go.

        Args:
            slots: B consecutive slots.
            start: cache positions in use before, in the fullest slot.
            end: cache positions that the forward may attend to; the new tokens take start to end.
            places: where each new token is written, if all are in one row.
            first: the first cache position that the forward may attend to.
        """
        self.reserve(slots.stop, end)
        for layer in self.stores:
            layer.slots, layer.first, layer.start, layer.end = slots, first, start, end
            layer.places = places
        for states in self.recurrent:
            states.go_to(slots.start)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A state of a short convolution, which the caller may change."""
        self.layers[layer_idx].used.add(state_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def views(self, slots: slice, begin: int, end: int) -> list[Tensor] | None:
        """Keys and values of every layer, as views (B, heads, end - begin, size) of B slots.

        None before the first forward, which shows the sizes.
        """
        if not self.reserve(slots.stop, end):
            return None
        views: dict[int, Tensor] = {}
        for block, numbers in self._blocks:
            views |= zip(numbers, block[:, slots, :, begin:end].unbind(), strict=True)
        return [views[number] for number in range(len(views))]

    def move(self, slot: int, source: list[int], target: int) -> None:
        """Copy the `source` cache positions of a slot, in order, to those from `target` on."""
        index = torch.tensor(source)
        self.reserve(slot + 1, 0)
        for block, _ in self._blocks:
            index = index.to(block.device, non_blocking=True)  # layers may lie on several
            tokens = block[:, slot]
            tokens[:, :, target : target + len(source)] = tokens[:, :, index]


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The buffers of one layer, (slots, heads, capacity, size), and where the next forward writes.

    The methods are those that models of transformers call.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = True
        self.slots = slice(0, 1)
        self.first = 0
        self.start = 0
        self.end = 0
        self.places: Places = ()
        # Empty keys and values of the right type and sizes, kept when the buffers are freed.
        self.template: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `update` makes the buffers and enlarges them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens; (B, heads, end, size) of all positions that may be attended to.

        Theirs are (B, heads, n, size); (1, heads, n, size) if all tokens are in one row.
        """
        self.template = key_states[:0, :, :0], value_states[:0, :, :0]
        self.reserve(self.slots.stop, self.end)
        keys = self.keys[self.slots, :, : self.end]
        values = self.values[self.slots, :, : self.end]
        store(keys, key_states, self.places)
        store(values, value_states, self.places)
        return keys[:, :, self.first :], values[:, :, self.first :]

    def reserve(self, slots: int, capacity: int) -> None:
        """Have buffers of at least this size; what is stored stays."""
        assert self.template is not None
        if self.keys is None or self.keys.shape[0] < slots or self.keys.shape[2] < capacity:
            self.keys = _enlarged([self.keys], self.template[0], slots, capacity)[0]
            self.values = _enlarged([self.values], self.template[1], slots, capacity)[0]

    def get_seq_length(self) -> int:
        """Cache positions in use before the new tokens."""
        return self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of cache positions that may be attended to, and the first of them."""
        return self.end - self.first, self.first

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1


class IndexedLayer(CacheLayer):
    """A layer of sparse attention (DeepSeek V3.2), which keeps the keys of its indexer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = CacheLayer()

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new tokens' (B, n, size); return those of all positions, (B, end, size)."""
        return self.update_index(indexer_key_states.unsqueeze(1)).squeeze(1)

    def update_index(self, keys: Tensor) -> Tensor:
        """The same of (B, 1, n, size), MiniMax M3's."""
        known, _ = self.indexer.update(keys, keys[..., :0])
        return known


class RecurrentAttentionLayer(StateLayer, CacheLayer):
    """A layer with recurrent states beside keys and values (Falcon-H1)."""

    def __init__(self, count: int) -> None:
        CacheLayer.__init__(self)
        StateLayer.__init__(self, count)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer of a model keeps of the tokens that it has read."""

    attends: bool = True
    indexed: bool = False
    states: int = 0

    def layer(self) -> Any:
        """An empty layer of a cache."""
        if self.states:
            kind = RecurrentAttentionLayer if self.attends else StateLayer
            return kind(self.states)
        if self.indexed:
            return IndexedLayer()
        return CacheLayer() if self.attends else DummyLayer()


def store(buffer: Tensor, states: Tensor, places: Places) -> None:
    """Write the new tokens' keys or values: at the end of a buffer, or at their places.

    (B, heads, n, size) into (B, heads, end, size); (1, heads, n, size) if they are in one row.
    """
    if places:
        # Layers may lie on several devices, each with its part of the cache.
        slots, _, cache_positions = (each.to(buffer.device) for each in places)
        buffer.transpose(1, 2)[slots, cache_positions] = states[0].transpose(0, 1)
    else:
        buffer[:, :, -states.shape[2] :].copy_(states)


def _enlarged(
    buffers: Sequence[Tensor | None], template: Tensor, slots: int, capacity: int
) -> Tensor:
    """A block of at least (n, slots, heads, capacity, size), with what n equal buffers hold."""
    if (first := buffers[0]) is not None:
        slots, before = max(slots, first.shape[0]), first.shape[2]
        capacity = max(capacity, before + before // 2) if capacity > before else before
    capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
    # Zeros, not garbage: masked values are still multiplied by 0, and 0 * nan is nan.
    heads, size = template.shape[1], template.shape[3]
    block = template.new_zeros(len(buffers), slots, heads, capacity, size)
    for place, buffer in enumerate(buffers):  # not unbound, lest autograd forbids to write
        if buffer is not None:
            block[place, : buffer.shape[0], :, : buffer.shape[2]] = buffer
    return block
