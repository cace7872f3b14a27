"""What a stopping rule is: parameters as a frozen value, and what it does at work on a sequence.

A rule decides after each drafted token whether the draft ends there. The token is kept whatever
the answer: looking at a token and then dropping it would bias the output. So every rule is
lossless, with every verifier whose proof lets the draft's length depend on drafted tokens.

A rule's class declares what it needs (a head, a calibration, times), so that no other code names
it. How to add one: see `eval.drafting.stopping`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from specdata.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from eval.rounds import Round
    from heads import BaseHead

Family = Literal["fixed", "rule", "head", "cost"]


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One drafted token, as a stopping rule sees it.

    Args:
        token: its id.
        distribution: (V,) the distribution q that it was drawn from.
        state: (H,) the draft's last hidden state that gave this distribution. It has consumed the
            token before this one, which for the first drafted token is the last committed token.
            None if hidden states are not captured, because the rule reads no head.
        embedding: (E,) the draft's input embedding of the token; None as for `state`.
        position: its place in the draft, from 0.
        since_rejection: tokens since the last one that the target replaced, or since the
            completion began.
    """

    token: int
    distribution: Tensor
    state: Tensor | None
    embedding: Tensor | None = None
    position: int = 0
    since_rejection: int = 0


ShouldStop = Callable[[DraftedToken], bool]
"""Shown each drafted token of one round, in order; True ends the draft with that token."""


def _ignore(_: Round) -> None:
    """A rule that learns nothing from finished rounds."""


@dataclass(frozen=True, slots=True)
class ActiveRule:
    """A rule at work in one slot, on one sequence after another.

    Args:
        longest: most tokens drafted in a round.
        begin: starts a round; what it returns is asked after each token of that round.
        observe: shown each finished round.
    """

    longest: int
    begin: Callable[[], ShouldStop]
    observe: Callable[[Round], None] = _ignore


class StoppingRule(Config):
    """The parameters of a rule, checked and frozen. Each rule is a subclass in a file of its own.

    Attributes:
        name: what configuration and results call it.
        adaptive: whether the length depends on the tokens drafted. If so, it ends chains only, and
            no verifier that carries a residual over rounds takes it.
        needs_head: whether it cannot work without an acceptance head.
        family: which methods plots draw alike: "fixed" lengths, training-free "rule"s, rules that
            threshold a "head", or "cost" rules without a threshold.
    """

    name: ClassVar[str]
    adaptive: ClassVar[bool] = True
    needs_head: ClassVar[bool] = False
    family: ClassVar[Family] = "rule"

    @property
    @abstractmethod
    def longest(self) -> int:
        """Most tokens drafted in a round."""

    @property
    def reads_head(self) -> bool:
        """Whether it reads an acceptance head, if there is one."""
        return self.needs_head

    @property
    def needs_calibration(self) -> bool:
        """Whether it reads a logistic model of acceptance that it was not given."""
        return False

    @property
    def measured(self) -> tuple[str, ...]:
        """Parameters that it measures from the times of rounds, because they were not given."""
        return ()

    def calibrated(self, coefficients: tuple[float, float]) -> Self:
        """The same rule with that logistic model, if it needs one."""
        return self

    def reported(self) -> dict[str, Any]:
        """Name -> value of the parameters that results keep beside the rule's name."""
        return self.model_dump(mode="json")

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """How far it would draft from each position of recorded rollouts: (R, N).

        For replay, and for choosing a setting on held-out rollouts. None, the default, if what is
        recorded does not tell, which leaves the rule out there.

        Args:
            tokens: the recorded tokens.
        """
        return None

    @abstractmethod
    def start(self, head: BaseHead | None) -> ActiveRule:
        """Put the rule to work in one slot.

        Args:
            head: the acceptance head, on the draft's device; never None if `needs_head`.
        """


class AdaptiveRule(StoppingRule):
    """A rule that looks at the tokens of the draft, with a cap on their number."""

    limit: int = Field(
        default=20, ge=1, description="most tokens drafted in a round (SpecDec++: 20)"
    )

    @property
    def longest(self) -> int:
        """The cap."""
        return self.limit
