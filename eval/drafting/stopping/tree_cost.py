"""Grow a dynamic tree while a further level, and each node, pays at measured times."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.cost import DRAFT_SHARE, ROUNDS, slope_of
from eval.drafting.stopping.rule import ActiveRule, Family, StoppingRule

if TYPE_CHECKING:
    from eval.rounds import Round
    from heads import BaseHead

VERIFY_SHARE = 0.05
"""A node's cost in the target's forward in emitted tokens, before anything is measured."""


class TreeCost(StoppingRule):
    """Of a dynamic tree: draft what a head of kind `candidates` expects to pay.

    The expected tokens of a draft are the sum over its nodes of the probability that the target
    draws their path, which the head predicts. With lambda, the time of an emitted token, a node is
    kept while its probability times lambda is more than the target's forward takes longer for it;
    a further level is drafted while that sum over the last one, times the share of it that the
    children of the level before added, times lambda, is more than a forward of the draft and
    verifying as many nodes. At least one level is drafted. What is not given is measured over the
    last rounds.
    """

    name: ClassVar[str] = "tree_cost"
    needs_head: ClassVar[bool] = True
    of_trees: ClassVar[bool] = True
    family: ClassVar[Family] = "cost"

    draft_seconds: float = Field(
        default=0.0, ge=0.0, description="time of a forward of the draft, in seconds; 0 measures it"
    )
    verify_seconds: float = Field(
        default=0.0,
        ge=0.0,
        description="what the target takes longer for one more node, in seconds; 0 measures it",
    )
    token_seconds: float = Field(
        default=0.0, ge=0.0, description="time of an emitted token, in seconds; 0 measures it"
    )

    @property
    def longest(self) -> int:
        """One: the depth of a tree is its drafter's."""
        return 1

    @property
    def measured(self) -> tuple[str, ...]:
        """The times that were not given."""
        names = ("draft_seconds", "verify_seconds", "token_seconds")
        return tuple(name for name in names if not getattr(self, name))

    def start(self, head: BaseHead | None) -> TreeCosts:
        """Begin with the given times and first guesses."""
        return TreeCosts(self)


class TreeCosts(ActiveRule):
    """The rule at work in one slot.

    Without a time that is given, lambda counts as one second until the first measurement, and in
    batches, whose rounds have no times of their own; only ratios matter.

    Args:
        rule: the parameters.
    """

    def __init__(self, rule: TreeCost) -> None:
        super().__init__(rule.longest)
        self._rule = rule
        self._rounds: deque[Round] = deque(maxlen=ROUNDS)
        self._observed = 0
        self.token_seconds = rule.token_seconds or rule.draft_seconds / DRAFT_SHARE or 1.0
        self.draft_seconds = rule.draft_seconds or DRAFT_SHARE * self.token_seconds
        self.verify_seconds = rule.verify_seconds or VERIFY_SHARE * self.token_seconds

    @property
    def least(self) -> float:
        """The value that a node must have to be kept."""
        return self.verify_seconds / self.token_seconds

    def goes_on(self, value: float, before: float, nodes: int) -> bool:
        """True if another level pays.

        Args:
            value: sum of the values of the last level's nodes.
            before: of those that they follow.
            nodes: how many the last level has.
        """
        gained = value * min(1.0, value / before) * self.token_seconds
        return gained > self.draft_seconds + nodes * self.verify_seconds

    def observe(self, record: Round) -> None:
        """Measure what is not given, over the last rounds."""
        if not self._rule.measured or record.draft_forwards == 0 or not record.target_seconds:
            return
        self._rounds.append(record)
        self._observed += 1
        if self._observed in (4, 8, 16, 32) or self._observed % 64 == 0:
            self._measure()

    def _measure(self) -> None:
        rounds, rule = self._rounds, self._rule
        nodes, forwards, emitted = (
            np.array([getattr(r, name) for r in rounds], dtype=np.float64)
            for name in ("drafted", "draft_forwards", "emitted")
        )
        verifying = np.array([r.target_seconds + r.overhead_seconds for r in rounds])
        # Medians, because some rounds hold a prefill and any may be interrupted.
        draft = float(np.median([r.draft_seconds / r.draft_forwards for r in rounds]))
        verify = self.verify_seconds / self.token_seconds * draft / DRAFT_SHARE
        if len(rounds) >= 16 and np.ptp(nodes) >= 2:
            verify = max(slope_of(verifying, nodes), 0.0)
        rest = max(float(np.median(verifying - verify * nodes)), 0.0)
        spent = rest * len(rounds) + verify * nodes.sum() + draft * forwards.sum()
        self.draft_seconds = rule.draft_seconds or draft
        self.verify_seconds = rule.verify_seconds or verify
        self.token_seconds = rule.token_seconds or float(spent / emitted.sum())
