"""How likely a draft under way survives, for whoever weighs several drafts against each other.

A stopping rule answers yes or no for its own sequence. A verification budget that is shared among
sequences (`eval.runtime.budget`) ranks their drafts instead, by the estimates of the same rules.
What these ask a head is asked for all sequences at once: one call of a head takes as long for one
token as for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.rule import DraftedToken, UpcomingToken
    from eval.drafting.stopping.survival import Asking
    from heads import BaseHead
    from heads.inputs import HeadInputs


class HeadRunner:
    """A head that is asked of several tokens at a time.

    Args:
        head: the head.
    """

    def __init__(self, head: BaseHead) -> None:
        self.head = head

    def run_all(self, questions: Sequence[Question]) -> list[float]:
        """The raw logit of the token of each question."""
        import torch

        from heads.inputs import HeadInputs

        logits = [0.0] * len(questions)
        for moment in {question.inputs.moment for question in questions}:
            places = [n for n, question in enumerate(questions) if question.inputs.moment is moment]
            asked = [questions[place].inputs.features for place in places]
            stacked = {name: torch.stack([each[name] for each in asked]) for name in asked[0]}
            answers = self.head.logits(HeadInputs(stacked, moment)).tolist()
            for place, logit in zip(places, answers, strict=True):
                logits[place] = logit
        return logits


@dataclass(frozen=True, slots=True)
class Question:
    """What a head is asked of one token.

    Args:
        model: what answers it.
        inputs: the token's features, with the leading shape ().
    """

    model: HeadRunner
    inputs: HeadInputs


Estimation = Generator[Question, Any, float]
"""Yields what a head is asked, is sent its raw logits, and returns a probability."""


class SurvivalEstimate(Protocol):
    """The estimated probability that a draft is accepted; `before` and `after` each token in turn.

    The same tokens get the same estimates, whatever was decoded before.
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


class ProductOfEstimates:
    """The product of estimates that read a token's distribution alone, so are known before it is.

    Args:
        accept: (position, distribution (V,)) -> the acceptance probability of a token drawn there.
    """

    def __init__(self, accept: Callable[[int, Tensor], float]) -> None:
        self._accept = accept
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._survival = self._next = 1.0

    def before(self, upcoming: UpcomingToken) -> Estimation:
        """See `SurvivalEstimate.before`."""
        yield from ()  # no head is asked
        self._next = self._survival * self._accept(upcoming.position, upcoming.distribution)
        return self._next

    def after(self, drafted: DraftedToken) -> Estimation:
        """See `SurvivalEstimate.after`: the token adds nothing."""
        yield from ()
        self._survival = self._next
        return self._survival


class HeadEstimate:
    """A head's estimates; what the head cannot judge yet is judged by the distribution alone.

    Args:
        runner: the acceptance head; its probabilities are calibrated and stay as they are.
        accept: as in `ProductOfEstimates`.
    """

    def __init__(self, runner: HeadRunner, accept: Callable[[int, Tensor], float]) -> None:
        from eval.drafting.stopping.survival import Survival
        from heads.inputs import Moment

        self._runner = runner
        self._head = Survival(runner.head)
        self._asks_before = Moment.BEFORE in runner.head.moments
        self._accept = accept
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._head.begin()
        self._survival = self._newest = 1.0

    def before(self, upcoming: UpcomingToken) -> Estimation:
        """See `SurvivalEstimate.before`."""
        if self._asks_before:
            return (yield from self._put(self._head.asking_before(upcoming)))
        self._newest = self._accept(upcoming.position, upcoming.distribution)
        return self._survival * self._newest

    def after(self, drafted: DraftedToken) -> Estimation:
        """See `SurvivalEstimate.after`."""
        asking = self._head.asking_after(drafted, self._newest)
        self._survival = yield from self._put(asking)
        return self._survival

    def _put(self, asking: Asking) -> Estimation:
        """Put what is asked to the runner."""
        try:
            inputs = next(asking)
            while True:
                inputs = asking.send((yield Question(self._runner, inputs)))
        except StopIteration as known:
            survival: float = known.value
            return survival
