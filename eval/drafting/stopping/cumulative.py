"""Stop when the draft as a whole has become improbable."""

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

        def begin() -> ShouldStop:
            product = 1.0

            def should_stop(drafted: DraftedToken) -> bool:
                nonlocal product
                product *= drafted.read(chance)[0]
                return product < self.threshold

            return should_stop

        return ActiveRule(self.limit, begin, reads=chance)
