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
    """The outputs of an acceptance head for recorded tokens; it judges them as a head does."""

    logits: Reals  # (R, N) raw, of the token at each position
    lag: int = 0  # tokens that must be drafted after a token before the head judges it
    rejection_weight: float = 1.0

    def logit(self, drawn: Any) -> Reals:
        """(R, N) of the newest token that the head can judge once `drawn` is."""
        return np.roll(self.logits, self.lag - drawn.position, axis=1)

    def judge(self) -> RecordedHead:
        """Return itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTokens:
    """The drafted tokens of R rollouts, as rules read them; every array is (R, N)."""

    lengths: Lengths  # (R,) positions of each rollout, at least 1
    q: Reals
    q_max: Reals  # the largest probability of the distribution that the token was drawn from
    entropy: Reals | None = None  # of that distribution, in nats; None if it was not recorded
    head: RecordedHead | None = None

    @property
    def inside(self) -> NDArray[np.bool_]:
        """(R, N): False in the padding."""
        return np.asarray(np.arange(self.q.shape[1]) < self.lengths[:, None])

    def most(self) -> Lengths:
        """Tokens that may be drafted from a position; a round ends with a token of the target."""
        ahead = self.lengths[:, None] - np.arange(self.q.shape[1]) - 1
        return np.asarray(ahead.clip(min=0))
