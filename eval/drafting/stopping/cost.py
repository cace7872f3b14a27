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

from eval.drafting.stopping.logistic import CalibratedRule, OnlineLogistic, odds_of
from eval.drafting.stopping.rule import ActiveRule, DraftedToken, largest

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance
    from eval.rounds import Round
    from heads import BaseHead

MEAN_ACCEPTANCE = 0.8
"""Acceptance probability of a drafted token before anything is known."""
PRIOR_TOKENS = 20
"""Drafted tokens that count as much as the first guess of the mean acceptance."""
DRAFT_SHARE = 0.3
"""A drafted token's cost in emitted tokens, before anything is measured."""
LAST_ROUNDS, LAST_TOKENS = 128, 512
"""The window: the rounds that times, and the tokens that acceptance is measured over."""


class Cost(CalibratedRule):
    """End when one more drafted token is expected to cost more time than it saves.

    The prefix acceptance of the draft is the head's, calibrated: the bias of its training loss
    undone. A token that it cannot judge yet, and every token without a head, is judged by the
    logistic model. At least one token is drafted.

    There is no threshold. A cost that is not given is measured over the last rounds by the clock,
    and then the head's odds and the logistic model are recalibrated by what was accepted as well,
    because a rule is as good as its probabilities. With both given nothing is learned, and the seed
    alone decides.
    """

    name: ClassVar[str] = "cost"
    until: ClassVar[str] = "another token would cost more time than it is expected to save"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"draft_seconds": 0.25, "token_seconds": 1.0},
        {"draft_seconds": 0.3},
    )

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
        """True unless it was told to ask none."""
        return self.head

    @property
    def measured(self) -> tuple[str, ...]:
        """Both costs, unless both are given."""
        given = self.draft_seconds and self.token_seconds
        return () if given else ("draft_seconds", "token_seconds")

    def reported(self) -> dict[str, Any]:
        """The parameters; whether a head was asked is seen from the head that results name."""
        return {name: value for name, value in super().reported().items() if name != "head"}

    def start(self, head: BaseHead | None) -> CostEstimates:
        """Begin with the given costs and first guesses."""
        return CostEstimates(self, head if self.head else None)


def gain(
    prefix_acceptance: float, *, mean_acceptance: float, token_seconds: float, draft_seconds: float
) -> float:
    """The expected saving of one more drafted token: lambda prod_{i<=k} a_i abar_{k+1} - t_d.

    One more token saves lambda, the time of an emitted token (`token_seconds`), if it and all
    before it are accepted, and costs t_d (`draft_seconds`). With lambda the least reachable time
    per token this is the optimal rule for independent acceptances
    (`tests/support/optimal_stopping.py`); taking lambda from what the rule itself achieves is
    Dinkelbach's iteration, which converges to it.
    """
    return token_seconds * prefix_acceptance * mean_acceptance - draft_seconds


