"""A tree of the draft's most probable continuations, grown where the draft is sure of them."""

from __future__ import annotations

import math
from collections import deque
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from eval.drafting.drafters import Drafter, drawn_chain
from eval.drafting.stopping.logistic import OnlineLogistic, odds_of
from eval.drafts import DraftTree
from eval.rounds import Round
from eval.runtime.batches import ForwardCoroutine
from eval.runtime.feeding.plain import CachedSequence
from eval.runtime.model import CachedModel
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig, probabilities

UNWARPED = SamplingConfig()
"""Nodes are ranked by the draft's own distribution. At a low temperature or in a small nucleus it
would have one candidate at most positions, however unsure it is: the tree would be a chain."""
RETRIED = 48
"""Rounds after which another number of nodes is timed again."""


class DynamicTreeDrafter(Drafter):
    """Drafts the nodes with the most probable paths, level by level: one forward a level.

    After Li et al. 2024 (arXiv:2406.16858): the value of a node is the draft's probability
    of its path. Of all that was seen, the `nodes` most valuable are kept; a level's nodes are run
    if they are among these so far, since a child is worth no more than its parent. Ours is the end
    of it: of at most `depth` levels, one is added while the nodes that would be run are worth
    `gain` together; 0 adds all.

    Nothing is drawn, so the draft is the same whatever the target will sample, and a verifier that
    follows the target's own sample (`naive`) is exact. That holds with `by_cost`, too, which looks
    at finished rounds alone: then levels and nodes are as many as are worth their time (`_Costs`).
    """

    def __init__(
        self,
        sequence: CachedSequence,
        nodes: int,
        depth: int,
        gain: float,
        end_tokens: frozenset[int],
        *,
        by_cost: bool = False,
    ) -> None:
        super().__init__([sequence], end_tokens)
        self._nodes = nodes
        self._depth = depth
        self._gain = gain
        self._costs = _Costs(nodes) if by_cost else None

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a tree; the generator is not used."""
        (draft,) = self._drafts
        sequence, costs = draft.sequence, self._costs
        seen = _Seen(sequence.model, self._nodes)
        level = [0]
        for _ in range(min(self._depth, max_depth)):
            if level == [0]:
                logits = yield sequence.append(committed[sequence.length :], 1)  # (1, N)
            else:
                logits = yield from draft.append(level, seen.tokens, seen.parents)  # (n, N)
            seen.extend(level, probabilities(logits, UNWARPED))
            level = [node for node in seen.newest if seen.tokens[node - 1] not in self._end_tokens]
            values = [seen.values[node] for node in level]
            goes_on = costs.worth(values) if costs else sum(values) >= self._gain
            if not level or not goes_on:
                break
        if costs:
            seen.best = seen.best[: costs.nodes([seen.values[node] for node in seen.best])]
        cached = draft.cached_number
        draft.cached_number = {
            number: cached[node] for number, node in enumerate([0, *seen.best]) if node in cached
        }
        return seen.draft()

    def accept(self, nodes: list[int]) -> None:
        """Commit the accepted nodes."""
        super().accept(nodes)
        if self._costs:
            self._costs.accepted = nodes

    def observe(self, record: Round) -> None:
        """Learn what a round cost, if costs are asked."""
        if self._costs:
            self._costs.observe(record)

    def reset(self) -> None:
        """Forget the sequence; what was measured is kept."""
        super().reset()
        if self._costs:
            self._costs.is_first = True


class _Costs:
    """How many nodes, the most valuable first, are worth what the target takes to read them.

    With t(n) the time of a round whose target reads n nodes, and a_i the chance that the node of
    rank i is accepted, n maximises lambda (a_1 + ... + a_n) - t(n); lambda is what the rounds took
    per emitted token (Dinkelbach's iteration, as in the `cost` of chains). t is a median of the
    last rounds with n nodes and may fall in n, since some numbers of rows are cheap for a
    processor; each n is tried at first, and again once in a while. The a_i are calibrated by what
    was accepted. Another level is drafted while a forward of the draft takes less than lambda times
    the chance that a node of the last is accepted, and one after it as often as that was. In
    batches, whose rounds have no times, all nodes are kept.
    """

    def __init__(self, most: int) -> None:
        self.is_first, self.accepted = True, list[int]()
        self._seconds = [deque[float](maxlen=9) for _ in range(most + 1)]
        self._tried = [0] * (most + 1)  # the round in which each number of nodes was last read
        self._rounds = deque[Round](maxlen=128)
        self._forwards = deque[float](maxlen=128)
        self._acceptance = OnlineLogistic((0.0, 1.0))
        self._values, self._count, self._token_seconds = list[float](), 0, 0.0
        self._goes_on = deque[bool](maxlen=512)  # whether after an accepted node another was

    def worth(self, values: list[float]) -> bool:
        """Whether to run the nodes of a level, given their values."""
        if not self._token_seconds:
            return True
        chance = sum(self._acceptance.accept(odds_of(value)) for value in values)
        next_too = (8.0 + sum(self._goes_on)) / (10.0 + len(self._goes_on))
        return chance * next_too * self._token_seconds >= median(self._forwards)

    def nodes(self, values: list[float]) -> int:
        """The number of nodes of a draft, given the values of all, the largest first."""
        self._values = values
        if self._count and not self._rounds:
            return len(values)  # rounds that nobody times
        if not values:
            return 0
        numbers = range(1, len(values) + 1)
        # Those with few times come first, then the one whose last is the oldest.
        next_tried = min(numbers, key=lambda n: (len(self._seconds[n]) >= 3, self._tried[n]))
        if len(self._seconds[next_tried]) < 3 or self._count % RETRIED == 0:
            return next_tried
        chances = accumulate(self._acceptance.accept(odds_of(value)) for value in values)
        saved = zip(numbers, chances, strict=True)
        worth = {n: self._token_seconds * most - median(self._seconds[n]) for n, most in saved}
        return max(worth, key=worth.__getitem__)

    def observe(self, record: Round) -> None:
        """Take a finished round into account; the first of a text reads its prompt, too."""
        self._count += 1
        is_first, self.is_first = self.is_first, False
        if record.draft_forwards == 0 or is_first or record.target_seconds == 0.0:
            return
        self._rounds.append(record)
        self._tried[record.drafted] = self._count
        self._seconds[record.drafted].append(record.target_seconds + record.overhead_seconds)
        self._forwards.append(record.draft_seconds / record.draft_forwards)
        reached = range(1, min(record.accepted + 1, record.depth))
        self._goes_on.extend(record.accepted > depth for depth in reached)
        kept = {*self.accepted}
        for node, value in enumerate(self._values[: record.drafted], start=1):
            self._acceptance.observe(odds_of(value), node in kept)
        if self._count % 16 == 0:
            rounds = self._rounds
            seconds = sum(r.draft_seconds + r.target_seconds + r.overhead_seconds for r in rounds)
            self._token_seconds = seconds / sum(r.emitted for r in rounds)


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
