"""Stopping rules: parameters as a frozen value, and an object at work on a sequence.

A rule decides after each drafted token whether the draft ends there. The token is kept whatever
the answer: looking at a token and then dropping it would bias the output. So every rule is
lossless, with every verifier whose proof lets the draft's length depend on drafted tokens.

A rule's class declares what it needs (a head, a calibration, times), so that no other code names
it. How to add one: see `eval.drafting.stopping`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from specdata.config import Config, Few

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.recorded import Reals, RecordedTokens
    from eval.rounds import Round
    from heads import BaseHead


Embed = Callable[["Tensor"], "Tensor | None"]


def _no_embedding(_ids: Tensor) -> None:
    return None


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One drafted token, as a stopping rule sees it.

    The state has consumed the token before this one, which for the first drafted token is the last
    committed token. It is None if hidden states are not captured, because the rule reads no head.
    """

    token: int | Tensor  # its id; a tensor (1,) for `Numbers` that are read together with it
    distribution: Tensor  # (V,) q, which it was drawn from
    state: Tensor | None  # (H,) the draft's last hidden state, which gave the distribution
    embed: Embed = _no_embedding  # (...) tokens -> (..., E) the draft's input embeddings
    numbers: tuple[float, ...] | None = None  # what the rule `reads`, if read with the token

    def read(self, numbers: Numbers) -> tuple[float, ...]:
        """The numbers of `ActiveRule.number_reader`, from the device now if the drafter has not."""
        return tuple(numbers(self).tolist()) if self.numbers is None else self.numbers


Numbers = Callable[[DraftedToken], "Tensor"]
"""(m,) numbers of a token that may still be on the device."""


def chance(drafted: DraftedToken) -> Tensor:
    """(1,) the probability of the token itself."""
    if isinstance(drafted.token, int):
        return drafted.distribution[drafted.token : drafted.token + 1]
    return drafted.distribution.index_select(0, drafted.token)


def largest(drafted: DraftedToken) -> Tensor:
    """(1,) the probability of the most probable token."""
    return drafted.distribution.max().view(1)


def entropy_of(drafted: DraftedToken) -> Tensor:
    """(1,) the entropy of the distribution."""
    from specdata.probability import entropy

    return entropy(drafted.distribution).view(1)


class ActiveRule:
    """A rule at work in one slot, on one sequence after another; this one never stops.

    Replay asks the same object about the drafts from every position of recorded rollouts at once:
    numbers that it reads are then arrays, and so is its answer. So a rule adds, multiplies and
    compares them, and decides nothing by `if` or `not`.

    At most `longest` tokens are drafted in a round. The numbers that its `number_reader` gives are
    read together with the token on a GPU: rules that read the distribution themselves wait for the
    device once more.
    """

    def __init__(self, longest: int, number_reader: Numbers | None = None) -> None:
        self.longest = longest
        self.number_reader = number_reader

    def begin(self) -> None:
        """Start a round."""

    def should_stop(self, drafted: DraftedToken) -> bool:
        """True if the draft ends with this token, which is kept; asked of each token in order."""
        return False

    def observe(self, record: Round) -> None:
        """Take note of a finished round."""


class ThresholdRule(ActiveRule):
    """Compares a number of each token, or the product of a round's numbers, with a threshold.

    A draft `ends` at a number or product; `accept` gives the acceptance probability that a number
    stands for.
    """

    def __init__(
        self,
        longest: int,
        number_reader: Numbers,
        ends: Callable[[float], bool],
        *,
        multiplies: bool = False,
        accept: Callable[[float], float] = lambda number: number,
    ) -> None:
        super().__init__(longest, number_reader)
        self._number, self._ends = number_reader, ends
        self._multiplies, self._accept = multiplies, accept
        self._value = 1.0

    def begin(self) -> None:
        """Start a round."""
        self._value = 1.0

    def should_stop(self, drafted: DraftedToken) -> bool:
        """True if the draft ends with this token."""
        number = self._accept(drafted.read(self._number)[0])
        self._value = self._value * number if self._multiplies else number
        return self._ends(self._value)


class StoppingRule(Config):
    """The parameters of a rule, checked and frozen; `start` puts it to work."""

    name: ClassVar[str]
    # When it ends a draft, for readers of a card: what follows "until".
    until: ClassVar[str] = "its rule ends the draft"
    # Parameters that tests try it with, on drafts of at most three tokens over three: each must end
    # drafts of several lengths there, unless it is not adaptive.
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    # Whether the length depends on the tokens drafted. If so, it ends chains only, and no verifier
    # whose residual persists over rounds takes it.
    adaptive: ClassVar[bool] = True
    needs_head: ClassVar[bool] = False
    # Parameters that an evaluation fits on labels where they are None, by `fit`. Two rules may name
    # the same one if they fit it alike.
    fitted: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def longest(self) -> int:
        """Most tokens drafted in a round."""

    @property
    def reads_head(self) -> bool:
        """True if it reads an acceptance head, if there is one."""
        return self.needs_head

    @property
    def needs_fit(self) -> bool:
        """True if a parameter is fitted on labels, because it was not given."""
        return any(getattr(self, name) is None for name in self.fitted)

    @property
    def measured(self) -> tuple[str, ...]:
        """Parameters that it measures from the times of rounds, because they were not given."""
        return ()

    @classmethod
    def fit(cls, tokens: RecordedTokens, accept: Reals) -> dict[str, Any]:
        """Values of the parameters in `fitted`, as JSON can hold them.

        Of held-out rollouts, which the draft was not distilled on, and (R, N) min(1, p/q) of their
        drafted tokens.
        """
        return {}

    def with_fit(self, values: Mapping[str, Any]) -> Self:
        """The same rule with these values where it was given none; it ignores other names."""
        missing = {
            name: values[name]
            for name in self.fitted
            if name in values and getattr(self, name) is None
        }
        return type(self).model_validate({**self.model_dump(), **missing})

    def reported(self) -> dict[str, Any]:
        """Name -> value of the parameters that results keep beside the rule's name."""
        return self.model_dump(mode="json")

    @abstractmethod
    def start(self, head: BaseHead | None) -> ActiveRule:
        """Put the rule to work in one slot.

        The acceptance head is on the draft's device; it is never None if `needs_head`.
        """


class AdaptiveRule(StoppingRule):
    """A rule that looks at the tokens of the draft, with a cap on their number."""

    limit: Few = Field(
        default=20, ge=1, description="most tokens drafted in a round (SpecDec++: 20)"
    )

    @property
    def longest(self) -> int:
        """The cap."""
        return self.limit
