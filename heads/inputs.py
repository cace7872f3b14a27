"""What an acceptance head reads about drafted tokens: one value, from labels to decoder.

Training, replay and decoding all build a `HeadInputs` here, and only the features that the head
names in `AcceptanceHead.reads` are computed.

To add a feature, write a function of `DraftedTokens` and give it a line in `FEATURES`; a head that
names it in `reads` gets it as an argument of its `forward`, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.probability import SamplingConfig, probabilities

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DrawnToken(Protocol):
    """A token that a draft has just drawn, as stopping rules see it while decoding."""

    @property
    def token(self) -> int:
        """Its id."""

    @property
    def distribution(self) -> Tensor:
        """(V,) the distribution q that it was drawn from."""

    @property
    def state(self) -> Tensor | None:
        """(H,) the draft's last hidden state that gave `distribution`; None if not captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTokens:
    """What is known of drafted tokens when they are judged; a feature calls what it reads.

    Attributes:
        tokens: (...) int64 ids.
        before: gives (..., H), the draft's last hidden state from which the token was drawn. It has
            consumed all tokens before this one.
        after: gives (..., H), the draft's last hidden state after it consumed the token.
        distributions: gives (..., V), the distributions q that the tokens were drawn from.
    """

    tokens: Tensor
    before: Callable[[], Tensor]
    after: Callable[[], Tensor]
    distributions: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a head can read.

    Attributes:
        compute: its value for each token, (...) or (..., size).
        after: whether it reads `DraftedTokens.after`. While decoding that state exists only once
            the next token has been drawn, so a head that reads it judges all tokens but the newest.
    """

    compute: Callable[[DraftedTokens], Tensor]
    after: bool = False


FEATURES: dict[str, Feature] = {
    # (..., H), the last hidden state after the draft consumed the token: SpecDec++ (2405.19715).
    "hidden": Feature(lambda drafted: drafted.after(), after=True),
}


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The features of drafted tokens, by name; all have the same leading shape (...)."""

    features: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.features[name]

    @classmethod
    def of(cls, reads: Sequence[str], drafted: DraftedTokens) -> HeadInputs:
        """Compute the features named in `reads`, and no other."""
        return cls({name: FEATURES[name].compute(drafted) for name in reads})

    @classmethod
    def from_batch(
        cls,
        reads: Sequence[str],
        *,
        input_ids: Tensor,
        states: Tensor,
        logits: Callable[[Tensor], Tensor],
        sampling: SamplingConfig,
    ) -> HeadInputs:
        """The inputs at every position of sequences that the draft has read.

        Position t describes the token there as if it had been drafted after those before it. At
        position 0 nothing comes before, so features of what precedes a token mean nothing there.

        Args:
            reads: names of the features.
            input_ids: (B, T).
            states: (B, T, H), the draft's last hidden state after each token.
            logits: gives the draft's logits of states; see `logits_of_states`.
            sampling: how tokens are drawn from logits.

        Returns:
            Features with the leading shape (B, T).
        """

        def before() -> Tensor:
            return torch.roll(states, 1, dims=1)

        return cls.of(
            reads,
            DraftedTokens(
                tokens=input_ids,
                before=before,
                after=lambda: states,
                distributions=lambda: probabilities(logits(before()), sampling),
            ),
        )

    @classmethod
    def from_drafted(cls, reads: Sequence[str], drafted: Sequence[DrawnToken]) -> HeadInputs | None:
        """The inputs of the newest token that can be judged in a draft under way.

        Args:
            reads: names of the features.
            drafted: the tokens drawn so far in this round, in order. States must be captured.

        Returns:
            Features with the leading shape (): those of the last token, or of the one before it
            where a feature reads the state after the token. None if there is no such token yet.
        """
        lag = int(any(FEATURES[name].after for name in reads))
        if len(drafted) <= lag:
            return None
        judged = drafted[-1 - lag]
        return cls.of(
            reads,
            DraftedTokens(
                tokens=torch.tensor(judged.token, device=judged.distribution.device),
                before=lambda: _captured(judged),
                after=lambda: _captured(drafted[-1]),
                distributions=lambda: judged.distribution,
            ),
        )


def logits_of_states(draft: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """How a draft makes logits of last hidden states: (..., H) -> (..., V).

    It is found out at the first call, so a head that reads no distribution costs nothing.

    Raises:
        ConfigError: when called, if the draft's logits cannot be made of its hidden states.
    """
    find = cache(find_lm_head)

    def logits(states: Tensor) -> Tensor:
        lm_head = find(draft)
        if lm_head.embedding is None:
            raise ConfigError(
                f"the head reads the draft's distributions, and how {type(draft).__name__} makes "
                "logits of its hidden states is not known; use another draft or head"
            )
        with torch.no_grad():
            return lm_head.logits(states)

    return logits


def _captured(drawn: DrawnToken) -> Tensor:
    if drawn.state is None:
        raise ValueError("the draft's hidden states are needed and were not captured")
    return drawn.state
