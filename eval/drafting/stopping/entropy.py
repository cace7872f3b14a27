"""Stop after a token that was drawn from an uncertain distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import ActiveRule, AdaptiveRule, DraftedToken, ShouldStop

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


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
        """Compare each token's distribution; nothing is remembered."""
        from specdata.probability import entropy

        def nats(distribution: Tensor, token: Tensor | int) -> Tensor:
            return entropy(distribution).view(1)

        def should_stop(drafted: DraftedToken) -> bool:
            return drafted.read(nats)[0] > self.threshold

        def begin() -> ShouldStop:
            return should_stop

        return ActiveRule(self.limit, begin, reads=nats)
