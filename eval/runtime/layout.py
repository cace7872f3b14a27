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
class TokenLayout:
    """The places of the n tokens of one forward, behind what the KV cache of a sequence holds.

    A node stands where it would stand if accepted, so siblings share a position. Without `visible`
    a token attends to everything up to itself. `ancestors` says whether node j + 1 is on the path
    from the root to node i + 1, node i + 1 included.
    """

    start: int  # cache positions in use before the forward; the tokens are written from there on
    positions: list[int]  # n in the sequence
    visible: Tensor | None  # (n, start + n) boolean, the cache positions that each token attends to
    ancestors: Tensor  # (m, m) boolean over the m nodes in the cache after the forward

    @property
    def key_positions(self) -> Tensor:
        """(start + n,) where each token in the cache after the forward stands in the sequence."""
        places = torch.arange(self.start + len(self.positions))
        if nodes := len(self.ancestors):
            places[-nodes:] = places[-nodes] - 1 + self.ancestors.sum(-1)
        return places


def lay_out(length: int, ancestors: Tensor, count: int, parents: Sequence[int]) -> TokenLayout:
    """Lay out one forward of a sequence.

    Tree attention (Miao et al. 2023, SpecInfer; Yang et al. 2024, MCSD): a node attends to the
    committed tokens and its own ancestors, and its depth decides its position.

    The cache holds `length` committed tokens and m nodes with these ancestors (m, m), as in
    `TokenLayout`. Of the n tokens (`count`) the last `len(parents)` are nodes that follow these.
    """
    cached, committed = len(ancestors), count - len(parents)
    assert not (cached and committed), "nodes are accepted or dropped before tokens are appended"
    start = length + cached
    if not parents:
        return TokenLayout(start, list(range(start, start + count)), None, ancestors)
    root = length + committed  # cache position of the first node
    # A row and a column for each further node: itself, and the ancestors of its parent.
    extended = torch.eye(cached + len(parents), dtype=torch.bool)
    extended[:cached, :cached] = ancestors
    for row, parent in enumerate(parents, start=cached):
        if parent:
            extended[row] |= extended[parent - 1]
    paths = extended[cached:]
    visible = torch.zeros(count, start + count, dtype=torch.bool)
    visible[:committed] = torch.ones(committed, start + count, dtype=torch.bool).tril(length)
    visible[committed:, :root] = True
    visible[committed:, root:] = paths
    depths: list[int] = paths.sum(-1).tolist()
    positions = [*range(length, root), *(root - 1 + depth for depth in depths)]
    return TokenLayout(start, positions, visible, extended)


@dataclass(frozen=True, slots=True)
class Packing:
    """The n tokens of several forwards in one row, over B slots of a KV cache from the first on.

    The longest sequence has m tokens.
    """

    first: int  # slot
    positions: Tensor  # (1, n) in the sequences
    # (n,) each: whose sequence each token belongs to, counted from the first, its number among the
    # tokens of its sequence, and where its keys and values are written.
    places: tuple[Tensor, ...]
    visible: Tensor  # (B, m, end) boolean, the cache positions that each token attends to
    ends: dict[int, int]  # by slot, where in the row its tokens end


def pack(layouts: Mapping[int, TokenLayout]) -> Packing:
    """Put the tokens of several sequences, given by their layouts by slot, into one row."""
    rows: list[list[int]] = [[], [], [], []]
    first = min(layouts)
    starts, ends = [0] * (max(layouts) + 1 - first), {}
    for slot, layout in layouts.items():
        start, count = layout.start, len(layout.positions)
        each = (layout.positions, [slot - first] * count, range(count), range(start, start + count))
        for row, values in zip(rows, each, strict=True):
            row.extend(values)
        starts[slot - first], ends[slot] = start, len(rows[0])
    positions, *places = torch.tensor(rows)
    width, end = max(rows[2]) + 1, max(rows[3]) + 1
    last_visible = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
    visible = torch.arange(end) <= last_visible.unsqueeze(-1)
    for slot, layout in layouts.items():
        if layout.visible is not None:
            count, seen = layout.visible.shape
            visible[slot - first, :count, :seen] = layout.visible
    return Packing(first, positions[None], tuple(places), visible, ends)


def positions_of(packing: Packing, layouts: Mapping[int, TokenLayout]) -> tuple[Tensor, Tensor]:
    """Positions in the sequences of packed tokens (B, m), and of those in the cache (B, end).

    For layers with a rule over positions alone: where there is no token they are whatever.
    """
    slots, width, end = packing.visible.shape
    queries, keys = torch.zeros(slots, width, dtype=torch.long), torch.arange(end).repeat(slots, 1)
    for slot, layout in layouts.items():
        queries[slot - packing.first, : len(layout.positions)] = torch.tensor(layout.positions)
        known = layout.key_positions
        keys[slot - packing.first, : len(known)] = known
    return queries, keys
