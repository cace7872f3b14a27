"""What a model has read of a text, and what the text wants it to read next.

A `CachedSequence` remembers one text, and perhaps a draft tree after it. It runs nothing itself: it
makes a `Forward`, and a `CachedModel` runs one of them, or one of each of many texts together. So
decoding is written once, for one text and for batches.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eval.runtime.kv_cache import KVCache
from specdata.probability import SamplingConfig, probabilities

T = TypeVar("T")


class ForwardRunner(Protocol):
    """What runs forwards of texts: a `CachedModel`."""

    cells: KVCache

    def run(self, forward: Forward) -> Tensor:
        """Run one forward: logits (rows, V)."""

    def run_all(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """Run one forward of each of several texts: logits of each."""


@dataclass(slots=True)
class Forward:
    """Tokens that a text wants to feed to its model.

    Args:
        text: whose they are.
        tokens: n tokens; the last `len(parents)` of them are nodes of a draft tree.
        rows: logits are wanted after the last `rows` tokens.
        parents: the node that each node follows; 0 is the text's last token.
        unrolled: score the nodes path by path, in a batch, instead of by tree attention.
    """

    text: CachedSequence
    tokens: list[int]
    rows: int
    parents: Sequence[int] = ()
    unrolled: bool = False

    @property
    def model(self) -> ForwardRunner:
        """What runs it."""
        return self.text.model


ForwardCoroutine = Generator[Forward, Tensor, T]
"""A procedure that yields what it wants to run and is sent the logits, (rows, V)."""


def drive(steps: ForwardCoroutine[T]) -> T:
    """Run a procedure, each of its forwards by itself."""
    try:
        forward = next(steps)
        while True:
            forward = steps.send(forward.model.run(forward))
    except StopIteration as done:
        found: T = done.value
        return found


class CachedSequence:
    """What a model has read of one text, and of a draft tree after it.

    Nodes are numbered from 1 in the order they are fed; 0 is the text's last token.

    Args:
        model: what runs its forwards.
        row: the text's row in the model's cache.
        sampling: the warp from logits to distributions, the same for target and draft.
    """

    def __init__(self, model: ForwardRunner, row: int, sampling: SamplingConfig) -> None:
        self.model = model
        self.row = row
        self.sampling = sampling
        self.forwards = 0
        self.state: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self.length = 0  # tokens of the text in the cache
        self.depths: list[int] = []  # of the nodes in the cache
        self.ancestors = torch.zeros(0, 0, dtype=torch.bool)
        self.state = None

    @property
    def filled(self) -> int:
        """KVCache in use."""
        return self.length + len(self.depths)

    def append(self, tokens: list[int], rows: int) -> Forward:
        """Append tokens to the text."""
        return Forward(self, tokens, rows)

    def append_tree(
        self,
        tokens: list[int],
        parents: Sequence[int],
        unseen: list[int] | None = None,
        *,
        unrolled: bool = False,
    ) -> Forward:
        """Append nodes of a draft tree, each of which sees the text and its own ancestors only.

        Tree attention (Miao et al. 2023, SpecInfer; Yang et al. 2024, MCSD): one forward with a
        four-dimensional mask, and the depth of a node as its position.

        Args:
            tokens: n tokens.
            parents: the node that each follows.
            unseen: tokens of the text that come first, if the tree is fed at once; logits after
                the last of them come first, too.
            unrolled: score the nodes as a batch of paths instead; the whole tree at once only.
        """
        unseen = unseen or []
        rows = len(tokens) + bool(unseen)
        return Forward(self, [*unseen, *tokens], rows, parents, unrolled)

    def distribution(self, logits: Tensor, sampling: SamplingConfig | None = None) -> Tensor:
        """Distributions (..., V) of logits, by default under the text's own sampler."""
        return probabilities(logits, sampling or self.sampling)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of the text, and no nodes."""
        self.accept([])
        self.length = min(self.length, length)

    def accept(self, nodes: list[int]) -> None:
        """Make a path of nodes from the root part of the text and drop the others.

        Nodes that were never fed (the last level of a draft) may be named; they are left out.
        """
        count, base = len(self.depths), self.length
        present = [node for node in nodes if node <= count]
        if present != list(range(1, len(present) + 1)):
            self.model.cells.move(self.row, [base + node - 1 for node in present], base)
        self.length += len(present)
        self.depths, self.ancestors = [], torch.zeros(0, 0, dtype=torch.bool)

    def fed(self, forward: Forward) -> None:
        """Count what a forward has put into the cells."""
        self.forwards += 1
        self.length += len(forward.tokens) - len(forward.parents)

    def planted(self, parents: Sequence[int]) -> None:
        """Note nodes before they are fed: whom they follow decides what they see."""
        for parent in parents:
            self.depths.append(1 + (self.depths[parent - 1] if parent else 0))
        self.ancestors = _extended(self.ancestors, parents)


def places(forward: Forward) -> tuple[list[int], Tensor | None]:
    """Positions of the tokens and, if there are nodes, the cells that each sees (n, cells).

    Notes the nodes with their text.
    """
    text, count, start = forward.text, len(forward.tokens), forward.text.filled
    if not forward.parents:
        return list(range(start, start + count)), None
    plain, old = count - len(forward.parents), len(text.depths)
    base = text.length + plain
    text.planted(forward.parents)
    sees = torch.zeros(count, base + len(text.depths), dtype=torch.bool)
    for row in range(plain):
        sees[row, : text.length + row + 1] = True
    sees[plain:, :base] = True
    sees[plain:, base:] = text.ancestors[old:]
    positions = [*range(text.length, base), *(base - 1 + depth for depth in text.depths[old:])]
    return positions, sees


def lay_out(forward: Forward, ids: Tensor, positions: Tensor, cells: Tensor, sees: Tensor) -> None:
    """Put one text's tokens at the right of its row of a batch."""
    row, count, start = forward.text.row, len(forward.tokens), forward.text.filled
    pad = ids.shape[1] - count
    at, tree = places(forward)
    ids[row, pad:] = torch.tensor(forward.tokens)
    positions[row, pad:] = torch.tensor(at)
    cells[row, pad:] = start + torch.arange(count)
    cells[row, :pad] = start + count + torch.arange(pad)
    sees[row] = torch.arange(sees.shape[-1]) <= cells[row].unsqueeze(-1)
    if tree is not None:
        sees[row, pad:] = False
        sees[row, pad:, : tree.shape[1]] = tree


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child down to a node."""
    path = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]


def _extended(ancestors: Tensor, parents: Sequence[int]) -> Tensor:
    """Ancestor-or-self matrix (n, n) with a row and a column for each further node."""
    old = len(ancestors)
    whole = torch.eye(old + len(parents), dtype=torch.bool)
    whole[:old, :old] = ancestors
    for index, parent in enumerate(parents):
        if parent:
            whole[old + index] |= whole[parent - 1]
    return whole
