"""When to stop drafting and let the target verify.

A rule is asked after each drawn token, which is kept whatever the answer: looking at a token and
then dropping it would bias the output. So every rule here is lossless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from eval.calibration import Calibration
from eval.metrics import Round
from heads import AcceptanceHead
from specdata.probability import entropy

MEAN_ACCEPTANCE = 0.8
"""Of a drafted token, before anything is known."""


@dataclass(frozen=True, slots=True)
class Step:
    """One drafted token.

    Args:
        token: its id.
        law: (V,) the law q that it was drawn from.
        state: (H,) the draft's state that gave this law: it has consumed the token before this
            one, which for the first drafted token is the last committed token.
    """

    token: int
    law: Tensor
    state: Tensor | None


Ask = Callable[[Step], bool]
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
    begin: Callable[[], Ask]
    observe: Callable[[Round], None] = lambda record: None


def fixed(limit: int) -> StoppingRule:
    """Always draft `limit` tokens (SpecDec with fixed K)."""
    return StoppingRule(limit, lambda: lambda step: False)


def confidence(threshold: float, *, limit: int) -> StoppingRule:
    """End with the first token that the draft gave less probability than `threshold`.

    The same rule as `assistant_confidence_threshold` of transformers.
    """
    return StoppingRule(limit, lambda: lambda step: float(step.law[step.token]) < threshold)


def entropy_above(threshold: float, *, limit: int) -> StoppingRule:
    """End with the first token whose law has more entropy than `threshold` nats."""
    return StoppingRule(limit, lambda: lambda step: float(entropy(step.law)) > threshold)


def cumulative(threshold: float, *, limit: int) -> StoppingRule:
    """End once the product of the draft's probabilities of its tokens is below `threshold`."""

    def begin() -> Ask:
        product = 1.0

        def stop(step: Step) -> bool:
            nonlocal product
            product *= float(step.law[step.token])
            return product < threshold

        return stop

    return StoppingRule(limit, begin)


def predicted_rejection(head: AcceptanceHead, threshold: float, *, limit: int) -> StoppingRule:
    """SpecDec++: end once the head believes that a rejection has happened.

    Huang et al. (arXiv:2405.19715), section 4.2: stop when 1 - prod_i sigmoid(f(e_i)) > threshold.
    e_i exists only after the draft has consumed token i, that is when token i + 1 has been drawn,
    so the newest token is sent unscored; it came for free.
    """

    def begin() -> Ask:
        survival, first = 1.0, True

        @torch.inference_mode()
        def stop(step: Step) -> bool:
            nonlocal survival, first
            if first:
                first = False
                return False
            assert step.state is not None
            survival *= float(torch.sigmoid(head(step.state)))
            return 1.0 - survival > threshold

        return stop

    return StoppingRule(limit, begin)


def calibrated(calibration: Calibration, threshold: float, *, limit: int) -> StoppingRule:
    """End once a logistic model of acceptance believes that a rejection has happened.

    Stop when 1 - prod_i P_i > threshold with P_i = sigmoid(intercept + slope logit(max_x q_i(x))):
    the combination of SpecDec++ without its lag, because the law of the newest token is known. A
    one-hot law (greedy, top-k 1) says nothing, so drafts then run to the limit.
    """

    def begin() -> Ask:
        survival = 1.0

        def stop(step: Step) -> bool:
            nonlocal survival
            survival *= calibration.accept(float(step.law.max()))
            return 1.0 - survival > threshold

        return stop

    return StoppingRule(limit, begin)


def worth_drafting(
    survival: float, *, mean_acceptance: float, token_seconds: float, draft_seconds: float
) -> bool:
    """Whether one more drafted token pays: lambda prod_{i<=k} a_i abar_{k+1} > t_d.

    One more token saves lambda, the time of an emitted token, if it and all before it are accepted,
    and costs one forward of the draft. With lambda the least reachable time per token this is the
    optimal rule for independent acceptances (`eval.optimal_stopping`); taking lambda from what the
    rule itself achieves is Dinkelbach's iteration, which gets there.

    Args:
        survival: prod_{i<=k} a_i, that everything drafted so far is accepted.
        mean_acceptance: abar_{k+1}, of a token that is not drawn yet.
        token_seconds: lambda.
        draft_seconds: t_d.
    """
    return token_seconds * survival * mean_acceptance > draft_seconds


