"""Rules with a threshold, for the draft's probabilities or a head's, and the fixed length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    DraftedToken,
    StoppingRule,
    ThresholdRule,
    chance,
    entropy_of,
)
from specdata.config import Few

if TYPE_CHECKING:
    from heads import BaseHead


class Fixed(StoppingRule):
    """Draft `length` tokens a round: speculative decoding with a fixed K.

    Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318). The one rule of
    drafts that branch: `length` is then that of each path, and a tree's depth is in its widths.
    """

    name: ClassVar[str] = "fixed"
    until: ClassVar[str] = "its length is reached"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"length": 2},)
    adaptive: ClassVar[bool] = False

    length: Few = Field(default=4, ge=1, description="tokens drafted a round, on each path")

    @property
    def longest(self) -> int:
        """The length itself."""
        return self.length

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Ask nothing of the tokens."""
        return ActiveRule(self.length)


class Confidence(AdaptiveRule):
    """End with the first token whose draft probability q(x) is below `threshold`.

    The rule of `assistant_confidence_threshold` in transformers, and its default of 0.4. A higher
    threshold stops earlier: 0 never stops, 1 stops after every token that was not certain. Tokens
    drawn at temperature 1 are often improbable and still accepted; lower thresholds than the
    default are then faster (the demo measures 0.1 and 0.4).
    """

    name: ClassVar[str] = "confidence"
    until: ClassVar[str] = "the draft's probability of a token is low"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"threshold": 0.5},)

    threshold: float = Field(
        default=0.4,
        ge=0.0,
        le=1.0,
        description="stop after the first token drafted with less probability",
    )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Compare each token's own probability."""
        return ThresholdRule(self.limit, chance, lambda value: value < self.threshold)


class Entropy(AdaptiveRule):
    """End with the first token whose distribution has an entropy above `threshold` nats.

    A lower threshold stops earlier: 0 stops after every token that was not certain, ln V never
    stops. The default of 1.5 nats is the uncertainty of an even choice among 4.5 tokens. Replayed
    on the held-out labels of the demo's pair it costs as much time a token as the confidence of 0.4
    at which transformers stops (0.526 target forwards, at the demo's measured times).
    """

    name: ClassVar[str] = "entropy"
    until: ClassVar[str] = "the draft's distribution is uncertain"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"threshold": 1.02},)

    threshold: float = Field(
        default=1.5,
        ge=0.0,
        description="stop after the first token drawn with more entropy, in nats",
    )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Compare the entropy of each token's distribution."""
        return ThresholdRule(self.limit, entropy_of, lambda value: value > self.threshold)


class Cumulative(AdaptiveRule):
    """End once the product of the draft's probabilities q(x_1) ... q(x_k) is below `threshold`.

    A higher threshold stops earlier: 0 never stops. The product falls with every token, so the
    threshold must lie below that of a single token: with the default of 0.3, one token of
    probability 0.29 ends a draft, and so do two of 0.54 or eight of 0.86. Replayed on the held-out
    labels of the demo's pair it costs as much time a token as a confidence of 0.3 to 0.4.
    """

    name: ClassVar[str] = "cumulative"
    until: ClassVar[str] = "the draft's probabilities multiply to little"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"threshold": 0.25},)

    threshold: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="stop once the product of the tokens' probabilities is less",
    )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the probabilities of a round's tokens."""
        return ThresholdRule(
            self.limit, chance, lambda value: value < self.threshold, multiplies=True
        )


class HeadThreshold(AdaptiveRule):
    """End once the head gives a rejection in this draft more probability than `threshold`.

    Huang et al. (SpecDec++, arXiv:2405.19715), section 4.3: stop when
    1 - prod_i sigmoid(f(e_i)) > threshold. Their e_i exists only after the draft has consumed token
    i, that is when token i + 1 has been drawn, so the newest token is sent unscored. Heads of other
    kinds judge the newest token as well. A lower threshold stops earlier: 1 never stops. The
    raw output of a head that was trained with a weight on rejections overstates them, and it is the
    raw output that is compared: the paper's best thresholds rise with that weight, from 0.3 for 1
    to 0.9 for 12 (appendix D.3). The default of 0.7 is the one for 6.
    """

    name: ClassVar[str] = "head"
    until: ClassVar[str] = "the acceptance head expects a rejection"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"threshold": 0.6},
        {"threshold": 0.4, "cumulative": False},
    )
    needs_head: ClassVar[bool] = True

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the head",
    )
    cumulative: bool = Field(
        default=True,
        description="a rejection anywhere in the draft; false: of the newest judged token, as "
        "llama.cpp has it",
    )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the head's acceptance probabilities of a round's tokens."""
        assert head is not None
        return _HeadModel(self, head)


class _HeadModel(ActiveRule):
    def __init__(self, rule: HeadThreshold, head: BaseHead) -> None:
        from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance

        self.prefix_acceptance = PrefixAcceptance(
            head, calibrated=False, cumulative=rule.cumulative
        )
        super().__init__(rule.limit, self.prefix_acceptance.logits_to_read)
        self.threshold = rule.threshold

    def begin(self) -> None:
        self.prefix_acceptance.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        return 1.0 - self.prefix_acceptance.after(drafted, 1.0, drafted.numbers) > self.threshold
