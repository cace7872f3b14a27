"""A drafted token, as stopping rules see it, and the numbers that they read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Embed = Callable[["Tensor"], "Tensor | None"]


def _no_embedding(_ids: Tensor) -> None:
    return None


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One drafted token, as a stopping rule sees it.

    Args:
        token: its id; a tensor (1,) for `Numbers` that are read together with it.
        distribution: (V,) the distribution q that it was drawn from.
        state: (H,) the draft's last hidden state that gave this distribution. It has consumed the
            token before this one, which for the first drafted token is the last committed token.
            None if hidden states are not captured, because the rule reads no head.
        embed: gives the draft's input embeddings (..., E) of tokens (...); None as for `state`.
        numbers: what the rule `reads` of it, where it was read together with the token.
    """

    token: int | Tensor
    distribution: Tensor
    state: Tensor | None
    embed: Embed = _no_embedding
    numbers: tuple[float, ...] | None = None

    def read(self, numbers: Numbers) -> tuple[float, ...]:
        """The numbers that `ActiveRule.reads`, from the device now if the drafter has not."""
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


def nats(drafted: DraftedToken) -> Tensor:
    """(1,) the entropy of the distribution."""
    from specdata.probability import entropy

    return entropy(drafted.distribution).view(1)
