"""What proposes tokens: a chain, independent paths, or a tree.

Each returns a `DraftTree` with the very laws that it drew from, and keeps its own cache in step
with the committed text. No drafter proposes anything after a drafted end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eval.cached import CachedModel
from eval.drafts import DraftTree, How, Shape
from eval.stopping import Step, StoppingRule
from specdata.probability import SamplingConfig, draw


class Drafter(Protocol):
    """Proposes tokens after a committed text."""

    model: CachedModel

    def propose(self, text: list[int], room: int, generator: torch.Generator) -> DraftTree:
        """Draft at most `room` tokens deep after `text`, of which the cache holds a prefix."""

    def with_tail(self, draft: DraftTree, text: list[int]) -> DraftTree:
        """The same draft with the law after its last token, for a verifier that needs it."""

    def settle(self, nodes: list[int], committed: int) -> None:
        """Keep the accepted nodes, so that the cache holds a prefix of `committed` tokens."""


class ChainDrafter:
    """One path, until the stopping rule, the room or an end token ends it.

    Args:
        model: the draft.
        rule: when to stop.
        ends: token ids after which nothing is drafted.
    """

    def __init__(self, model: CachedModel, rule: StoppingRule, ends: frozenset[int]) -> None:
        self.model = model
        self._rule = rule
        self._ends = ends

    def propose(self, text: list[int], room: int, generator: torch.Generator) -> DraftTree:
        """Draft a chain."""
        stop = self._rule.begin()
        unseen = text[self.model.length :]
        planned = min(room, self._rule.limit)
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < planned:
            law = self.model.feed(unseen, rows=1)[0]
            token = int(draw(law, generator))
            tokens.append(token)
            laws.append(law)
            if token in self._ends or stop(Step(token, law, self.model.state)):
                break
            unseen = [token]
        return chain(tokens, laws, planned)

    def with_tail(self, draft: DraftTree, text: list[int]) -> DraftTree:
        """Run the draft once more, over what it has not seen of text and draft."""
        unseen = [*text, *draft.token_list][self.model.length :]
        tail = self.model.feed(unseen, rows=1)[0]
        return chain(draft.token_list, list(draft.laws), draft.planned or 0, tail)

    def settle(self, nodes: list[int], committed: int) -> None:
        """The chain is part of the text already; drop what was rejected."""
        self.model.rewind(committed)


class BranchingDrafter:
    """Several candidates for a place, drafted level by level, a level in one forward.

    Args:
        model: the draft.
        widths: children of every node at depth 0, 1, ...; for paths (K, 1, 1, ...).
        how: how siblings are drawn.
        ends: token ids after which nothing is drafted.
        shape: "paths" for independent rollouts, else "tree".
        samplers: for paths, the warp of each path's law, if not the model's own.
    """

    def __init__(
        self,
        model: CachedModel,
        widths: Sequence[int],
        how: How,
        ends: frozenset[int],
        *,
        shape: Shape = "tree",
        samplers: Sequence[SamplingConfig] = (),
    ) -> None:
        self.model = model
        self._widths = tuple(widths)
        self._how = how
        self._ends = ends
        self._shape = shape
        self._samplers = samplers

    def propose(self, text: list[int], room: int, generator: torch.Generator) -> DraftTree:
        """Draft as many levels as fit."""
        widths = self._widths[:room]
        grown = _Grown(self._how, self._shape)
        level = [0]
        # Only nodes that get children are fed; numbering in the cache is that of feeding.
        fed = {0: 0}
        logits = self.model.feed_logits(text[self.model.length :]) if widths else torch.empty(0)
        for depth, width in enumerate(widths):
            if depth:
                level = [node for node in level if grown.tokens[node - 1] not in self._ends]
                if not level:
                    break
                for node in level:
                    fed[node] = len(fed)
                tokens = [grown.tokens[node - 1] for node in level]
                parents = [fed[grown.parents[node - 1]] for node in level]
                logits = self.model.grow(tokens, parents)
            level = self._expand(grown, level, logits, width, generator)
        self._fed = fed
        return grown.tree()

    def _expand(
        self,
        grown: _Grown,
        level: list[int],
        logits: Tensor,
        width: int,
        generator: torch.Generator,
    ) -> list[int]:
        """Draw the children of one level and return them."""
        children: list[int] = []
        for node, row in zip(level, logits, strict=True):
            if self._samplers:
                # Paths with laws of their own: at the root one child each, then each its own.
                samplers = self._samplers if node == 0 else [self._samplers[grown.path[node - 1]]]
                for sampler in samplers:
                    law = grown.law(node, self.model.law(row, sampler), sampler)
                    children += grown.add(node, law, [int(draw(grown.laws[law], generator))])
            else:
                law = grown.law(node, self.model.law(row))
                tokens = _candidates(grown.laws[law], width, self._how, generator)
                children += grown.add(node, law, tokens)
        return children

    def with_tail(self, draft: DraftTree, text: list[int]) -> DraftTree:
        """No verifier of branching drafts carries a residual."""
        raise ValueError("a branching draft has no law after its last token")

    def settle(self, nodes: list[int], committed: int) -> None:
        """Move the accepted path together and drop the rest."""
        self.model.keep([self._fed[node] for node in nodes if node in self._fed])


class _Grown:
    """A draft tree under construction."""

    def __init__(self, how: How, shape: Shape) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.path: list[int] = []
        self._how, self._shape = how, shape
        self.laws: list[Tensor] = []
        self._law: list[int] = []
        self._known: dict[tuple[tuple[int, ...], SamplingConfig | None], int] = {}

    def law(self, parent: int, law: Tensor, sampler: SamplingConfig | None = None) -> int:
        """Index of the law that children of a node are to be drawn from.

        Rollouts that agree so far continue from one law: rows that rounding made different would
        leave a token recorded with another law than its own.
        """
        key = (self._text(parent) if self._shape == "paths" else (parent,), sampler)
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


def _candidates(law: Tensor, count: int, how: How, generator: torch.Generator) -> list[int]:
    """Draw siblings from one law; fewer than `count` if its support is smaller (not for iid)."""
    if how == "iid":
        return [int(token) for token in draw(law.expand(count, -1), generator)]
    rest, tokens = law.clone(), []
    if how == "greedy":
        best = law.sort(descending=True, stable=True).indices[: count - 1].tolist()
        tokens = [token for token in best if law[token] > 0]
        rest[tokens] = 0.0
        count = len(tokens) + 1
    while len(tokens) < count and bool((rest > 0).any()):
        tokens.append(int(draw(rest, generator)))
        rest[tokens[-1]] = 0.0
    return tokens


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
