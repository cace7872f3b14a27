"""Stop when a logistic model of the draft's top-2 margin predicts a rejection.

The rival without training that serving engines have: vLLM's adaptive verification trims drafts by
a logistic model of the margin for each position, which it goes on fitting while it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from eval.drafting.stopping.calibration import fit_logistic
from eval.drafting.stopping.online import OnlineLogistic, Pair
from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    DraftedToken,
    ShouldStop,
    features,
    ignore,
)

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, Reals, RecordedTokens
    from eval.rounds import Round
    from heads import BaseHead

POSITIONS = 20
"""Positions in a draft that have a model of their own; further ones share that of the last."""
UNFITTED: Pair = (-0.2, 0.6)
"""A guess for a draft that nothing is known of: P = .45 for a tie, .95 for odds of 200 to 1."""


class Margin(AdaptiveRule):
    """End once the models of the margin give a rejection more probability than `threshold`.

    Stop when 1 - prod_k P_k > threshold with P_k = sigmoid(intercept_k + slope_k m_k), where m_k is
    the top-2 margin, log max q - log of the second largest probability of the distribution that
    the k-th token of the draft was drawn from, at most 30. An evaluation fits the pairs on the
    run's labels; while decoding, every outcome that becomes known refits the pair of its position
    (`OnlineLogistic`). Known are the accepted tokens and the first one that was not: those behind
    it are censored. With a verifier that accepts whole blocks, a token counts as accepted if it
    was kept, so the models learn the survival of positions under that verifier.

    A lower threshold stops earlier: 1 never stops.
    """

    name: ClassVar[str] = "margin"
    fitted: ClassVar[tuple[str, ...]] = ("coefficients",)

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the top-2 margin",
    )
    coefficients: tuple[Pair, ...] | None = Field(
        default=None,
        min_length=1,
        description="intercept and slope for each position of a draft, the last for all further "
        "ones; an evaluation fits them on the run's labels unless they are given",
    )
    refit: bool = Field(
        default=True,
        description="go on learning from what was accepted while decoding; false: what was decoded "
        "before changes nothing",
    )

    @classmethod
    def fit(cls, tokens: RecordedTokens, accept: Reals) -> dict[str, Any]:
        """A pair for each position k of a draft, from the expected outcomes of all rollouts.

        A draft is taken to start at every position of a rollout; a token is then seen at place k
        with the probability that the k tokens before it were accepted, which is its weight. Places
        that are hardly ever reached keep the coefficients of all positions together.
        """
        if tokens.margin is None:
            raise ValueError("the margins of the drafted tokens are needed and were not recorded")
        inside = tokens.inside
        chances, margins = accept[inside], tokens.margin[inside]
        pooled = fit_logistic(chances, margins, prior=UNFITTED)
        weights, pairs = np.where(inside, 1.0, 0.0), list[Pair]()
        for _ in range(min(POSITIONS, accept.shape[1])):
            pairs.append(fit_logistic(chances, margins, prior=pooled, weights=weights[inside]))
            weights = np.where(inside, np.pad((weights * accept)[:, :-1], ((0, 0), (1, 0))), 0.0)
        return {"coefficients": pairs}

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The coefficients that it starts with."""
        return self.coefficients or (UNFITTED,)

    def reported(self) -> dict[str, Any]:
        """The parameters, with the coefficients that it started with."""
        return {**super().reported(), "coefficients": [list(pair) for pair in self.pairs]}

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """Until a rejection is too probable by the fitted pairs, which stay as they are."""
        from scipy.special import expit

        from eval.drafting.stopping.recorded import until_product_below

        if tokens.margin is None:
            return None
        intercepts, slopes = np.array(self.pairs).T[:, :, None, None]
        estimates = expit(intercepts + slopes * tokens.margin)
        return until_product_below(tokens, estimates, 1.0 - self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the modelled acceptance probabilities of a round's tokens."""
        models = MarginModels(self.pairs, self.threshold)
        observe = models.observe if self.refit else ignore
        return ActiveRule(self.limit, models.begin, observe, reads=models.reads)


class MarginModels:
    """The rule at work in one slot: a model for each position, and the round that goes on.

    Args:
        pairs: the coefficients to begin with.
        threshold: largest probability of a rejection with which a draft goes on.

    Attributes:
        models: as they are now.
        reads: gives the margin.
    """

    def __init__(self, pairs: Sequence[Pair], threshold: float) -> None:
        self.models = [OnlineLogistic(pair) for pair in pairs]
        self._threshold = threshold
        self.reads = features(("margin",))
        self._margins: list[float] = []
        self._survival = 1.0

    def begin(self) -> ShouldStop:
        """Start a round."""
        self._margins, self._survival = [], 1.0
        return self._should_stop

    def _should_stop(self, drafted: DraftedToken) -> bool:
        self._margins.append(drafted.read(self.reads)[0])
        self._survival *= self._model(len(self._margins) - 1).accept(self._margins[-1])
        return 1.0 - self._survival > self._threshold

    def observe(self, record: Round) -> None:
        """Learn the outcomes that are known: of the accepted tokens and the first that was not."""
        for place, margin in enumerate(islice(self._margins, record.accepted + 1)):
            self._model(place).observe(margin, place < record.accepted)

    def _model(self, place: int) -> OnlineLogistic:
        return self.models[min(place, len(self.models) - 1)]
