"""The prefix acceptance that a head gives the draft under way: that all of it will be accepted.

The one place where a head's outputs become the prefix acceptance of a draft, while decoding and
along recorded rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.drafting.stopping.logistic import OnlineLogistic, sigmoid
from eval.drafting.stopping.rule import DraftedToken

if TYPE_CHECKING:
    from torch import Tensor

    from eval.rounds import Round
    from heads import BaseHead


class PrefixAcceptance:
    """The prefix acceptance of a draft in one slot: the product of its tokens' estimates.

    SpecDec++'s head judges a token once the next one is drawn, so the newest one is missing, or
    stands in from elsewhere.

    Args:
        head: the acceptance head, or what one says of recorded tokens (`RecordedHead`).
        calibrated: undo the bias of the loss that the head was trained with. SpecDec++'s own
            threshold is compared with the biased output.
        cumulative: whether it is of the whole draft, or of the newest judged token alone.
        refit: recalibrate while decoding: two coefficients, first (0, 1), turn the head's logit
            into odds, and every outcome that becomes known refits them.

    Attributes:
        model: these coefficients.
    """

    def __init__(
        self,
        head: BaseHead,
        *,
        calibrated: bool = True,
        cumulative: bool = True,
        refit: bool = False,
    ) -> None:
        self._head, self._judge, self._lag = head, head.judge(), head.lag
        self._bias = math.log(head.rejection_weight) if calibrated else 0.0
        self._cumulative, self._refit = cumulative, refit
        self.model = OnlineLogistic((0.0, 1.0))
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._drafted = 0
        self._product = 1.0
        self._logits: list[float] = []  # of the tokens that were judged, from the first on

    def logits_to_read(self, drafted: DraftedToken) -> Tensor:
        """(m,) the logits that `after` asks for, to be read with the token: see `ActiveRule`."""
        if self._drafted < self._lag:
            return drafted.distribution.new_zeros(0)
        return self._head.logit_on_device(drafted).view(1)

    def after(
        self,
        drafted: DraftedToken,
        newest: float = 1.0,
        answers: Sequence[float] | None = None,
    ) -> float:
        """Estimate that all tokens so far are accepted, once another one is drawn."""
        self._drafted += 1
        if self._drafted > self._lag:
            raw = self._judge.logit(drafted) if answers is None else answers[0]
            logit = raw + self._bias
            self._logits.append(logit)
            accept = self.model.accept(logit) if self._refit else sigmoid(logit)
            self._product = self._product * accept if self._cumulative else accept
        return self._product * newest if self._lag else self._product

    def observe(self, record: Round) -> None:
        """Learn from the finished round: its accepted tokens, and the first that was not."""
        if self._refit:
            for place, logit in enumerate(self._logits[: record.accepted + 1]):
                self.model.observe(logit, place < record.accepted)
