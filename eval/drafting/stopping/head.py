"""Stop when an acceptance head predicts a rejection: SpecDec++."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import ActiveRule, AdaptiveRule, DraftedToken, Family, ShouldStop

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


class Head(AdaptiveRule):
    """End once the head gives a rejection in this draft more probability than `threshold`.

    Huang et al. (SpecDec++, arXiv:2405.19715), section 4.2: stop when
    1 - prod_i sigmoid(f(e_i)) > threshold. e_i exists only after the draft has consumed token i,
    that is when token i + 1 has been drawn, so the newest token is sent unscored. A lower
    threshold stops earlier: 1 never stops. The paper's best thresholds were 0.3 to 0.7; the
    default is 0.7, because the raw output of a head that was trained with a weight on rejections
    overstates them.
    """

    name: ClassVar[str] = "head"
    needs_head: ClassVar[bool] = True
    family: ClassVar[Family] = "head"

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the head",
    )

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """Until a rejection is too probable by the head's raw output."""
        from eval.drafting.stopping.recorded import until_head_survival_below

        return until_head_survival_below(
            tokens, 1.0 - self.threshold, limit=self.limit, calibrated=False
        )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the head's acceptance probabilities of a round's tokens."""
        import torch

        from heads.inputs import HeadInputs

        assert head is not None

        def begin() -> ShouldStop:
            survival, tokens = 1.0, list[DraftedToken]()

            @torch.inference_mode()
            def should_stop(drafted: DraftedToken) -> bool:
                nonlocal survival
                tokens.append(drafted)
                inputs = HeadInputs.from_drafted(head.reads, tokens)
                if inputs is None:
                    return False
                survival *= float(torch.sigmoid(head.logits(inputs)))
                return 1.0 - survival > self.threshold

            return should_stop

        return ActiveRule(self.limit, begin)
