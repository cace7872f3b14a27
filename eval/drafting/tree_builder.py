"""Draft trees under construction.

Tokens and the distributions that they were just drawn from come together, so the drafts made here
need no check.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from eval.drafts import DraftTree, How, TreeShape, path_to


class TreeBuilder:
    """A draft tree to which nodes are added, parents before their children.

    Attributes:
        tokens: the token of node i + 1.
        parents: the node that node i + 1 follows.
        path_numbers: which path node i + 1 is on; paths are numbered by their first node.
        distributions: the distinct distributions (V,) that tokens were drawn from.
    """

    def __init__(self, how: How, shape: TreeShape) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path_numbers: list[int] = []
        self.distributions: list[Tensor] = []
        self._how, self._shape = how, shape
        self._distribution_index: list[int] = []
        self._index_of: dict[Hashable, int] = {}

    def add_distribution(self, parent: int, distribution: Tensor, source: Hashable = None) -> int:
        """The index of the distribution that children of a node are to be drawn from.

        Paths with the same tokens so far continue from one distribution (V,), the first that was
        given: rows that differ by rounding would leave a token recorded with another distribution
        than the one that its competitors were drawn from. `source` is what made it, where paths of
        one tree have several drafts or temperatures.
        """
        path = path_to(self.parents, parent)
        prefix = tuple(self.tokens[step - 1] for step in path)
        key = prefix if self._shape == "paths" else (parent,), source
        if key not in self._index_of:
            self._index_of[key] = len(self.distributions)
            self.distributions.append(distribution)
        return self._index_of[key]

    def add(self, parent: int, distribution: int, tokens: list[int]) -> list[int]:
        """Add children that were drawn from the distribution of that index; return their nodes."""
        first = len(self.tokens) + 1
        for token in tokens:
            number = self.path_numbers[parent - 1] if parent else len(self.path_numbers)
            self.path_numbers.append(number)
            self.tokens.append(token)
            self.parents.append(parent)
            self._distribution_index.append(distribution)
        return list(range(first, first + len(tokens)))

    def tree(self) -> DraftTree:
        """The finished draft; an empty chain if no node was added."""
        if not self.tokens:
            return drawn_chain([], [], 0)
        return DraftTree(
            torch.tensor(self.tokens),
            torch.tensor(self.parents),
            torch.stack(self.distributions),
            torch.tensor(self._distribution_index),
            self._shape,
            self._how,
        )


def drawn_chain(
    tokens: list[int], distributions: list[Tensor], planned: int, tail: Tensor | None = None
) -> DraftTree:
    """A chain of L tokens that were just drawn, without the checks of `DraftTree.chain`.

    Of the distribution (V,) of each; `planned` is the length that it was to have, at least L, and
    `tail` (V,) the draft's distribution after the last token, if known.
    """
    order = torch.arange(len(tokens))
    stacked = torch.stack(distributions) if distributions else torch.empty(0, 0)
    return DraftTree(
        torch.tensor(tokens, dtype=torch.long),
        order,
        stacked,
        order,
        "chain",
        tail=tail,
        planned=planned,
    )
