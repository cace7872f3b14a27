"""The inputs of an acceptance head about drafted tokens: one value, from labels to decoder.

Training, replay and decoding all build a `HeadInputs` here, and only the features that the head
names in its `reads` are computed.

What is known of a token grows while decoding (`DecisionPoint`): first the distribution that it will
be drawn from, then the token, and, once the next forward of the draft has run, the draft's state
after it. Each feature says from which decision point on it is known.

To add a feature, write a function of `DraftedTokens` and give it a line in `FEATURES`; a head that
names it in `reads` gets it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.models import known_ids
from specdata.probability import SamplingConfig, entropy, probabilities
from specdata.states_draft import token_embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_MARGIN = 30.0
"""Nats. The margin of a distribution with one token only would be infinite."""
LEAST_MASS = 1e-6
"""Added to the mass above a token, which is 0 for the most probable one."""
LEAST_CHANCE = 1e-30
"""A drafted token has a probability; this keeps the logarithm of padding finite."""


class DecisionPoint(IntEnum):
    """Stages of what is known of a drafted token; each knows what the ones before it know."""

    BEFORE = 0
    """The distribution that it will be drawn from, and the state that gave it."""
    DRAWN = 1
    """The token itself. Costs no forward of the draft."""
    CONSUMED = 2
    """The draft's state after it: while decoding, once the next token can be drawn."""


class NextToken(Protocol):
    """A token that a draft is about to draw, as stopping rules see it while decoding."""

    @property
    def distribution(self) -> Tensor:
        """(V,) the distribution q that it is drawn from."""

    @property
    def state(self) -> Tensor | None:
        """(H,) the draft's last hidden state that gave `distribution`; None if not captured."""

    @property
    def position(self) -> int:
        """Its place in the draft, from 0."""

    @property
    def since_rejection(self) -> int:
        """Tokens since the last one that the target replaced, or since the completion began."""


class DrawnToken(NextToken, Protocol):
    """A token that a draft has just drawn."""

    @property
    def token(self) -> int:
        """Its id."""

    def embed(self, ids: Tensor) -> Tensor | None:
        """(..., E) the draft's input embeddings of tokens (...); None if not captured."""


def _not_known() -> Tensor:
    raise ValueError("the head reads a feature that is not known here")


