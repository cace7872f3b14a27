"""Rules that compare the draft's own probabilities with a threshold, and the fixed length."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    DraftedToken,
    Family,
    StoppingRule,
    UpcomingToken,
    chance,
)

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


class Fixed(StoppingRule):
    """Draft `length` tokens a round: speculative decoding with a fixed K.

    Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318). The one rule of
    drafts that branch: `length` is then that of each path, and a tree's depth is in its widths.
    """

    name: ClassVar[str] = "fixed"
    adaptive: ClassVar[bool] = False
    family: ClassVar[Family] = "fixed"

    length: int = Field(default=4, ge=1, description="tokens drafted a round, on each path")

    @property
    def longest(self) -> int:
        """The length itself."""
        return self.length

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """The length, or what is left."""
        from eval.drafting.stopping.recorded import constant_length

        return constant_length(tokens, self.length)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Nothing is asked of the tokens."""
        return ActiveRule(self.length)


class Confidence(AdaptiveRule):
    """End with the first token whose draft probability q(x) is below `threshold`.

    The rule of `assistant_confidence_threshold` in transformers, and its default of 0.4. A higher
    threshold stops earlier: 0 never stops, 1 stops after every token that was not certain. Tokens
    drawn at temperature 1 are often improbable and still accepted; lower thresholds than the
    default are then faster (the demo measures 0.1 and 0.4).
    """

    name: ClassVar[str] = "confidence"

    threshold: float = Field(
        default=0.4,
        ge=0.0,
        le=1.0,
        description="stop after the first token drafted with less probability",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """Up to the first improbable token."""
        from eval.drafting.stopping.recorded import until_marked

        return until_marked(tokens, tokens.q < self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Compare each token's own probability."""
        return _Improbable(self.limit, self.threshold)


class _Improbable(ActiveRule):
    def __init__(self, longest: int, threshold: float) -> None:
        super().__init__(longest, chance)
        self.threshold = threshold

    def should_stop(self, drafted: DraftedToken) -> bool:
        return drafted.read(chance)[0] < self.threshold


class Entropy(AdaptiveRule):
    """End with the first token whose distribution has an entropy above `threshold` nats.

    A lower threshold stops earlier: 0 stops after every token that was not certain, ln V never
    stops. The default of 1.5 nats is the uncertainty of an even choice among 4.5 tokens. Replayed
    on the held-out labels of the demo's pair it costs as much time a token as the confidence of 0.4
    at which transformers stops (0.526 target forwards, at the demo's measured times).
    """

    name: ClassVar[str] = "entropy"

    threshold: float = Field(
        default=1.5,
        ge=0.0,
        description="stop after the first token drawn with more entropy, in nats",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """Up to the first uncertain token, if entropies were recorded."""
        from eval.drafting.stopping.recorded import until_marked

        if tokens.entropy is None:
            return None
        return until_marked(tokens, tokens.entropy > self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Compare the entropy of each token's distribution."""
        return _Uncertain(self.limit, self.threshold)


class _Uncertain(ActiveRule):
    def __init__(self, longest: int, threshold: float) -> None:
        super().__init__(longest, _nats)
        self.threshold = threshold

    def should_stop(self, drafted: DraftedToken) -> bool:
        return drafted.read(_nats)[0] > self.threshold


def _nats(known: UpcomingToken | DraftedToken, _token: Tensor | int) -> Tensor:
    """(1,) the entropy of the distribution."""
    from specdata.probability import entropy

    return entropy(known.distribution).view(1)


class Cumulative(AdaptiveRule):
    """End once the product of the draft's probabilities q(x_1) ... q(x_k) is below `threshold`.

    A higher threshold stops earlier: 0 never stops. The product falls with every token, so the
    threshold must lie below that of a single token: with the default of 0.3, one token of
    probability 0.29 ends a draft, and so do two of 0.54 or eight of 0.86. Replayed on the held-out
    labels of the demo's pair it costs as much time a token as a confidence of 0.3 to 0.4.
    """

    name: ClassVar[str] = "cumulative"

    threshold: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="stop once the product of the tokens' probabilities is less",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """Until the product of the probabilities is too small."""
        from eval.drafting.stopping.recorded import until_product_below

        return until_product_below(tokens, tokens.q, self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the probabilities of a round's tokens."""
        return _ImprobableDraft(self.limit, self.threshold)


class _ImprobableDraft(ActiveRule):
    def __init__(self, longest: int, threshold: float) -> None:
        super().__init__(longest, chance)
        self.threshold = threshold
        self.product = 1.0

    def begin(self) -> None:
        self.product = 1.0

    def should_stop(self, drafted: DraftedToken) -> bool:
        self.product *= drafted.read(chance)[0]
        return self.product < self.threshold
