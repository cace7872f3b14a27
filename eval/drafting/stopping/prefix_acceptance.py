"""The prefix acceptance that a head gives the draft under way: that all of it will be accepted.

The one place where a head's outputs become the prefix acceptance of a draft while decoding. Along
recorded rollouts it is `eval.drafting.stopping.recorded.until_head_prefix_acceptance_below`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from eval.drafting.stopping.logistic import OnlineLogistic, sigmoid
from heads.inputs import DecisionPoint
from heads.judge import judge_of

if TYPE_CHECKING:
    from eval.drafting.stopping.rule import DraftedToken, UpcomingToken
    from eval.rounds import Round
    from heads import BaseHead
    from heads.inputs import DrawnToken, NextToken


class PrefixAcceptance:
    """The prefix acceptance of a draft in one slot: the product of each token's newest estimate.

    A head that judges tokens as they are drawn and again once the draft has consumed them gives two
    stages: the newest token counts as drawn, the older ones as consumed. SpecDec++'s head only
    judges consumed tokens, so the newest one is missing, or stands in from elsewhere.

    Args:
        head: the acceptance head.
        calibrated: undo the bias of the loss that the head was trained with. SpecDec++'s own
            threshold is compared with the biased output.
        refit: recalibrate while decoding: at each decision point two coefficients, first (0, 1),
            turn the head's logit into odds, and every outcome that becomes known refits them.
    """

    def __init__(self, head: BaseHead, *, calibrated: bool = True, refit: bool = False) -> None:
        self._judge, self._decision_points = judge_of(head), head.decision_points
        self._bias = math.log(head.rejection_weight) if calibrated else 0.0
        self._refit = refit
        self.models = {point: OnlineLogistic((0.0, 1.0)) for point in head.decision_points}
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._tokens: list[DraftedToken] = []
        # The product over tokens whose estimate is final, and how many those are.
        self._known, self._final = 1.0, 0
        self._expected: float | None = None  # of the next token, if that was asked
        # What was estimated: the decision point, the token's place in the draft, and the head's
        # logit.
        self._estimates: list[tuple[DecisionPoint, int, float]] = []

    def after(self, drafted: DraftedToken, newest: float = 1.0) -> float:
        """That all tokens drafted so far are accepted, once another one is drawn.

        Args:
            drafted: the token, in order.
            newest: the probability that it is accepted, if the head cannot judge it yet and was not
                asked before it was drawn.
        """
        decision_points = self._decision_points
        self._tokens.append(drafted)
        place = len(self._tokens) - 1
        if DecisionPoint.CONSUMED in decision_points and place > self._final:
            self._consume(drafted)
        if DecisionPoint.DRAWN in decision_points:
            logit = self._judge.newest([drafted], DecisionPoint.DRAWN)
            newest = self._estimate(DecisionPoint.DRAWN, place, logit)
        elif self._expected is not None:
            newest = self._expected
        self._expected = None
        if DecisionPoint.CONSUMED not in decision_points:
            self._known, self._final = self._known * newest, place + 1
            return self._known
        return self._known * newest

    def before(self, upcoming: UpcomingToken) -> float:
        """That they and the token that is about to be drawn are: the ex-ante prefix acceptance.

        Args:
            upcoming: what is known of the next token.
        """
        if DecisionPoint.CONSUMED in self._decision_points and self._tokens:
            self._consume(upcoming)
        logit = self._judge.upcoming(upcoming)
        self._expected = self._estimate(DecisionPoint.BEFORE, len(self._tokens), logit)
        return self._known * self._expected

    def observe(self, record: Round) -> None:
        """Learn from the finished round: its accepted tokens, and the first that was not."""
        if not self._refit:
            return
        for point, place, logit in self._estimates:
            if place < record.drafted and place <= record.accepted:
                self.models[point].observe(logit, place < record.accepted)

    def _consume(self, newest: NextToken) -> None:
        """Take the final estimate of the last token that the draft has consumed.

        Args:
            newest: the token after it, whose state is the draft's after consuming it.
        """
        judged = self._tokens[self._final]
        # Of the second, only the state is read.
        pair = [judged, cast("DrawnToken", newest)]
        logit = self._judge.newest(pair, DecisionPoint.CONSUMED)
        self._known *= self._estimate(DecisionPoint.CONSUMED, self._final, logit)
        self._final += 1

    def _estimate(self, point: DecisionPoint, place: int, raw: float | None) -> float:
        """The probability, by a raw logit, that a token is accepted, and note of it."""
        assert raw is not None
        logit = raw + self._bias
        if not self._refit:
            return sigmoid(logit)
        self._estimates.append((point, place, logit))
        return self.models[point].accept(logit)
