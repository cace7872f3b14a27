"""The prefix acceptance that a head gives the draft under way: that all of it will be accepted.

The one place where a head's outputs become the prefix acceptance of a draft, while decoding and
along recorded rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from eval.drafting.stopping.logistic import OnlineLogistic, sigmoid
from eval.drafting.stopping.recorded import RecordedHead
from eval.drafting.stopping.rule import DraftedToken
from heads.inputs import DecisionPoint
from heads.judge import Judge, TorchJudge, judge_of

if TYPE_CHECKING:
    from torch import Tensor

    from eval.drafting.stopping.rule import UpcomingToken
    from eval.rounds import Round
    from heads import BaseHead
    from heads.inputs import NextToken


class PrefixAcceptance:
    """The prefix acceptance of a draft in one slot: the product of each token's newest estimate.

    A head that judges tokens as they are drawn and again once the draft has consumed them gives two
    stages: the newest token counts as drawn, the older ones as consumed. SpecDec++'s head only
    judges consumed tokens, so the newest one is missing, or stands in from elsewhere.

    Args:
        head: the acceptance head, or what one says of recorded tokens.
        calibrated: undo the bias of the loss that the head was trained with. SpecDec++'s own
            threshold is compared with the biased output.
        refit: recalibrate while decoding: at each decision point two coefficients, first (0, 1),
            turn the head's logit into odds, and every outcome that becomes known refits them.
    """

    def __init__(
        self, head: BaseHead | RecordedHead, *, calibrated: bool = True, refit: bool = False
    ) -> None:
        if isinstance(head, RecordedHead):
            self._judge = cast(Judge, head)
        else:
            self._judge, self._on_device = judge_of(head), TorchJudge(head)
        points = head.decision_points
        self._drawn, self._consumed = (
            point in points for point in (DecisionPoint.DRAWN, DecisionPoint.CONSUMED)
        )
        self._bias = math.log(head.rejection_weight) if calibrated else 0.0
        self._refit = refit
        # Nothing but the newest token is to be known.
        self._once = points == (DecisionPoint.DRAWN,) and not refit
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

    def reads(self, upcoming: UpcomingToken | DraftedToken, token: Tensor | int) -> Tensor:
        """(m,) the logits that `after` asks for, to be read with the token: see `ActiveRule`."""
        asked = []
        if self._consumed and self._tokens:
            asked.append(self._on_device.consumed_logit(self._tokens[-1], upcoming))
        if self._drawn:
            id_ = cast(int, torch.as_tensor(token).view(()))  # it stays on the device
            known = upcoming.state, upcoming.embed, upcoming.position, upcoming.since_rejection
            drawn = DraftedToken(id_, upcoming.distribution, *known)
            asked.append(self._on_device.drawn_logit(drawn))
        return torch.stack(asked) if asked else upcoming.distribution.new_zeros(0)

    def after(
        self,
        drafted: DraftedToken,
        newest: float = 1.0,
        answers: Sequence[float] | None = None,
    ) -> float:
        """That all tokens drafted so far are accepted, once another one is drawn.

        Args:
            drafted: the token, in order.
            newest: the probability that it is accepted, if the head cannot judge it yet and was not
                asked before it was drawn.
            answers: the logits that `reads` gave, if they were read with the token.
        """
        if self._once and answers is None:
            self._known *= sigmoid(self._judge.drawn(drafted) + self._bias)
            return self._known
        read = None if answers is None else iter(answers)
        self._tokens.append(drafted)
        place = len(self._tokens) - 1
        if self._consumed and place > self._final:
            self._consume(drafted, read)
        if self._drawn:
            logit = self._judge.drawn(drafted) if read is None else next(read)
            newest = self._estimate(DecisionPoint.DRAWN, place, logit)
        elif self._expected is not None:
            newest = self._expected
        self._expected = None
        if not self._consumed:
            self._known, self._final = self._known * newest, place + 1
            return self._known
        return self._known * newest

    def before(self, upcoming: UpcomingToken) -> float:
        """That they and the token that is about to be drawn are: the ex-ante prefix acceptance.

        Args:
            upcoming: what is known of the next token.
        """
        if self._consumed and self._tokens:
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

    def _consume(self, newest: NextToken, read: Iterator[float] | None = None) -> None:
        """Take the final estimate of the last token that the draft has consumed.

        Args:
            newest: the token after it, whose state is the draft's after consuming it.
            read: gives the logit, if it was read already.
        """
        judged = self._tokens[self._final]
        logit = self._judge.consumed(judged, newest) if read is None else next(read)
        self._known *= self._estimate(DecisionPoint.CONSUMED, self._final, logit)
        self._final += 1

    def _estimate(self, point: DecisionPoint, place: int, raw: float) -> float:
        """The probability, by a raw logit, that a token is accepted, and note of it."""
        logit = raw + self._bias
        if not self._refit:
            return sigmoid(logit)
        self._estimates.append((point, place, logit))
        return self.models[point].accept(logit)
