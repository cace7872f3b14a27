"""Drafted tokens of recorded rollouts, and how far a rule would draft from each position of them.

A row is one rollout of the target: at each of its n positions, the token that the draft proposes
there after the rollout's own tokens. Rows are padded on the right to N positions. While a round
lasts its tokens are taken to be those of the row, which is what greedy decoding does; with sampling
it assumes that the sequence continues as recorded also after an accepted token that differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Lengths = NDArray[np.int64]
"""(R, N): tokens drafted in a round that starts at a position."""
BOUND = 30.0
"""Logarithms of ratios of probabilities are kept within this; a distribution may have zeros."""


def pad(rows: Sequence[Sequence[float]], value: float = 0.0) -> Reals:
    """(R, N) from ragged rows, padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), value)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHead:
    """Raw logits of an acceptance head at each decision point that it can be asked at, (R, N).

    Attributes:
        before: of the token that is about to be drawn; None if the head has no such decision point.
        drawn: of the token as soon as it is drawn; likewise.
        consumed: of the token once the draft has consumed it, one drafted token later; likewise.
        rejection_weight: w of the loss that the head was trained with.
    """

    before: Reals | None = None
    drawn: Reals | None = None
    consumed: Reals | None = None
    rejection_weight: float = 1.0

    def select(self, chosen: NDArray[np.bool_]) -> RecordedHead:
        """The outputs on some rollouts; `chosen` is (R,)."""
        return replace(self, **_selected(self, chosen))

    def probabilities(self, logits: Reals, *, calibrated: bool) -> Reals:
        """Acceptance probabilities, raw as SpecDec++ uses them or with the loss's bias undone."""
        from scipy.special import expit

        bias = math.log(self.rejection_weight) if calibrated else 0.0
        return np.asarray(expit(logits + bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTokens:
    """Inputs of rules for the drafted tokens of R rollouts; every array is (R, N).

    What is None was not recorded.

    Attributes:
        lengths: (R,) positions of each rollout, at least 1.
        q: the draft's probability of its token.
        q_max: the largest probability of the distribution that the token was drawn from.
        entropy: of that distribution, in nats.
        margin: log of its largest minus log of its second largest probability, at most `BOUND`.
        log_mass_above: log of the mass of all tokens that are more probable than the drafted one,
            at least -`BOUND`.
        head: an acceptance head's outputs; None without a head.
    """

    lengths: Lengths
    q: Reals
    q_max: Reals
    entropy: Reals | None = None
    margin: Reals | None = None
    log_mass_above: Reals | None = None
    head: RecordedHead | None = None

    @property
    def inside(self) -> NDArray[np.bool_]:
        """(R, N): False in the padding."""
        return np.asarray(np.arange(self.q.shape[1]) < self.lengths[:, None])

    def select(self, chosen: NDArray[np.bool_]) -> RecordedTokens:
        """Those of some rollouts; `chosen` is (R,)."""
        head = None if self.head is None else self.head.select(chosen)
        return replace(self, **_selected(self, chosen), head=head)

    def most(self) -> Lengths:
        """Tokens that may be drafted from a position; a round ends with a token of the target."""
        ahead = self.lengths[:, None] - np.arange(self.q.shape[1]) - 1
        return np.asarray(ahead.clip(min=0))


def _selected(recorded: RecordedHead | RecordedTokens, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """The rows of every array that was recorded."""
    values = {field.name: getattr(recorded, field.name) for field in fields(recorded)}
    return {name: v[chosen] for name, v in values.items() if isinstance(v, np.ndarray)}


def constant_length(tokens: RecordedTokens, length: int) -> Lengths:
    """Draft `length` tokens in every round that is long enough."""
    return np.minimum(length, tokens.most())


def until_marked(tokens: RecordedTokens, stops: NDArray[np.bool_], *, limit: int) -> Lengths:
    """Draft up to the first token that is marked, at most `limit`.

    Args:
        tokens: the rollouts.
        stops: (R, N) whether the token at a position ends a draft.
        limit: most tokens drafted.
    """
    return until_product_below(tokens, np.where(stops, 0.0, 1.0), 0.5, limit=limit)


def until_product_below(
    tokens: RecordedTokens,
    estimates: Reals,
    least: float,
    *,
    limit: int,
    lag: int = 0,
    newest: Reals | None = None,
) -> Lengths:
    """Draft until the product of the estimates of a round's tokens is below `least`.

    Args:
        tokens: the rollouts.
        estimates: (R, N) for the token at each position, such as its acceptance probability; or
            (K, R, N), for that token as the first, second, ... of a draft, the last for all
            further places.
        least: stop once the product is below it; 1 - h for a threshold h on the probability of a
            rejection, t_d / (lambda abar) for the cost rule.
        limit: most tokens drafted.
        lag: 1 if there is no estimate of the newest token yet, as with SpecDec++'s head.
        newest: (R, N) estimates that stand in for the missing one; none by default.
    """
    width, most = tokens.q.shape[1], np.minimum(limit, tokens.most())
    lengths, product, going = most.copy(), np.ones_like(tokens.q), most > 0
    longest = int(most.max(initial=0))
    padding = ((0, 0), (0, longest))
    by_place = estimates if estimates.ndim == 3 else estimates[None]
    ahead = np.pad(by_place, ((0, 0), *padding), constant_values=1.0)
    latest = None if newest is None else np.pad(newest, padding, constant_values=1.0)
    for k in range(longest):  # once the token at position + k is drafted
        if k >= lag:
            place = min(k - lag, len(ahead) - 1)
            product = product * ahead[place, :, k - lag : k - lag + width]
        judged = product if latest is None else product * latest[:, k : k + width]
        ends = going & (judged < least)
        lengths[ends] = k + 1
        going &= ~ends & (k + 1 < most)
    return lengths


def until_head_prefix_acceptance_below(
    tokens: RecordedTokens,
    least: float,
    *,
    limit: int,
    calibrated: bool,
    newest: Reals | None = None,
) -> Lengths | None:
    """Draft until the prefix acceptance by the head's newest estimates is below `least`.

    The estimate of a token is the one after the draft consumed it where the head has that decision
    point, else the one when it was drawn. The newest token, which was not consumed yet, is judged
    as drawn; by a head that cannot, it is not judged, as in SpecDec++.

    Args:
        tokens: the rollouts.
        least: stop once the product is below it.
        limit: most tokens drafted.
        calibrated: whether the bias of the head's loss is undone.
        newest: (R, N) estimates of the newest token that stand in for those of a head that cannot
            judge it.

    Returns:
        None if no head was recorded that judges drawn tokens.
    """
    head = tokens.head
    if head is None or (head.drawn is None and head.consumed is None):
        return None
    if head.drawn is not None:
        newest = head.probabilities(head.drawn, calibrated=calibrated)
    if head.consumed is None:
        assert newest is not None
        return until_product_below(tokens, newest, least, limit=limit)
    consumed = head.probabilities(head.consumed, calibrated=calibrated)
    return until_product_below(tokens, consumed, least, limit=limit, lag=1, newest=newest)
