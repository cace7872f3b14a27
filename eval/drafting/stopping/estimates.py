"""How likely a draft under way survives, for whoever weighs several drafts against each other.

A stopping rule answers yes or no for its own sequence. A verification budget that is shared among
sequences (`eval.runtime.budget`) ranks their drafts instead, by the estimates of the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.rule import DraftedToken, UpcomingToken
    from heads import BaseHead


class SurvivalEstimate(Protocol):
    """The estimated probability that a draft is accepted; `before` and `after` each token in turn.

    The same tokens get the same estimates, whatever was decoded before.
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

    def before(self, upcoming: UpcomingToken) -> float:
        """See `SurvivalEstimate.before`."""
        self._next = self._survival * self._accept(upcoming.position, upcoming.distribution)
        return self._next

    def after(self, drafted: DraftedToken) -> float:
        """See `SurvivalEstimate.after`: the token adds nothing."""
        self._survival = self._next
        return self._survival


class HeadEstimate:
    """A head's estimates; what the head cannot judge yet is judged by the distribution alone.

    Args:
        head: the acceptance head; its probabilities are calibrated and stay as they are.
        accept: as in `ProductOfEstimates`.
    """

    def __init__(self, head: BaseHead, accept: Callable[[int, Tensor], float]) -> None:
        from eval.drafting.stopping.survival import Survival
        from heads.inputs import Moment

        self._head = Survival(head)
        self._asks_before = Moment.BEFORE in head.moments
        self._accept = accept
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._head.begin()
        self._survival = self._newest = 1.0

    def before(self, upcoming: UpcomingToken) -> float:
        """See `SurvivalEstimate.before`."""
        self._newest = self._accept(upcoming.position, upcoming.distribution)
        if self._asks_before:
            return self._head.before(upcoming)
        return self._survival * self._newest

    def after(self, drafted: DraftedToken) -> float:
        """See `SurvivalEstimate.after`."""
        self._survival = self._head.after(drafted, self._newest)
        return self._survival
