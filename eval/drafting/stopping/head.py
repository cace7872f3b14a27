"""Stop when an acceptance head predicts a rejection: SpecDec++, and ours without its lag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from eval.drafting.stopping.logistic import THRESHOLDS
from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    DraftedToken,
    UpcomingToken,
)
from specdata.errors import ConfigError

if TYPE_CHECKING:
    from heads import BaseHead


class Head(AdaptiveRule):
    """End once the head gives a rejection in this draft more probability than `threshold`.

    Huang et al. (SpecDec++, arXiv:2405.19715), section 4.2: stop when
    1 - prod_i sigmoid(f(e_i)) > threshold. Their e_i exists only after the draft has consumed token
    i, that is when token i + 1 has been drawn, so the newest token is sent unscored. A head of kind
    `immediate` judges the newest token as well, and may be asked before it is drawn. A lower
    threshold stops earlier: 1 never stops. The paper's best thresholds were 0.3 to 0.7; the
    default is 0.7, because the raw output of a head that was trained with a weight on rejections
    overstates them, and it is the raw output that is compared, as in the paper.
    """

    name: ClassVar[str] = "head"
    varies: ClassVar[str] = "threshold"
    grid: ClassVar[tuple[float, ...]] = THRESHOLDS
    symbol: ClassVar[str] = "h="
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"threshold": 0.6},)
    needs_head: ClassVar[bool] = True

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the head",
    )
    before_drawing: bool = Field(
        default=False,
        description="also ask before a token is drawn, by its distribution; needs a head of kind "
        "immediate that was trained for that decision point",
    )

    def check_head(self, head: BaseHead | None) -> None:
        """Raise ConfigError if it is asked at a decision point for which it was not trained."""
        if self.before_drawing:
            check_asked_before(head)
        elif head is not None and [point.name for point in head.decision_points] == ["BEFORE"]:
            raise ConfigError(
                "stop 'head' asks after a token is drawn, and this head was only trained to judge "
                "tokens before: set before_drawing, or train one for the point `drawn` as well"
            )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the head's acceptance probabilities of a round's tokens."""
        assert head is not None
        return _HeadModel(self, head)


class _HeadModel(ActiveRule):
    def __init__(self, rule: Head, head: BaseHead) -> None:
        from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance

        self.prefix_acceptance = PrefixAcceptance(head, calibrated=False)
        super().__init__(rule.limit, None if rule.before_drawing else self.prefix_acceptance.reads)
        self.threshold = rule.threshold
        self.asks_before = rule.before_drawing

    def begin(self) -> None:
        self.prefix_acceptance.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        return 1.0 - self.prefix_acceptance.after(drafted, 1.0, drafted.numbers) > self.threshold

    def should_stop_before(self, upcoming: UpcomingToken) -> bool:
        return 1.0 - self.prefix_acceptance.before(upcoming) > self.threshold


def check_asked_before(head: BaseHead | None) -> None:
    """Raise ConfigError unless there is a head that can judge a token before it is drawn."""
    if head is None:
        raise ConfigError("before_drawing asks an acceptance head, and there is none: leave it out")
    from heads.inputs import DecisionPoint

    if DecisionPoint.BEFORE not in head.decision_points:
        knows = ", ".join(point.name.lower() for point in head.decision_points)
        raise ConfigError(
            "before_drawing needs a head that was trained to judge tokens before they are drawn "
            f"(kind immediate, decision_points with `before`); this one judges them {knows}: leave "
            "before_drawing out, or train such a head"
        )
