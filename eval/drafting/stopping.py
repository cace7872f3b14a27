"""When to stop drafting and let the target verify.

A rule is asked after each drawn token, which is kept whatever the answer: looking at a token and
then dropping it would bias the output. So every rule here is lossless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.drafting.calibration import Calibration
from eval.rounds import Round
from heads import AcceptanceHead
from heads.inputs import HeadInputs
from specdata.probability import entropy


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One drafted token.

    Args:
        token: its id.
        distribution: (V,) the distribution q that it was drawn from.
        state: (H,) the draft's state that gave this distribution: it has consumed the token before this
            one, which for the first drafted token is the last committed token.
    """

    token: int
    distribution: Tensor
    state: Tensor | None


ShouldStop = Callable[[DraftedToken], bool]
"""Shown each drafted token of one round; True ends the draft with that token."""


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """A rule and its hard cap.

    Args:
        limit: most tokens drafted in a round.
        begin: starts a round.
        observe: shown each finished round.
    """

    limit: int
    begin: Callable[[], ShouldStop]
    observe: Callable[[Round], None] = lambda record: None


def fixed(limit: int) -> StoppingRule:
    """Always draft `limit` tokens (SpecDec with fixed K)."""
    return StoppingRule(limit, lambda: lambda step: False)


def confidence(threshold: float, *, limit: int) -> StoppingRule:
    """End with the first token that the draft gave less probability than `threshold`.

    The same rule as `assistant_confidence_threshold` of transformers.
    """
    return StoppingRule(
        limit, lambda: lambda step: float(step.distribution[step.token]) < threshold
    )


def entropy_above(threshold: float, *, limit: int) -> StoppingRule:
    """End with the first token whose distribution has more entropy than `threshold` nats."""
    return StoppingRule(limit, lambda: lambda step: float(entropy(step.distribution)) > threshold)


def cumulative(threshold: float, *, limit: int) -> StoppingRule:
    """End once the product of the draft's probabilities of its tokens is below `threshold`."""

    def begin() -> ShouldStop:
        product = 1.0

        def stop(step: DraftedToken) -> bool:
            nonlocal product
            product *= float(step.distribution[step.token])
            return product < threshold

        return stop

    return StoppingRule(limit, begin)


def predicted_rejection(head: AcceptanceHead, threshold: float, *, limit: int) -> StoppingRule:
    """SpecDec++: end once the head believes that a rejection has happened.

    Huang et al. (arXiv:2405.19715), section 4.2: stop when 1 - prod_i sigmoid(f(e_i)) > threshold.
    e_i exists only after the draft has consumed token i, that is when token i + 1 has been drawn,
    so the newest token is sent unscored; it came for free.
    """

    def begin() -> ShouldStop:
        survival, drafted = 1.0, list[DraftedToken]()

        @torch.inference_mode()
        def stop(step: DraftedToken) -> bool:
            nonlocal survival
            drafted.append(step)
            inputs = HeadInputs.from_drafted(head.reads, drafted)
            if inputs is None:
                return False
            survival *= float(torch.sigmoid(head.logits(inputs)))
            return 1.0 - survival > threshold

        return stop

    return StoppingRule(limit, begin)


def calibrated(calibration: Calibration, threshold: float, *, limit: int) -> StoppingRule:
    """End once a logistic model of acceptance believes that a rejection has happened.

    Stop when 1 - prod_i P_i > threshold with P_i = sigmoid(intercept + slope logit(max_x q_i(x))):
    the combination of SpecDec++ without its lag, because the distribution of the newest token is known. A
    one-hot distribution (greedy, top-k 1) says nothing, so drafts then run to the limit.
    """

    def begin() -> ShouldStop:
        survival = 1.0

        def stop(step: DraftedToken) -> bool:
            nonlocal survival
            survival *= calibration.accept(float(step.distribution.max()))
            return 1.0 - survival > threshold

        return stop

    return StoppingRule(limit, begin)
