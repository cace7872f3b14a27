"""Draft trees while they are drawn: tokens and their distributions come together, so none needs a check."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.drafts import DraftTree, How, TreeShape


class TreeBuilder:
    """A draft tree under construction."""

    def __init__(self, how: How, shape: TreeShape) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path: list[int] = []
        self._how, self._shape = how, shape
        self.distributions: list[Tensor] = []
        self._distribution: list[int] = []
        self._known: dict[tuple[tuple[int, ...], object], int] = {}

    def distribution(self, parent: int, distribution: Tensor, source: object = None) -> int:
        """Index of the distribution that children of a node are to be drawn from.

        Rollouts that agree so far continue from one distribution: rows that rounding made different would
        leave a token recorded with another distribution than its own.
        """
        key = (self._text(parent) if self._shape == "paths" else (parent,), source)
        if key not in self._known:
            self._known[key] = len(self.distributions)
            self.distributions.append(distribution)
        return self._known[key]

    def add(self, parent: int, distribution: int, tokens: list[int]) -> list[int]:
        """Add children drawn from the distribution of that index; return their numbers."""
        first = len(self.tokens) + 1
        for token in tokens:
            self.path.append(self.path[parent - 1] if parent else len(self.path))
            self.tokens.append(token)
            self.parents.append(parent)
            self._distribution.append(distribution)
        return list(range(first, first + len(tokens)))

    def _text(self, node: int) -> tuple[int, ...]:
        text: list[int] = []
        while node:
            text.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return tuple(reversed(text))

    def tree(self) -> DraftTree:
        """The finished draft."""
        distributions = torch.stack(self.distributions) if self.distributions else torch.empty(0, 0)
        if not self.tokens:
            return chain([], [], 0)
        return DraftTree(
            torch.tensor(self.tokens),
            torch.tensor(self.parents),
            distributions,
            torch.tensor(self._distribution),
            self._shape,
            self._how,
        )


def chain(
    tokens: list[int], distributions: list[Tensor], planned: int, tail: Tensor | None = None
) -> DraftTree:
    """A chain whose tokens were just drawn from `distributions`, so nothing needs a check."""
    steps = torch.arange(len(tokens))
    stacked = torch.stack(distributions) if distributions else torch.empty(0, 0)
    return DraftTree(
        torch.tensor(tokens, dtype=torch.long),
        steps,
        stacked,
        steps,
        "chain",
        tail=tail,
        planned=planned,
    )