@dataclass(frozen=True, kw_only=True)
class DraftedTokens:
    """Drafted tokens as far as known when they are judged; a feature calls what it reads.

    Attributes:
        tokens: (...) int64 ids.
        before: gives (..., H), the draft's last hidden state from which the token was drawn. It has
            consumed all tokens before this one.
        after: gives (..., H), the draft's last hidden state after it consumed the token.
        distributions: gives (..., V), the distributions q that the tokens were drawn from.
        embeddings: gives (..., E), the draft's input embeddings of the tokens.
        position: gives (...), the place of the token in its draft, from 0.
        since_rejection: gives (...), tokens of the sequence since the last one that the target
            rejected and replaced, or since the completion began.
    """

    tokens: Tensor
    before: Callable[[], Tensor]
    after: Callable[[], Tensor]
    distributions: Callable[[], Tensor]
    embeddings: Callable[[], Tensor] = _not_known
    position: Callable[[], Tensor] = _not_known
    since_rejection: Callable[[], Tensor] = _not_known

    @cached_property
    def q(self) -> Tensor:
        """(..., V), the distributions; made once for all features."""
        return self.distributions()

    @cached_property
    def q_of_token(self) -> Tensor:
        """(..., 1) probability of the token itself."""
        return self.q.gather(-1, self.tokens.unsqueeze(-1))

    @cached_property
    def largest(self) -> Tensor:
        """(..., 2), logarithms of the two largest probabilities."""
        return self.q.topk(min(2, self.q.shape[-1]), dim=-1).values.log()


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a head can read.

    Attributes:
        compute: its value for each token, (...) or (..., size).
        point: from when on it is known.
        shape: "number" (...), or a vector as long as the draft's "hidden" states or "embedding".
    """

    compute: Callable[[DraftedTokens], Tensor]
    point: DecisionPoint = DecisionPoint.DRAWN
    shape: Literal["number", "hidden", "embedding"] = "number"


def _log_q(drafted: DraftedTokens) -> Tensor:
    return drafted.q_of_token.squeeze(-1).clamp(min=LEAST_CHANCE).log()


def _log_q_max(drafted: DraftedTokens) -> Tensor:
    return drafted.largest[..., 0]


def _margin(drafted: DraftedTokens) -> Tensor:
    largest = drafted.largest
    return (largest[..., 0] - largest[..., -1]).clamp(max=LARGEST_MARGIN)


def _entropy(drafted: DraftedTokens) -> Tensor:
    return entropy(drafted.q)


def _log_mass_above(drafted: DraftedTokens) -> Tensor:
    above = drafted.q.masked_fill(drafted.q <= drafted.q_of_token, 0.0).sum(dim=-1)
    return (above + LEAST_MASS).log()


FEATURES: dict[str, Feature] = {
    # (..., H), the last hidden state after the draft consumed the token: SpecDec++ (2405.19715).
    "hidden": Feature(lambda drafted: drafted.after(), DecisionPoint.CONSUMED, "hidden"),
    # (..., H), the last hidden state that gave the distribution.
    "hidden_before": Feature(lambda drafted: drafted.before(), DecisionPoint.BEFORE, "hidden"),
    # (..., E), the draft's input embedding of the token.
    "embedding": Feature(lambda drafted: drafted.embeddings(), DecisionPoint.DRAWN, "embedding"),
    # (...), natural logarithms throughout. log q of the token, and of the most probable one.
    "log_q": Feature(_log_q, DecisionPoint.DRAWN),
    "log_q_max": Feature(_log_q_max, DecisionPoint.BEFORE),
    # How much more probable the first token is than the second: their difference in logits.
    "margin": Feature(_margin, DecisionPoint.BEFORE),
    "entropy": Feature(_entropy, DecisionPoint.BEFORE),
    # Of the tokens that are more probable than this one.
    "log_mass_above": Feature(_log_mass_above, DecisionPoint.DRAWN),
    "position": Feature(lambda drafted: drafted.position(), DecisionPoint.BEFORE),
    "since_rejection": Feature(lambda drafted: drafted.since_rejection(), DecisionPoint.BEFORE),
}

NUMBERS = tuple(name for name, feature in FEATURES.items() if feature.shape == "number")


def first_point(reads: Sequence[str]) -> DecisionPoint:
    """When all of these features are known."""
    return max((FEATURES[name].point for name in reads), default=DecisionPoint.BEFORE)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The features of drafted tokens, by name; all have the same leading shape (...).

    Attributes:
        features: of those that the head reads, the ones that are known.
        point: what is known.
    """

    features: Mapping[str, Tensor]
    point: DecisionPoint = DecisionPoint.CONSUMED

    def __getitem__(self, name: str) -> Tensor:
        return self.features[name]

    @classmethod
    def of(
        cls, reads: Sequence[str], drafted: DraftedTokens, point: DecisionPoint | None = None
    ) -> HeadInputs:
        """Compute the features named in `reads` that are known at a decision point, and no other.

        Args:
            reads: names of the features.
            drafted: the tokens.
            point: what is known; by default what it takes to know all of them.
        """
        point = first_point(reads) if point is None else point
        known = [name for name in reads if FEATURES[name].point <= point]
        return cls({name: FEATURES[name].compute(drafted) for name in known}, point)

    @classmethod
    def from_batch(
        cls,
        reads: Sequence[str],
        *,
        input_ids: Tensor,
        states: Tensor,
        logits: Callable[[Tensor], Tensor],
        sampling: SamplingConfig,
        embeddings: Callable[[], Tensor] = _not_known,
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
            embeddings: gives (B, T, E), the draft's input embeddings; see `token_embeddings`.

        Returns:
            Features with the leading shape (B, T).

        Raises:
            ValueError: for a feature that sequences do not tell: places in a draft.
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
                embeddings=embeddings,
            ),
        )

    @classmethod
    def from_drawn(
        cls, reads: Sequence[str], drawn: DrawnToken, following: NextToken | None = None
    ) -> HeadInputs:
        """The inputs of a token of a draft under way, once it is drawn.

        Args:
            reads: names of the features. States must be captured for those that read them.
            drawn: the token.
            following: the token after it, drawn or about to be: then it has been consumed.

        Returns:
            Features with the leading shape (), at CONSUMED if `following` is known, else DRAWN.
        """
        after, point = _not_known, DecisionPoint.DRAWN
        if following is not None:
            after, point = partial(_captured, following), DecisionPoint.CONSUMED
        token = torch.as_tensor(drawn.token, device=drawn.distribution.device)
        known = _under_way(drawn, token, after=after, embed=drawn.embed)
        return cls.of(reads, known, point)

    @classmethod
    def from_next(cls, reads: Sequence[str], upcoming: NextToken) -> HeadInputs:
        """The inputs, at `DecisionPoint.BEFORE`, of the token that a draft is about to draw.

        Args:
            reads: names of the features; those that need the token are left out.
            upcoming: what is known of it.

        Returns:
            Features with the leading shape ().
        """
        nothing = torch.zeros((), dtype=torch.long, device=upcoming.distribution.device)
        return cls.of(reads, _under_way(upcoming, nothing), DecisionPoint.BEFORE)


def _under_way(
    judged: NextToken,
    token: Tensor,
    *,
    after: Callable[[], Tensor] = _not_known,
    embed: Callable[[Tensor], Tensor | None] = lambda ids: None,
) -> DraftedTokens:
    """One token of a draft under way; leading shape ()."""
    device = judged.distribution.device

    def embeddings() -> Tensor:
        if (found := embed(token)) is None:
            raise ValueError("the draft's input embeddings are needed and were not captured")
        return found

    return DraftedTokens(
        tokens=token,
        before=lambda: _captured(judged),
        after=after,
        distributions=lambda: judged.distribution,
        embeddings=embeddings,
        position=lambda: torch.tensor(judged.position, device=device),
        since_rejection=lambda: torch.tensor(judged.since_rejection, device=device),
    )


def logits_of_states(draft: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The map from a draft's last hidden states to its logits: (..., H) -> (..., V).

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


def token_embeddings(draft: PreTrainedModel, ids: Tensor) -> Tensor:
    """The draft's input embeddings of tokens: (...) ids -> (..., E), without a gradient.

    Ids that only the target has are replaced, as where the draft reads them (`known_ids`).
    """
    with torch.no_grad():
        embeddings: Tensor = token_embedding(draft)(known_ids(ids, draft))
    return embeddings


def _captured(drawn: NextToken) -> Tensor:
    if drawn.state is None:
        raise ValueError("the draft's hidden states are needed and were not captured")
    return drawn.state
