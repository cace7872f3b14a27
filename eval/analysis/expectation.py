"""Replay of labelled rollouts under a stopping rule, by exact expectation over acceptance.

A row is one rollout: at each of its n positions the draft proposed a token that the target accepts
with probability a = min(1, p/q). A round that drafts K tokens from a position keeps those before
the first rejection and emits one token more, from the target; the next round starts after it. How
far a rule drafts from a position depends on what it reads there, not on the coins of acceptance, so
the expected counts of all rounds follow from a without drawing a coin: the chance that a round
starts at each position is carried from left to right.

With a of 0 or 1 this is the replay of recorded outcomes. For greedy decoding that is exactly what
decoding does; with sampling it assumes that the sequence continues as recorded also after an
accepted token that differs from the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Acceptance of R rollouts of at most N positions, padded on the right.

    Attributes:
        accept: (R, N) probability that the token drafted at a position is accepted; 0 in padding.
        lengths: (R,) positions of each rollout, at least 1.
    """

    accept: Reals
    lengths: Lengths

    @classmethod
    def of(cls, accept: Sequence[Sequence[float]]) -> Rows:
        """Pad rows of probabilities. Raises ValueError if a row is empty or holds no probability."""
        lengths = np.array([len(row) for row in accept], dtype=np.int64)
        if not len(lengths) or lengths.min() < 1:
            raise ValueError("replay needs at least one rollout, and a position in each")
        padded = pad(accept)
        if not ((padded >= 0.0) & (padded <= 1.0)).all():
            raise ValueError("acceptance must be given as probabilities between 0 and 1")
        return cls(padded, lengths)

    def most(self) -> Lengths:
        """(R, N): tokens that may be drafted from a position; the target gives the last token."""
        ahead = self.lengths[:, None] - np.arange(self.accept.shape[1]) - 1
        return np.maximum(ahead, 0)


