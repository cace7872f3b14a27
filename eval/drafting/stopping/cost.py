"""Stop when another token costs more than it is expected to save. Nothing to tune.

SpecDec++ (arXiv:2405.19715) bounds the optimal threshold (Theorem 4.3); this is the exact rule for
independent acceptances, with every quantity measured while decoding.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.calibration import CalibratedRule, Calibration, fit_calibration
from eval.drafting.stopping.rule import ActiveRule, DraftedToken, Family, ShouldStop

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from eval.rounds import Round
    from heads import BaseHead

MEAN_ACCEPTANCE = 0.8
"""Of a drafted token, before anything is known."""
PRIOR_TOKENS = 20
"""Drafted tokens that count as much as the first guess of the mean acceptance."""
DRAFT_SHARE = 0.3
"""A drafted token's cost in emitted tokens, before anything is measured."""
ROUNDS, TOKENS = 128, 512
"""What is remembered: the rounds that times, and the tokens that acceptance is measured over."""


class Cost(CalibratedRule):
    """End when one more drafted token is expected to cost more time than it saves.

    The acceptance of a drafted token is the head's probability, the bias of its training loss
    undone, once the draft has consumed the token; that of the newest one, and of all tokens
    without a head, comes from the logistic model. At least one token is drafted.

    There is no threshold. Costs that are not given are measured over the last rounds; with both
    given, decoding depends on its seed alone, otherwise on times and on earlier generations too.
    """

    name: ClassVar[str] = "cost"
    family: ClassVar[Family] = "cost"

    draft_seconds: float = Field(
        default=0.0, ge=0.0, description="cost of one more drafted token, in seconds; 0 measures it"
    )
    token_seconds: float = Field(
        default=0.0, ge=0.0, description="time of an emitted token, in seconds; 0 measures it"
    )
    mean_acceptance: float = Field(
        default=MEAN_ACCEPTANCE,
        gt=0.0,
        le=1.0,
        description="acceptance of a token not drawn yet; where a cost is measured, a first guess",
    )
    head: bool = Field(
        default=True, description="whether to ask the acceptance head, if there is one"
    )

    @property
    def reads_head(self) -> bool:
        """As it was told."""
        return self.head

    @property
    def measured(self) -> tuple[str, ...]:
        """Both costs, unless both are given."""
        given = self.draft_seconds and self.token_seconds
        return () if given else ("draft_seconds", "token_seconds")

    def reported(self) -> dict[str, Any]:
        """The parameters; whether a head was asked is seen from the head that results name."""
        return {name: value for name, value in super().reported().items() if name != "head"}

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """While another token pays, if both costs are given: measured ones change as it decodes."""
        from eval.drafting.stopping.recorded import until_head_survival_below, until_product_below

        if self.measured:
            return None
        least = self.draft_seconds / (self.token_seconds * self.mean_acceptance)
        newest = self.model.accept_all(tokens.q_max)
        if not self.head or tokens.head is None:
            return until_product_below(tokens, newest, least, limit=self.limit)
        return until_head_survival_below(
            tokens, least, limit=self.limit, calibrated=True, newest=newest
        )

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Begin with the given costs and first guesses."""
        if self.measured:
            # Imported here for the light start, and now so that no round is timed with it.
            import scipy.optimize
            import scipy.stats  # noqa: F401

        estimates = CostEstimates(
            self.model,
            head if self.head else None,
            draft_seconds=self.draft_seconds,
            token_seconds=self.token_seconds,
            mean_acceptance=self.mean_acceptance,
        )
        return ActiveRule(self.limit, estimates.begin, estimates.observe)


def worth_drafting(
    survival: float, *, mean_acceptance: float, token_seconds: float, draft_seconds: float
) -> bool:
    """Whether one more drafted token pays: lambda prod_{i<=k} a_i abar_{k+1} > t_d.

    One more token saves lambda, the time of an emitted token, if it and all before it are accepted,
    and costs t_d. With lambda the least reachable time per token this is the optimal rule for
    independent acceptances (`eval.analysis.optimal_stopping`); taking lambda from what the rule
    itself achieves is Dinkelbach's iteration, which converges to it.

    Args:
        survival: prod_{i<=k} a_i, that everything drafted so far is accepted.
        mean_acceptance: abar_{k+1}, of a token that is not drawn yet.
        token_seconds: lambda.
        draft_seconds: t_d.
    """
    return token_seconds * survival * mean_acceptance > draft_seconds


class CostEstimates:
    """The rule at work in one slot: asks `worth_drafting` after each token, and learns from rounds.

    If both costs are given, nothing is measured and generations do not influence each other.
    Otherwise the missing cost, the mean acceptance and the logistic model are measured over the
    last rounds, whatever sequence they belong to: t_d as what a round takes longer for one more
    drafted token (draft, target and stopping rule together), lambda as the time of these rounds per
    emitted token, prefills apart. Before the first measurement, and in batches, whose rounds have
    no times of their own, t_d is `DRAFT_SHARE` of lambda.

    Args:
        calibration: acceptance from max q; where something is measured, only the first guess.
        head: the acceptance head, if there is one.
        draft_seconds: t_d; 0 measures it.
        token_seconds: lambda; 0 measures it.
        mean_acceptance: abar; where something is measured, only the first guess.
    """

    def __init__(
        self,
        calibration: Calibration,
        head: BaseHead | None = None,
        *,
        draft_seconds: float = 0.0,
        token_seconds: float = 0.0,
        mean_acceptance: float = MEAN_ACCEPTANCE,
    ) -> None:
        self.calibration = self._first_calibration = calibration
        self.mean_acceptance = self._first_mean = mean_acceptance
        self._given = draft_seconds, token_seconds
        self.token_seconds = token_seconds or (draft_seconds or 1.0) / DRAFT_SHARE
        self.draft_seconds = draft_seconds or self.token_seconds * DRAFT_SHARE
        self._head = head
        self._round: list[float] = []
        self._rounds: deque[Round] = deque(maxlen=ROUNDS)
        self._tokens: deque[tuple[float, bool]] = deque(maxlen=TOKENS)
        self._observed = 0

    def begin(self) -> ShouldStop:
        """Start a round."""
        import torch

        from heads.inputs import HeadInputs

        seen: list[float] = []
        tokens: list[DraftedToken] = []
        self._round, head, known = seen, self._head, 1.0

        @torch.inference_mode()
        def should_stop(drafted: DraftedToken) -> bool:
            nonlocal known
            tokens.append(drafted)
            inputs = None if head is None else HeadInputs.from_drafted(head.reads, tokens)
            if head is not None and inputs is not None:
                known *= float(head.probability(inputs))
            seen.append(float(drafted.distribution.max()))
            newest = self.calibration.accept(seen[-1])
            if head is None:
                known *= newest
            return not self._pays(known if head is None else known * newest)

        return should_stop

    def _pays(self, survival: float) -> bool:
        return worth_drafting(
            survival,
            mean_acceptance=self.mean_acceptance,
            token_seconds=self.token_seconds,
            draft_seconds=self.draft_seconds,
        )

    def observe(self, record: Round) -> None:
        """Take a finished round into account; one without a draft changes nothing."""
        if all(self._given) or record.draft_forwards == 0:
            return
        self._rounds.append(record)
        # Known of the drafted tokens: those accepted, and the first one that was not.
        outcomes = ((q, position < record.accepted) for position, q in enumerate(self._round))
        self._tokens.extend(islice(outcomes, record.accepted + 1))
        self._observed += 1
        if self._observed in (4, 8) or self._observed % 16 == 0:
            self._measure_costs()
            self._measure_acceptance()

    def _measure_costs(self) -> None:
        from scipy.stats import theilslopes

        rounds = self._rounds
        drafted = np.array([r.drafted for r in rounds], dtype=np.float64)
        seconds = [r.draft_seconds + r.target_seconds + r.overhead_seconds for r in rounds]
        # Medians, because some rounds hold a prefill and any may be interrupted.
        forward = float(np.median([r.draft_seconds / r.draft_forwards for r in rounds]))
        slope = forward
        if len(rounds) >= 16 and np.ptp(drafted) >= 2:
            slope = max(float(theilslopes(seconds, drafted).slope), 0.5 * forward)
        rest = max(float(np.median(seconds - slope * drafted)), 0.0)
        emitted = sum(r.emitted for r in rounds)
        token = (rest * len(rounds) + slope * drafted.sum()) / emitted
        if slope > 0.0 and token > 0.0:
            self.draft_seconds = self._given[0] or slope
            self.token_seconds = self._given[1] or float(token)

    def _measure_acceptance(self) -> None:
        q_max, accepted = np.array(self._tokens, dtype=np.float64).reshape(-1, 2).T
        known = PRIOR_TOKENS * self._first_mean + accepted.sum()
        self.mean_acceptance = float(known / (PRIOR_TOKENS + len(accepted)))
        self.calibration = fit_calibration(accepted, q_max, self._first_calibration)
