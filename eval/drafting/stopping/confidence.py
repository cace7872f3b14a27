"""Stop after a token that the draft itself found improbable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    DraftedToken,
    ShouldStop,
    chance,
)

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


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
        """Compare each token's own probability; nothing is remembered."""

        def should_stop(drafted: DraftedToken) -> bool:
            return drafted.read(chance)[0] < self.threshold

        def begin() -> ShouldStop:
            return should_stop

        return ActiveRule(self.limit, begin, reads=chance)
