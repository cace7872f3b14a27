"""A tree of the draft's most probable continuations, grown where the draft is sure of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eval.drafting.drafters import Drafter, drawn_chain
from eval.drafts import DraftTree
from eval.runtime.batches import ForwardCoroutine
from eval.runtime.feeding.plain import CachedSequence
from eval.runtime.model import CachedModel
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig, probabilities

UNWARPED = SamplingConfig()
"""Nodes are ranked by the draft's own distribution. At a low temperature or in a small nucleus it
would have one candidate at most positions, however unsure it is: the tree would be a chain."""


class DynamicTreeDrafter(Drafter):
    """Drafts the nodes with the most probable paths, level by level: one forward a level.

    After Li et al. 2024 (arXiv:2406.16858): the value of a node is the draft's probability
    of its path. Of all that was seen, the `nodes` most valuable are kept; a level's nodes are run
    if they are among these so far, since a child is worth no more than its parent. Ours is the end
    of it: of at most `depth` levels, one is added while the nodes that would be run are worth
    `gain` together; 0 adds all.

    Nothing is drawn, so the draft is the same whatever the target will sample, and a verifier that
    follows the target's own sample (`naive`) is exact.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        nodes: int,
        depth: int,
        gain: float,
        end_tokens: frozenset[int],
    ) -> None:
        super().__init__([sequence], end_tokens)
        self._nodes = nodes
        self._depth = depth
        self._gain = gain

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a tree; the generator is not used."""
        (draft,) = self._drafts
        sequence = draft.sequence
        seen = _Seen(sequence.model, self._nodes)
        level = [0]
        for _ in range(min(self._depth, max_depth)):
            if level == [0]:
                logits = yield sequence.append(committed[sequence.length :], 1)  # (1, N)
            else:
                logits = yield from draft.append(level, seen.tokens, seen.parents)  # (n, N)
            seen.extend(level, probabilities(logits, UNWARPED))
            level = [node for node in seen.newest if seen.tokens[node - 1] not in self._end_tokens]
            if not level or sum(seen.values[node] for node in level) < self._gain:
                break
        cached = draft.cached_number
        draft.cached_number = {
            number: cached[node] for number, node in enumerate([0, *seen.best]) if node in cached
        }
        return seen.draft()


class _Seen:
    """All nodes that one draft has looked at; node 0 is the last committed token."""

    def __init__(self, model: CachedModel, count: int) -> None:
        self.tokens, self.parents = list[int](), list[int]()
        self.values = [1.0]  # probability of the path down to each node, node 0 first
        self.best: list[int] = []  # the `count` most valuable, in the order in which they were seen
        self.newest: list[int] = []  # those of them that the last `extend` added
        self._model, self._count = model, count
        self._at_root = torch.empty(0, 0)

    def extend(self, nodes: list[int], rows: Tensor) -> None:
        """Add the best children of nodes, given the distributions (n, N) there."""
        best, columns = rows.topk(min(self._count, rows.shape[-1]))
        ids = self._model.token_ids(columns)
        first = len(self.values)
        for node, chances, tokens in zip(nodes, best.tolist(), ids.tolist(), strict=True):
            if math.isnan(chances[0]):
                raise NotFiniteError
            for chance, token in zip(chances, tokens, strict=True):
                # At most the parent's, so that no node is kept without its parent.
                value = self.values[node] * min(1.0, chance)
                if value > 0.0:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.values.append(value)
        if nodes == [0]:
            self._at_root = rows
        # Stable: of equal values the earlier node stays, so a parent before its child.
        candidates = [*self.best, *range(first, len(self.values))]
        self.best = sorted(sorted(candidates, key=lambda n: -self.values[n])[: self._count])
        self.newest = [node for node in self.best if node >= first]

    def draft(self) -> DraftTree:
        """The most valuable nodes as a draft; an empty chain if there is none.

        No verifier of chosen nodes reads what they were drawn from, so the root's stands for all.
        """
        if not self.best:
            return drawn_chain([], [], 0)
        number = {0: 0} | {node: number for number, node in enumerate(self.best, start=1)}
        return DraftTree(
            torch.tensor([self.tokens[node - 1] for node in self.best]),
            torch.tensor([number[self.parents[node - 1]] for node in self.best]),
            self._model.everywhere(self._at_root),
            torch.zeros(len(self.best), dtype=torch.long),
            "tree",
            "chosen",
        )