class CostEstimates(ActiveRule):
    """The rule at work in one slot: asks for the `gain` after each token, and learns from rounds.

    If t_d and lambda are given, nothing is measured and generations do not influence each other.
    Otherwise what is missing, the mean acceptance and the models of acceptance are measured over
    the last rounds, whatever sequence they belong to: t_d as what a round takes longer for one more
    drafted token (draft, target and stopping rule together), lambda as the time of these rounds per
    emitted token, prefills apart. Before the first measurement, and in batches, whose rounds have
    no times of their own, t_d is `DRAFT_SHARE` of lambda.
    """

    def __init__(self, rule: Cost, head: BaseHead | None = None) -> None:
        super().__init__(rule.limit, largest)
        self._rule = rule
        self._learns = bool(rule.measured)
        self.mean_acceptance = rule.mean_acceptance
        self.token_seconds = rule.token_seconds or (rule.draft_seconds or 1.0) / DRAFT_SHARE
        self.draft_seconds = rule.draft_seconds or self.token_seconds * DRAFT_SHARE
        model = rule.model
        self.newest = OnlineLogistic((model.intercept, model.slope))
        self._prefix_acceptance: PrefixAcceptance | None = None
        if head is not None:
            from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance

            self._prefix_acceptance = PrefixAcceptance(head, refit=self._learns)
            self.number_reader = self._numbers
        self._round: list[float] = []  # of each token, what the logistic model reads
        self._product = 1.0
        self._rounds: deque[Round] = deque(maxlen=LAST_ROUNDS)
        self._accepted: deque[bool] = deque(maxlen=LAST_TOKENS)
        self._observed = 0

    def begin(self) -> None:
        """Start a round."""
        self._round, self._product = [], 1.0
        if self._prefix_acceptance is not None:
            self._prefix_acceptance.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        """True if the next token is expected to cost more than it saves."""
        q_max, *answers = drafted.read(largest)
        self._round.append(odds_of(q_max))
        newest = self.newest.accept(self._round[-1])
        self._product *= newest
        prefix_acceptance = self._prefix_acceptance
        alive = self._product
        if prefix_acceptance is not None:
            was_read = drafted.numbers is not None
            alive = prefix_acceptance.after(drafted, newest, answers if was_read else None)
        expected = gain(
            alive,
            mean_acceptance=self.mean_acceptance,
            token_seconds=self.token_seconds,
            draft_seconds=self.draft_seconds,
        )
        return expected <= 0.0

    def _numbers(self, drafted: DraftedToken) -> Tensor:
        """The largest probability, and what is asked of the head."""
        import torch

        assert self._prefix_acceptance is not None
        return torch.cat([largest(drafted), self._prefix_acceptance.logits_to_read(drafted)])

    def observe(self, record: Round) -> None:
        """Take a finished round into account; one without a draft changes nothing."""
        if not self._learns or record.draft_forwards == 0:
            return
        self._rounds.append(record)
        # Known of the drafted tokens: those accepted, and the first one that was not.
        for place, odds in enumerate(islice(self._round, record.accepted + 1)):
            self._accepted.append(place < record.accepted)
            self.newest.observe(odds, place < record.accepted)
        if self._prefix_acceptance is not None:
            self._prefix_acceptance.observe(record)
        self._observed += 1
        # It takes a millisecond or three: every 16 rounds that was 1 % of the demo's time.
        if self._observed in (4, 8, 16, 32) or self._observed % 64 == 0:
            self._measure_costs()
            accepted = PRIOR_TOKENS * self._rule.mean_acceptance + sum(self._accepted)
            self.mean_acceptance = accepted / (PRIOR_TOKENS + len(self._accepted))

    def _measure_costs(self) -> None:
        rounds, rule = self._rounds, self._rule
        emitted = sum(r.emitted for r in rounds)
        drafted = np.array([r.drafted for r in rounds], dtype=np.float64)
        seconds = np.array(
            [r.target_seconds + r.overhead_seconds + r.draft_seconds for r in rounds]
        )
        # Medians, because some rounds hold a prefill and any may be interrupted. One forward may
        # give several tokens.
        shares = [r.draft_seconds / max(r.draft_forwards, r.drafted) for r in rounds]
        forward = float(np.median(shares))
        slope = forward
        if len(rounds) >= 16 and np.ptp(drafted) >= 2:
            # The increase by one more drafted token, robustly (Theil and Sen).
            more = drafted[:, None] - drafted
            slopes = (seconds[:, None] - seconds)[more > 0] / more[more > 0]
            slope = max(float(np.median(slopes)), 0.5 * forward)
        rest = max(float(np.median(seconds - slope * drafted)), 0.0)
        token = (rest * len(rounds) + slope * drafted.sum()) / emitted
        if slope > 0.0 and token > 0.0:
            self.draft_seconds = rule.draft_seconds or slope
            self.token_seconds = rule.token_seconds or float(token)
