"""Drafted tokens of recorded rollouts, on which rules are fitted and heads are judged.

A row is one rollout of the target: at each of its n positions, the token that the draft proposes
there after the rollout's own tokens. Rows are padded on the right to N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Lengths = NDArray[np.int64]
"""(R, N): tokens drafted in a round that starts at a position."""


def pad(rows: Sequence[Sequence[float]], value: float = 0.0) -> Reals:
    """(R, N) from ragged rows, padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), value)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


@dataclass(frozen=True, slots=True)
class RecordedHead:
    """The outputs of an acceptance head for recorded tokens; it judges them as a head does.

    Attributes:
        logits: raw logits (R, N) of the token at each position.
        lag: tokens that must be drafted after a token before the head judges it.
    """

    logits: Reals
    lag: int = 0
    rejection_weight: float = 1.0

    def logit(self, drawn: Any) -> Reals:
        """(R, N) of the newest token that the head can judge once `drawn` is."""
        return np.roll(self.logits, self.lag - drawn.position, axis=1)

    def judge(self) -> RecordedHead:
        """Return itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTokens:
    """The drafted tokens of R rollouts, as rules read them; every array is (R, N).

    Attributes:
        lengths: (R,) positions of each rollout, at least 1.
        q_max: the largest probability of the distribution that the token was drawn from.
        entropy: of that distribution, in nats; None if it was not recorded.
        head: what an acceptance head says; None without a head.
    """

    lengths: Lengths
    q: Reals
    q_max: Reals
    entropy: Reals | None = None
    head: RecordedHead | None = None

    @property
    def inside(self) -> NDArray[np.bool_]:
        """(R, N): False in the padding."""
        return np.asarray(np.arange(self.q.shape[1]) < self.lengths[:, None])

    def most(self) -> Lengths:
        """Tokens that may be drafted from a position; a round ends with a token of the target."""
        ahead = self.lengths[:, None] - np.arange(self.q.shape[1]) - 1
        return np.asarray(ahead.clip(min=0))