class Prices:
    """What a drafted and an emitted token cost, measured over the last rounds or given.

    A forward of the draft costs the median over rounds, a round the median of the rest of it (so
    that prefills and hiccups do not count), and lambda is what the last rounds would have taken at
    these prices, per token they emitted. Until `WARM` rounds are measured, a forward of the draft
    is taken to cost `DRAFT_SHARE` of an emitted token.

    Args:
        draft_seconds: t_d; 0 measures it.
        token_seconds: lambda; 0 measures it. If both are given nothing is measured, and decoding
            depends on its seed alone.
        mean_acceptance: of a token that is not drawn yet; where something is measured, this weighs
            as `PRIOR_TOKENS` drafted tokens before the first one.
    """

    WINDOW = 128
    WARM = 3
    DRAFT_SHARE = 0.1
    PRIOR_TOKENS = 20

    def __init__(
        self,
        draft_seconds: float = 0.0,
        token_seconds: float = 0.0,
        mean_acceptance: float = MEAN_ACCEPTANCE,
    ) -> None:
        self._fixed = (draft_seconds, token_seconds)
        self._prior = mean_acceptance
        self._rounds: deque[Round] = deque(maxlen=self.WINDOW)
        self.mean_acceptance = mean_acceptance
        self.draft_seconds, self.token_seconds = draft_seconds, token_seconds
        self._fill()

    def observe(self, record: Round) -> None:
        """Take a finished round into account; one without a draft says nothing."""
        if all(self._fixed) or record.draft_forwards == 0:
            return
        self._rounds.append(record)
        rounds, (draft, token) = self._rounds, self._fixed
        if len(rounds) >= self.WARM:
            self.draft_seconds = draft or median(r.draft_seconds / r.draft_forwards for r in rounds)
            rest = median(r.target_seconds + r.overhead_seconds for r in rounds)
            spent = rest * len(rounds) + self.draft_seconds * sum(r.draft_forwards for r in rounds)
            self.token_seconds = token or spent / sum(r.emitted for r in rounds)
            self._fill()
        tried = sum(min(r.drafted, r.accepted + 1) for r in rounds) + self.PRIOR_TOKENS
        accepted = sum(r.accepted for r in rounds) + self.PRIOR_TOKENS * self._prior
        self.mean_acceptance = accepted / tried

    def _fill(self) -> None:
        """Put the default for what is not known yet."""
        if not self.draft_seconds and not self.token_seconds:
            self.token_seconds = 1.0
        self.draft_seconds = self.draft_seconds or self.DRAFT_SHARE * self.token_seconds
        self.token_seconds = self.token_seconds or self.draft_seconds / self.DRAFT_SHARE

    def pays(self, survival: float) -> bool:
        """Whether to draft another token; see `worth_drafting`."""
        return worth_drafting(
            survival,
            mean_acceptance=self.mean_acceptance,
            token_seconds=self.token_seconds,
            draft_seconds=self.draft_seconds,
        )


def worth_its_cost(
    prices: Prices, calibration: Calibration, head: AcceptanceHead | None, *, limit: int
) -> StoppingRule:
    """End once another token would cost more than it is expected to save; no threshold.

    The acceptance of a drafted token is the head's probability, the bias of its training loss
    undone, once the draft has consumed the token; that of the newest one, and of all without a
    head, comes from the calibrated logistic model. At least one token is drafted.
    """

    def begin() -> Ask:
        known, first = 1.0, True

        @torch.inference_mode()
        def stop(step: Step) -> bool:
            nonlocal known, first
            newest = calibration.accept(float(step.law.max()))
            if head is None:
                known *= newest
                return not prices.pays(known)
            if not first:
                assert step.state is not None
                known *= float(head.probability(step.state))
            first = False
            return not prices.pays(known * newest)

        return stop

    return StoppingRule(limit, begin, prices.observe)
