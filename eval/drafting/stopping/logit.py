"""Stop when a logistic model of the draft's confidence predicts a rejection."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.calibration import CalibratedRule
from eval.drafting.stopping.rule import ActiveRule, DraftedToken, ShouldStop, largest

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


class Logit(CalibratedRule):
    """End once the logistic model gives a rejection more probability than `threshold`.

    Stop when 1 - prod_i P_i > threshold with P_i = sigmoid(intercept + slope logit(max_x q_i(x))):
    the combination of SpecDec++ (arXiv:2405.19715) without its lag, because the distribution of
    the newest token is known. A lower threshold stops earlier: 1 never stops. The default is the
    head's, whose threshold has the same meaning. A one-hot distribution (temperature 0, top-k 1)
    tells nothing, so drafts then run to the limit.
    """

    name: ClassVar[str] = "logit"

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by max q",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """Until a rejection is too probable by the model."""
        from eval.drafting.stopping.recorded import until_product_below

        estimates = self.model.accept_all(tokens.q_max)
        return until_product_below(tokens, estimates, 1.0 - self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the modelled acceptance probabilities of a round's tokens."""
        model = self.model

        def begin() -> ShouldStop:
            survival = 1.0

            def should_stop(drafted: DraftedToken) -> bool:
                nonlocal survival
                survival *= model.accept(drafted.read(largest)[0])
                return 1.0 - survival > self.threshold

            return should_stop

        return ActiveRule(self.limit, begin, reads=largest)
