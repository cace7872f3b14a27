"""The inputs of acceptance heads: what is known of drafted tokens, from labels to decoder.

Training, replay and decoding all describe tokens as `DraftedTokens`, and only the features that a
head names in its `reads` are computed. Saved heads carry this file, so it imports torch only.

To add a feature, write a function of `DraftedTokens` and give it a line in `FEATURES`; a head that
names it in `reads` gets it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

LEAST_CHANCE = 1e-30
"""A drafted token has a probability; this keeps the logarithm of padding finite."""


class DrawnToken(Protocol):
    """A token that a draft has just drawn, as stopping rules see it while decoding."""

    @property
    def token(self) -> int | Tensor:
        """The id, or that still on the device, (1,)."""

    @property
    def distribution(self) -> Tensor:
        """(V,) the distribution q that it was drawn from."""

    @property
    def state(self) -> Tensor | None:
        """(H,) the draft's last hidden state that gave `distribution`; None if not captured."""

    def embed(self, ids: Tensor) -> Tensor | None:
        """(..., E) the draft's input embeddings of tokens (...); None if not captured."""


def _not_known() -> Tensor:
    raise ValueError("the head reads a feature that is not known here")


@dataclass(frozen=True, kw_only=True)
class DraftedTokens:
    """Drafted tokens as far as known when they are judged; a feature calls what it reads."""

    tokens: Tensor  # (...) int64 ids
    # (..., H) the draft's last hidden state from which the token was drawn.
    before: Callable[[], Tensor] = _not_known
    # (..., H) the one after it consumed the token: what SpecDec++'s head reads, one token late.
    after: Callable[[], Tensor] = _not_known
    # (..., V) the distributions q that the tokens were drawn from.
    distributions: Callable[[], Tensor] = _not_known
    # (..., E) the draft's input embeddings of the tokens.
    embeddings: Callable[[], Tensor] = _not_known

    @cached_property
    def q(self) -> Tensor:
        """(..., V), the distributions; made once for all features."""
        return self.distributions()

    @cached_property
    def q_of_token(self) -> Tensor:
        """(..., 1) probability of the token itself."""
        return self.q.gather(-1, self.tokens.unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a head can read as soon as a token is drawn."""

    compute: Callable[[DraftedTokens], Tensor]
    # A number (...), or a vector as long as the draft's states or embeddings.
    shape: Literal["number", "hidden", "embedding"] = "number"


def _log_q(drafted: DraftedTokens) -> Tensor:
    return drafted.q_of_token.squeeze(-1).clamp(min=LEAST_CHANCE).log()


FEATURES: dict[str, Feature] = {
    # (..., H), the last hidden state that gave the distribution.
    "hidden_before": Feature(lambda drafted: drafted.before(), "hidden"),
    # (..., E), the draft's input embedding of the token.
    "embedding": Feature(lambda drafted: drafted.embeddings(), "embedding"),
    # (...), natural logarithms.
    "log_q": Feature(_log_q),
    "entropy": Feature(lambda drafted: torch.special.entr(drafted.q).sum(dim=-1)),
}


def feature_of(name: str, drafted: DraftedTokens) -> Tensor:
    """A feature, or "hidden", the state after the token, which heads with a lag read."""
    return drafted.after() if name == "hidden" else FEATURES[name].compute(drafted)


def under_way(drawn: DrawnToken) -> DraftedTokens:
    """A token of a draft under way; leading shape (). States must be captured to be read."""
    token = torch.as_tensor(drawn.token, device=drawn.distribution.device).view(())
    return DraftedTokens(
        tokens=token,
        before=lambda: captured_state(drawn),
        distributions=lambda: drawn.distribution,
        embeddings=lambda: captured_embeddings(drawn, token),
    )


def captured_state(drawn: DrawnToken) -> Tensor:
    """(H,) the state that a token was drawn from. Raises ValueError if it was not captured."""
    if drawn.state is None:
        raise ValueError("the draft's hidden states are needed and were not captured")
    return drawn.state


def captured_embeddings(drawn: DrawnToken, ids: Tensor) -> Tensor:
    """(..., E) of tokens (...). Raises ValueError if they were not captured."""
    if (embedded := drawn.embed(ids)) is None:
        raise ValueError("the draft's input embeddings are needed and were not captured")
    return embedded
