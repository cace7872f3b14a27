"""Where the tokens of a forward stand and what each of them attends to: pure functions of values.

The KV cache of a sequence holds its committed tokens from the left and then, perhaps, nodes of a
draft tree. Nodes are numbered from 1 in the order in which they are run; 0 is the last committed
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the n tokens of one forward go, behind what the KV cache of their sequence holds.

    Args:
        start: cache positions in use before the forward; the tokens are written from there on.
        positions: n positions in the sequence; a node stands where it would stand if accepted, so
            siblings share a position.
        visible: (n, start + n) boolean, the cache positions that each token attends to; None if
            that is everything up to the token itself.
        ancestors: (m, m) boolean over the m nodes in the cache after the forward: whether node
            j + 1 is on the path from the root to node i + 1, node i + 1 included.
    """

    start: int
    positions: list[int]
    visible: Tensor | None
    ancestors: Tensor


def lay_out(length: int, ancestors: Tensor, count: int, parents: Sequence[int]) -> Layout:
    """Lay out one forward of a sequence.

    Tree attention (Miao et al. 2023, SpecInfer; Yang et al. 2024, MCSD): a node attends to the
    committed tokens and its own ancestors, and its depth decides its position.

    Args:
        length: committed tokens in the cache.
        ancestors: (m, m) as in `Layout`, of the nodes in the cache before the forward.
        count: n tokens; the last `len(parents)` of them are nodes.
        parents: the node that each node follows.
    """
    cached, committed = len(ancestors), count - len(parents)
    assert not (cached and committed), "nodes are accepted or dropped before tokens are appended"
    start = length + cached
    if not parents:
        return Layout(start, list(range(start, start + count)), None, ancestors)
    root = length + committed  # cache position of the first node
    ancestors = _with_nodes(ancestors, parents)
    paths = ancestors[cached:]
    visible = torch.zeros(count, start + count, dtype=torch.bool)
    visible[:committed] = torch.ones(committed, start + count, dtype=torch.bool).tril(length)
    visible[committed:, :root] = True
    visible[committed:, root:] = paths
    depths: list[int] = paths.sum(-1).tolist()
    positions = [*range(length, root), *(root - 1 + depth for depth in depths)]
    return Layout(start, positions, visible, ancestors)


def _with_nodes(ancestors: Tensor, parents: Sequence[int]) -> Tensor:
    """The matrix of `Layout.ancestors` with a row and a column for each further node."""
    cached = len(ancestors)
    extended = torch.eye(cached + len(parents), dtype=torch.bool)
    extended[:cached, :cached] = ancestors
    for row, parent in enumerate(parents, start=cached):
        if parent:
            extended[row] |= extended[parent - 1]
    return extended


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """One forward over the slots 0 to B - 1 of a KV cache, n tokens in each.

    Args:
        tokens: (B, n); a slot with fewer tokens has them at the right.
        positions: (B, n), in the sequences.
        cache_positions: (B, n), where keys and values are written.
        visible: (B, n, end) boolean, the cache positions that each token attends to.
        start: cache positions in use before, in the fullest slot; end = start + n.
    """

    tokens: Tensor
    positions: Tensor
    cache_positions: Tensor
    visible: Tensor
    start: int


def lay_out_batch(
    forwards: Mapping[int, tuple[Sequence[int], Layout]], in_use: Sequence[int]
) -> BatchLayout:
    """Join forwards of several sequences.

    Slots without a forward, and the padding at the left of short ones, write to cache positions
    behind those in use, which are masked until they are written over.

    Args:
        forwards: tokens and their layout, by slot.
        in_use: cache positions in use in each of B slots.
    """
    count = max(len(tokens) for tokens, _ in forwards.values())
    start = max(in_use)
    shape = len(in_use), count
    batch = BatchLayout(
        tokens=torch.zeros(shape, dtype=torch.long),
        positions=torch.zeros(shape, dtype=torch.long),
        cache_positions=torch.tensor(in_use).unsqueeze(1) + torch.arange(count),
        visible=torch.zeros(*shape, start + count, dtype=torch.bool),
        start=start,
    )
    for slot, (tokens, layout) in forwards.items():
        pad = count - len(tokens)
        first_free = layout.start + len(tokens)
        batch.tokens[slot, pad:] = torch.tensor(tokens)
        batch.positions[slot, pad:] = torch.tensor(layout.positions)
        batch.cache_positions[slot, pad:] = layout.start + torch.arange(len(tokens))
        batch.cache_positions[slot, :pad] = first_free + torch.arange(pad)
    batch.visible[:] = torch.arange(start + count) <= batch.cache_positions.unsqueeze(-1)
    for slot, (tokens, layout) in forwards.items():
        if layout.visible is not None:
            pad = count - len(tokens)
            batch.visible[slot, pad:] = False
            batch.visible[slot, pad:, : layout.visible.shape[1]] = layout.visible
    return batch
