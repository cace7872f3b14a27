"""Draft trees while they are drawn: tokens and their laws come together, so none needs a check."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.drafts import DraftTree, How, Shape


class GrowingTree:
    """A draft tree under construction."""

    def __init__(self, how: How, shape: Shape) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path: list[int] = []
        self._how, self._shape = how, shape
        self.laws: list[Tensor] = []
        self._law: list[int] = []
        self._known: dict[tuple[tuple[int, ...], object], int] = {}

    def law(self, parent: int, law: Tensor, source: object = None) -> int:
        """Index of the law that children of a node are to be drawn from.

        Rollouts that agree so far continue from one law: rows that rounding made different would
        leave a token recorded with another law than its own.
        """
        key = (self._text(parent) if self._shape == "paths" else (parent,), source)
        if key not in self._known:
            self._known[key] = len(self.laws)
            self.laws.append(law)
        return self._known[key]

    def add(self, parent: int, law: int, tokens: list[int]) -> list[int]:
        """Add children drawn from the law of that index; return their numbers."""
        first = len(self.tokens) + 1
        for token in tokens:
            self.path.append(self.path[parent - 1] if parent else len(self.path))
            self.tokens.append(token)
            self.parents.append(parent)
            self._law.append(law)
        return list(range(first, first + len(tokens)))

    def _text(self, node: int) -> tuple[int, ...]:
        text: list[int] = []
        while node:
            text.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return tuple(reversed(text))

    def tree(self) -> DraftTree:
        """The finished draft."""
        laws = torch.stack(self.laws) if self.laws else torch.empty(0, 0)
        if not self.tokens:
            return chain([], [], 0)
        return DraftTree(
            torch.tensor(self.tokens),
            torch.tensor(self.parents),
            laws,
            torch.tensor(self._law),
            self._shape,
            self._how,
        )


def chain(
    tokens: list[int], laws: list[Tensor], planned: int, tail: Tensor | None = None
) -> DraftTree:
    """A chain whose tokens were just drawn from `laws`, so nothing needs a check."""
    steps = torch.arange(len(tokens))
    stacked = torch.stack(laws) if laws else torch.empty(0, 0)
    return DraftTree(
        torch.tensor(tokens, dtype=torch.long),
        steps,
        stacked,
        steps,
        "chain",
        tail=tail,
        planned=planned,
    )
