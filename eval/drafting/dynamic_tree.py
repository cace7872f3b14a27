"""A tree of the draft's most probable continuations, grown where the draft is sure of them."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eval.drafting.drafters import Drafter
from eval.drafting.tree_builder import drawn_chain
from eval.drafts import DraftTree
from eval.runtime.sequence import CachedSequence, ForwardCoroutine
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig, probabilities

if TYPE_CHECKING:
    from eval.drafting.stopping.tree_cost import TreeCosts
    from eval.rounds import Round
    from eval.runtime.model import CachedModel
    from heads.candidates import Ranker

UNWARPED = SamplingConfig()
"""Nodes are ranked by the draft's own distribution. At a low temperature or in a small nucleus it
would have one candidate at most positions, however unsure it is: the tree would be a chain."""


class DynamicTreeDrafter(Drafter):
    """Drafts the nodes with the most probable paths, level by level: one forward a level.

    After Li et al. 2024, EAGLE-2 (arXiv:2406.16858): the value of a node is the draft's probability
    of its path. Of all that was seen, the most valuable nodes are kept; a level's nodes are run if
    they are among these so far, since a child is worth no more than its parent. Ours is the end of
    it: levels are added while the nodes that would be run are worth `gain` together.

    Nothing is drawn, so the draft is the same whatever the target will sample, and a verifier that
    follows the target's own sample (`naive`) is exact.

    With a rule and a ranker, a node's value is the target's probability of its path as a head
    predicts it, and the rule says which nodes and levels pay.

    Args:
        sequence: the draft model's.
        nodes: most nodes of a draft.
        depth: most levels.
        gain: least sum of the values of a level's nodes for which the next level is drafted; 0: all
            `depth` levels.
        end_tokens: token ids after which nothing is drafted.
        ranker: gives the candidates of a level their values, from states that the sequence's model
            captures.
        costs: the rule; None: as many levels as `depth` and `gain` say.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        nodes: int,
        depth: int,
        gain: float,
        end_tokens: frozenset[int],
        *,
        ranker: Ranker | None = None,
        costs: TreeCosts | None = None,
    ) -> None:
        super().__init__([sequence], end_tokens)
        self._sequence = sequence
        self._nodes = nodes
        self._depth = depth
        self._gain = gain
        self._ranker = ranker
        self._costs = costs
        self._cached_number: dict[int, int] = {}

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a tree; the generator is not used."""
        sequence, costs = self._sequence, self._costs
        least = 0.0 if costs is None else costs.least
        seen = _Seen(sequence.model, self._nodes, self._ranker, least)
        level, cached = [0], {0: 0}
        for _ in range(min(self._depth, max_depth)):
            if level == [0]:
                logits = yield sequence.append(committed[sequence.length :], 1)  # (1, N)
            else:
                tokens = [seen.tokens[node] for node in level]
                parents = [cached[seen.parents[node]] for node in level]
                logits = yield sequence.append_tree(tokens, parents)  # (n, N)
            cached |= {node: len(cached) + place for place, node in enumerate(level) if node}
            before = sum(seen.values[node] for node in level)
            seen.extend(level, probabilities(logits, UNWARPED), sequence.states)
            level = [node for node in seen.newest if seen.tokens[node] not in self._end_tokens]
            value = sum(seen.values[node] for node in level)
            if not level or value < self._gain:
                break
            if costs is not None and not costs.goes_on(value, before, len(level)):
                break
        self._cached_number = {
            number: cached[node] for number, node in enumerate(seen.best, 1) if node in cached
        }
        return seen.draft()

    def accept(self, nodes: list[int], length: int) -> None:
        """Commit the accepted path, as far as it is in the cache, and drop the other nodes.

        The tokens of the rest are run with the committed ones when the next draft is made.
        """
        cached = takewhile(self._cached_number.__contains__, nodes)
        self._sequence.accept([self._cached_number[node] for node in cached])
        self._cached_number = {}

    def observe(self, record: Round) -> None:
        """Show the round to the rule."""
        if self._costs is not None:
            self._costs.observe(record)

    def reset(self) -> None:
        """Forget the sequence and the draft."""
        super().reset()
        self._cached_number = {}


class _Seen:
    """All nodes that one draft has looked at; node 0 is the last committed token.

    Args:
        model: the draft.
        count: most nodes to keep.
        ranker: gives candidates their values; None: the draft's probability.
        least: a node's value must be more.

    Attributes:
        tokens: of each node.
        parents: the node that each follows.
        values: probability of the path down to each.
        best: the most valuable nodes, in the order in which they were seen.
        newest: those of them that the last `extend` added.
    """

    def __init__(self, model: CachedModel, count: int, ranker: Ranker | None, least: float) -> None:
        self.tokens, self.parents, self.values = [-1], [-1], [1.0]
        self.best: list[int] = []
        self.newest: list[int] = []
        self._model, self._count, self._ranker, self._least = model, count, ranker, least
        self._rows: list[Tensor] = []
        self._row_of = [-1]

    def extend(self, nodes: list[int], rows: Tensor, states: Tensor | None) -> None:
        """Add the best children of nodes, given distributions (n, N) and states (n, H) there."""
        ranker = self._ranker
        most = self._count if ranker is None else ranker.candidates
        best, columns = rows.topk(min(most, rows.shape[-1]))
        ids = self._model.token_ids(columns)
        chances: list[list[float]] = best.tolist()
        if ranker is not None:
            assert states is not None
            chances = ranker(states, best, ids).tolist()
        first, row = len(self.tokens), sum(map(len, self._rows))
        for node, probs, tokens in zip(nodes, chances, ids.tolist(), strict=True):
            if math.isnan(probs[0]):
                raise NotFiniteError
            for prob, token in zip(probs, tokens, strict=True):
                # At most the parent's, so that no node is kept without its parent.
                value = self.values[node] * min(1.0, prob)
                if value > self._least:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.values.append(value)
                    self._row_of.append(row)
            row += 1
        self._rows.append(rows)
        # Stable: of equal values the earlier node stays, so a parent before its child.
        candidates = [*self.best, *range(first, len(self.tokens))]
        self.best = sorted(sorted(candidates, key=lambda n: -self.values[n])[: self._count])
        self.newest = [node for node in self.best if node >= first]

    def draft(self) -> DraftTree:
        """The most valuable nodes as a draft; an empty chain if there is none."""
        if not self.best:
            return drawn_chain([], [], 0)
        number = {0: 0} | {node: number for number, node in enumerate(self.best, start=1)}
        return DraftTree(
            torch.tensor([self.tokens[node] for node in self.best]),
            torch.tensor([number[self.parents[node]] for node in self.best]),
            self._model.everywhere(torch.cat(self._rows)),
            torch.tensor([self._row_of[node] for node in self.best]),
            "tree",
            "chosen",
        )
