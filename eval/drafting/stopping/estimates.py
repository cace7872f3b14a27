"""How likely a draft under way survives, for whoever weighs several drafts against each other.

A stopping rule answers yes or no for its own sequence. A verification budget that is shared among
sequences (`eval.runtime.budget`) ranks their drafts instead, by the estimates of the same rules.
What these ask a head is asked for all sequences at once: one call of a head takes as long for one
token as for a batch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eval.drafting.stopping.calibration import odds_of
from eval.drafting.stopping.online import OnlineLogistic, Pair

if TYPE_CHECKING:
    from eval.drafting.stopping.rule import DraftedToken, UpcomingToken
    from eval.drafting.stopping.survival import Asking
    from eval.rounds import Round
    from heads import BaseHead
    from heads.inputs import HeadInputs


@dataclass(frozen=True, slots=True)
class Question:
    """What a head is asked of one token.

    Args:
        model: what answers it.
        inputs: the token's features, with the leading shape ().
    """

    model: Estimates
    inputs: HeadInputs


Estimation = Generator[Question, Any, float]
"""Yields what a head is asked, is sent its raw logits, and returns a probability."""


class SurvivalEstimate(Protocol):
    """The estimated probability that a draft is accepted; `before` and `after` each token in turn.

    One for each slot of a batch.
    """

    def begin(self) -> None:
        """Start a round."""

    def before(self, upcoming: UpcomingToken) -> Estimation:
        """That all tokens so far and the one that is about to be drawn are accepted.

        Args:
            upcoming: what is known of that one; not the token.
        """

    def after(self, drafted: DraftedToken) -> Estimation:
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
        before_drawing: whether it is asked before a token is drawn, too; if not, the logistic model
            judges that token.
    """

    def __init__(
        self, first: Pair, head: BaseHead | None = None, *, before_drawing: bool = False
    ) -> None:
        self._first = first
        self.head = head
        self.before_drawing = before_drawing
        self.restart()

    def restart(self) -> None:
        """Forget what was learned, so that decoding does not depend on what was decoded before."""
        self.logistic = OnlineLogistic(self._first)
        moments = () if self.head is None else self.head.moments
        self.models = {moment: OnlineLogistic((0.0, 1.0)) for moment in moments}

    def start(self) -> SurvivalEstimate:
        """The estimate of one more slot."""
        return LogisticEstimate(self) if self.head is None else HeadEstimate(self, self.head)

    def run_all(self, questions: Sequence[Question]) -> list[float]:
        """The head's raw logit of the token of each question."""
        import torch

        from heads.inputs import HeadInputs

        assert self.head is not None
        logits = [0.0] * len(questions)
        for moment in {question.inputs.moment for question in questions}:
            places = [n for n, question in enumerate(questions) if question.inputs.moment is moment]
            asked = [questions[place].inputs.features for place in places]
            stacked = {name: torch.stack([each[name] for each in asked]) for name in asked[0]}
            answers = self.head.logits(HeadInputs(stacked, moment)).tolist()
            for place, logit in zip(places, answers, strict=True):
                logits[place] = logit
        return logits


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

    def before(self, upcoming: UpcomingToken) -> Estimation:
        """See `SurvivalEstimate.before`."""
        yield from ()  # no head is asked
        self._next = self._survival * self.judge(upcoming)
        return self._next

    def judge(self, upcoming: UpcomingToken) -> float:
        """That the token itself is accepted, given those before it."""
        self._odds.append(odds_of(float(upcoming.distribution.max())))
        return self._shared.logistic.accept(self._odds[-1])

    def after(self, drafted: DraftedToken) -> Estimation:
        """See `SurvivalEstimate.after`: the token adds nothing."""
        yield from ()
        self._survival = self._next
        return self._survival

    def observe(self, record: Round) -> None:
        """Learn from the accepted tokens, and the first that was not."""
        for place, odds in enumerate(self._odds[: min(record.accepted + 1, record.drafted)]):
            self._shared.logistic.observe(odds, place < record.accepted)


class HeadEstimate:
    """A head's estimates; what the head is not asked, or cannot judge, the logistic model judges.

    Args:
        shared: the models.
        head: the acceptance head.
    """

    def __init__(self, shared: Estimates, head: BaseHead) -> None:
        from eval.drafting.stopping.survival import Survival

        self._shared = shared
        self._logistic = LogisticEstimate(shared)
        self._head = Survival(head, refit=True)

    def begin(self) -> None:
        """Start a round."""
        self._logistic.begin()
        self._head.begin()
        self._head.models = self._shared.models
        self._survival = 1.0

    def before(self, upcoming: UpcomingToken) -> Estimation:
        """See `SurvivalEstimate.before`."""
        self._newest = self._logistic.judge(upcoming)
        if self._shared.before_drawing:
            return (yield from self._put(self._head.asking_before(upcoming)))
        return self._survival * self._newest

    def after(self, drafted: DraftedToken) -> Estimation:
        """See `SurvivalEstimate.after`."""
        self._survival = yield from self._put(self._head.asking_after(drafted, self._newest))
        return self._survival

    def observe(self, record: Round) -> None:
        """Learn from the accepted tokens, and the first that was not."""
        self._logistic.observe(record)
        self._head.observe(record)

    def _put(self, asking: Asking) -> Estimation:
        """Put what is asked to the head, beside what other sequences ask."""
        try:
            inputs = next(asking)
            while True:
                inputs = asking.send((yield Question(self._shared, inputs)))
        except StopIteration as known:
            survival: float = known.value
            return survival
