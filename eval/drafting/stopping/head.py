"""Stop when an acceptance head predicts a rejection: SpecDec++, and ours without its lag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from eval.drafting.stopping.drafted import DraftedToken
from eval.drafting.stopping.logistic import THRESHOLDS
from eval.drafting.stopping.rule import ActiveRule, AdaptiveRule

if TYPE_CHECKING:
    from heads import BaseHead


class Head(AdaptiveRule):
    """End once the head gives a rejection in this draft more probability than `threshold`.

    Huang et al. (SpecDec++, arXiv:2405.19715), section 4.3: stop when
    1 - prod_i sigmoid(f(e_i)) > threshold. Their e_i exists only after the draft has consumed token
    i, that is when token i + 1 has been drawn, so the newest token is sent unscored. A head of kind
    `immediate` judges the newest token as well. A lower threshold stops earlier: 1 never stops. The
    raw output of a head that was trained with a weight on rejections overstates them, and it is the
    raw output that is compared: the paper's best thresholds rise with that weight, from 0.3 for 1
    to 0.9 for 12 (appendix D.3). The default of 0.7 is the one for 6.
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

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the head's acceptance probabilities of a round's tokens."""
        assert head is not None
        return _HeadModel(self, head)


class _HeadModel(ActiveRule):
    def __init__(self, rule: Head, head: BaseHead) -> None:
        from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance

        self.prefix_acceptance = PrefixAcceptance(head, calibrated=False)
        super().__init__(rule.limit, self.prefix_acceptance.reads)
        self.threshold = rule.threshold

    def begin(self) -> None:
        self.prefix_acceptance.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        return 1.0 - self.prefix_acceptance.after(drafted, 1.0, drafted.numbers) > self.threshold
