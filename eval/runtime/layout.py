"""Where the tokens of a forward stand and what each of them attends to: pure functions of values.

The KV cache of a sequence holds its committed tokens from the left and then, perhaps, nodes of a
draft tree. Nodes are numbered from 1 in the order in which they are run; 0 is the last committed
token.
"""

from __future__ import annotations

from collections.abc import Sequence
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