def pad(rows: Sequence[Sequence[float]], value: float = 0.0) -> Reals:
    """(R, N) from ragged rows, padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), value)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


@dataclass(frozen=True, slots=True)
class Counts:
    """Expected counts of each of R rows; every field is (R,).

    Attributes:
        tokens: emitted (N).
        n_target: rounds, each one forward of the target.
        n_draft: drafted tokens.
        n_discarded: drafted tokens that were not accepted.
    """

    tokens: Reals
    n_target: Reals
    n_draft: Reals
    n_discarded: Reals

    def seconds(self, draft_seconds: float, target_seconds: float) -> Reals:
        """(R,) t_d N_draft + t_t N_target of each row, in seconds."""
        return draft_seconds * self.n_draft + target_seconds * self.n_target

    def seconds_per_token(self, draft_seconds: float, target_seconds: float) -> float:
        """The same of all rows for one emitted token."""
        return float(self.seconds(draft_seconds, target_seconds).sum() / self.tokens.sum())


def expected_counts(rows: Rows, drafted: Lengths) -> Counts:
    """Expected counts under a rule.

    Args:
        rows: the rollouts.
        drafted: (R, N) tokens that the rule drafts in a round from each position.

    Raises:
        ValueError: if the rule drafts more than it may: a round ends with a token of the target.
    """
    most = rows.most()
    if ((drafted < 0) | (drafted > most)).any():
        raise ValueError("a stopping rule may draft no more tokens than follow, the last excluded")
    count, width = rows.accept.shape
    longest = int(drafted.max(initial=0))
    start = np.zeros((count, width + longest + 1))  # chance that a round starts at a position
    start[:, 0] = 1.0
    n_target, n_draft, n_accepted = np.zeros((3, count))
    ahead = np.concatenate([rows.accept, np.zeros((count, longest))], axis=1)
    for position in range(width):
        here = start[:, position] * (position < rows.lengths)
        lengths = drafted[:, position]
        n_target += here
        n_draft += here * lengths
        alive = here  # chance that the round is here and its first k tokens were accepted
        for k in range(int(lengths.max(initial=0)) + 1):
            goes_on = np.where(lengths > k, alive * ahead[:, position + k], 0.0)
            start[:, position + k + 1] += alive - goes_on
            n_accepted += goes_on
            alive = goes_on
    return Counts(rows.lengths.astype(np.float64), n_target, n_draft, n_draft - n_accepted)


def oracle_counts(rows: Rows) -> Counts:
    """The expected counts of stopping right before each rejection (SpecDec++, Theorem 4.1).

    N_target is then the number of rejections before the last token, plus one: the least that any
    rule reaches, with the least N_draft that reaches it; so no rule takes less time while a drafted
    token costs no more than a forward of the target.
    """
    counted = np.arange(rows.accept.shape[1]) < rows.lengths[:, None] - 1
    n_target = 1.0 + np.where(counted, 1.0 - rows.accept, 0.0).sum(axis=1)
    tokens = rows.lengths.astype(np.float64)
    return Counts(tokens, n_target, tokens - n_target, np.zeros_like(tokens))


def constant_length(rows: Rows, length: int) -> Lengths:
    """(R, N): draft `length` tokens in every round that is long enough."""
    return np.minimum(length, rows.most())


def until_value(rows: Rows, stops: NDArray[np.bool_], *, limit: int) -> Lengths:
    """(R, N): draft up to the first token that is marked.

    Args:
        rows: the rollouts.
        stops: (R, N) whether the token at a position ends a draft.
        limit: most tokens drafted.
    """
    return until_product(rows, np.where(stops, 0.0, 1.0), 0.5, limit=limit)


def until_product(
    rows: Rows,
    estimates: Reals,
    least: float,
    *,
    limit: int,
    lag: int = 0,
    newest: Reals | None = None,
) -> Lengths:
    """(R, N): draft until the product of estimated acceptance probabilities is below `least`.

    Args:
        rows: the rollouts.
        estimates: (R, N) estimated acceptance probability of the token at each position.
        least: stop once the product is below it; 1 - h for a threshold h on the probability of a
            rejection, t_d / (lambda abar) for the cost rule.
        limit: most tokens drafted.
        lag: 1 if there is no estimate of the newest token yet, as with a published head.
        newest: (R, N) estimates that stand in for the missing one; none by default.
    """
    width, most = rows.accept.shape[1], np.minimum(limit, rows.most())
    lengths, survival = most.copy(), np.ones_like(rows.accept)
    going = most > 0
    longest = int(most.max(initial=0))
    edge = ((0, 0), (0, longest))
    ahead = np.pad(estimates, edge, constant_values=1.0)
    latest = None if newest is None else np.pad(newest, edge, constant_values=1.0)
    for k in range(longest):  # after drafting the token at position + k
        if k >= lag:
            survival = survival * ahead[:, k - lag : k - lag + width]
        judged = survival if latest is None else survival * latest[:, k : k + width]
        ends = going & (judged < least)
        lengths[ends] = np.minimum(k + 1, most[ends])
        going &= ~ends & (k + 1 < most)
    return lengths


def dinkelbach(
    rows: Rows,
    rule: Callable[[float], Lengths],
    *,
    draft_seconds: float,
    target_seconds: float,
    steps: int = 16,
) -> tuple[Counts, float]:
    """Expected counts of a rule that depends on lambda, the time per token that it itself achieves.

    Dinkelbach's iteration: every step takes the lambda of the last one, until lambda no longer
    falls.

    Args:
        rows: the rollouts.
        rule: lambda in seconds -> (R, N) tokens drafted from each position.
        draft_seconds: t_d.
        target_seconds: t_t, where lambda starts.
        steps: most iterations.

    Returns:
        The counts of the best step and its lambda.
    """
    best, seconds = expected_counts(rows, rule(target_seconds)), target_seconds
    for _ in range(steps):
        counts = expected_counts(rows, rule(seconds))
        achieved = counts.seconds_per_token(draft_seconds, target_seconds)
        if achieved >= seconds:
            break
        best, seconds = counts, achieved
    return best, seconds
