"""How likely a draft under way survives, for whoever weighs several drafts against each other.

A stopping rule answers yes or no for its own sequence. A verification budget that is shared among
sequences (`eval.runtime.budget`) ranks their drafts instead, by the estimates of the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from eval.drafting.stopping.calibration import odds_of
from eval.drafting.stopping.online import OnlineLogistic, Pair

if TYPE_CHECKING:
    from eval.drafting.stopping.rule import DraftedToken, UpcomingToken
    from eval.rounds import Round
    from heads import BaseHead


class SurvivalEstimate(Protocol):
    """The estimated probability that a draft is accepted; `before` and `after` each token in turn.

    One for each slot of a batch.
    """

    def begin(self) -> None:
        """Start a round."""

    def before(self, upcoming: UpcomingToken) -> float:
        """That all tokens so far and the one that is about to be drawn are accepted.

        Args:
            upcoming: what is known of that one; not the token.
        """

    def after(self, drafted: DraftedToken) -> float:
        """That all tokens so far are accepted, the one just drawn included."""

    def observe(self, record: Round) -> None:
        """Learn from the finished round."""


class Estimates:
    """What the estimates of all slots share: the models of acceptance, and what they learned.

    The models go on learning from what was accepted, of any sequence, which only looks back. A
    logistic model judges a token by max q of its distribution; a head, recalibrated by two numbers
    at each moment, judges it better.

    Args:
        first: the coefficients of the logistic model before anything is decoded.
        head: the acceptance head, if one is asked.
    """

    def __init__(self, first: Pair, head: BaseHead | None = None) -> None:
        self._first = first
        self._head = head
        self.restart()

    def restart(self) -> None:
        """Forget what was learned, so that decoding does not depend on what was decoded before."""
        self.logistic = OnlineLogistic(self._first)
        moments = () if self._head is None else self._head.moments
        self.models = {moment: OnlineLogistic((0.0, 1.0)) for moment in moments}

    def start(self) -> SurvivalEstimate:
        """The estimate of one more slot."""
        return LogisticEstimate(self) if self._head is None else HeadEstimate(self, self._head)


class LogisticEstimate:
    """The product of what the logistic model gives each token, which is known before it is drawn.

    Args:
        shared: the model.
    """

    def __init__(self, shared: Estimates) -> None:
        self._shared = shared
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._survival = self._next = 1.0
        self._odds: list[float] = []  # what the model reads of each token

    def judge(self, upcoming: UpcomingToken) -> float:
        """That the token itself is accepted, given those before it."""
        self._odds.append(odds_of(float(upcoming.distribution.max())))
        return self._shared.logistic.accept(self._odds[-1])

    def before(self, upcoming: UpcomingToken) -> float:
        """See `SurvivalEstimate.before`."""
        self._next = self._survival * self.judge(upcoming)
        return self._next

    def after(self, drafted: DraftedToken) -> float:
        """See `SurvivalEstimate.after`: the token adds nothing."""
        self._survival = self._next
        return self._survival

    def observe(self, record: Round) -> None:
        """Learn from the accepted tokens, and the first that was not."""
        for place, odds in enumerate(self._odds[: min(record.accepted + 1, record.drafted)]):
            self._shared.logistic.observe(odds, place < record.accepted)


class HeadEstimate:
    """A head's estimates; a token that it cannot judge yet, the logistic model judges.

    Args:
        shared: the models.
        head: the acceptance head.
    """

    def __init__(self, shared: Estimates, head: BaseHead) -> None:
        from eval.drafting.stopping.survival import Survival
        from heads.inputs import Moment

        self._shared = shared
        self._logistic = LogisticEstimate(shared)
        self._head = Survival(head, refit=True)
        self._asks_before = Moment.BEFORE in head.moments

    def begin(self) -> None:
        """Start a round."""
        self._logistic.begin()
        self._head.begin()
        self._head.models = self._shared.models
        self._survival = self._newest = 1.0

    def before(self, upcoming: UpcomingToken) -> float:
        """See `SurvivalEstimate.before`."""
        if self._asks_before:
            return self._head.before(upcoming)
        self._newest = self._logistic.judge(upcoming)
        return self._survival * self._newest

    def after(self, drafted: DraftedToken) -> float:
        """See `SurvivalEstimate.after`."""
        self._survival = self._head.after(drafted, self._newest)
        return self._survival

    def observe(self, record: Round) -> None:
        """Learn from the accepted tokens, and the first that was not."""
        self._logistic.observe(record)
        self._head.observe(record)
