"""Stopping rules along recorded rollouts, and the oracle: expected counts, over all outcomes.

At each position of a rollout the draft's token is accepted with probability a = min(1, p/q). A
round that drafts K tokens from a position keeps those before the first rejection and emits one
token more, from the target; the next round starts after it. How far a rule drafts from a position
depends on what it reads there (`recorded_lengths`), not on the outcomes, so expected
counts follow from a without drawing anything: the probability that a round starts at a position is
carried from left to right. With a of 0 and 1 these are the counts of recorded outcomes.

While a round lasts its tokens are taken to be those of the rollout, which is what greedy decoding
does; with sampling it assumes that the text continues as recorded also after an accepted token that
differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from benchmarks.papers.traces import Traces
from eval.drafting.stopping import DraftedToken, StoppingRule
from eval.drafting.stopping.recorded import Lengths, Reals, RecordedTokens
from eval.drafting.stopping.rule import Numbers, chance, entropy_of, largest
from eval.measuring.intervals import Interval, resamples


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a round.

    Attributes:
        draft_seconds: t_d, of one more drafted token.
        target_seconds: t_t, of a round without its drafted tokens: a forward of the target.
    """

    draft_seconds: float
    target_seconds: float


class RecordedToken:
    """A `DraftedToken` of drafts from every position at once: numbers are arrays (R, N).

    `position` is the token's place in these drafts, from 0.
    """

    numbers = None

    def __init__(self, tokens: RecordedTokens, position: int) -> None:
        self.tokens = tokens
        self.position = position

    def read(self, numbers: Numbers) -> tuple[Reals]:
        """The numbers that a rule reads; behind the end of a row they mean nothing."""
        tokens = self.tokens
        recorded: dict[Numbers, Reals | None]
        recorded = {chance: tokens.q, largest: tokens.q_max, entropy_of: tokens.entropy}
        values = recorded[numbers]
        assert values is not None, "labels have all three"
        return (np.roll(values, -self.position, axis=1),)


def recorded_lengths(rule: StoppingRule, tokens: RecordedTokens) -> Lengths:
    """The number of tokens that a rule would draft from each position: (R, N).

    The rule's own object is at work, as in decoding, on the drafts of all positions at once; one
    that learns while it decodes is asked as it is at first.
    """
    active = rule.start(cast(Any, tokens.head))
    most = np.minimum(active.longest, tokens.most())
    lengths, going = most.copy(), most > 0
    active.begin()
    for position in range(int(most.max(initial=0))):
        if not going.any():
            break
        drafted = cast(DraftedToken, RecordedToken(tokens, position))
        ends = going & active.should_stop(drafted)
        lengths[ends] = position + 1
        going &= ~ends & (position + 1 < most)
    return lengths


@dataclass(frozen=True, slots=True)
class Counts:
    """Expected counts of each of R rollouts; every field is (R,)."""

    tokens: Reals
    n_target: Reals
    n_draft: Reals
    n_discarded: Reals

    def seconds(self, times: Times) -> Reals:
        """(R,) t_d N_draft + t_t N_target, in seconds."""
        return times.draft_seconds * self.n_draft + times.target_seconds * self.n_target

    def seconds_per_token(self, times: Times) -> float:
        """Divide the seconds of all rollouts by their emitted tokens."""
        return float(self.seconds(times).sum() / self.tokens.sum())


def expected_counts(traces: Traces, lengths: Lengths) -> Counts:
    """Expected counts under a rule that drafts (R, N) tokens in a round from each position.

    Raises ValueError if it drafts more than it may.
    """
    if ((lengths < 0) | (lengths > traces.tokens.most())).any():
        raise ValueError("a rule may draft only so far that the target gives the last token")
    rollouts, width = traces.accept.shape
    longest = int(lengths.max(initial=0))
    accept = np.pad(traces.accept, ((0, 0), (0, longest)))
    starts = np.zeros((rollouts, width + longest + 1))  # probability that a round starts there
    starts[:, 0] = 1.0
    n_target, n_draft, n_accepted = np.zeros((3, rollouts))
    for position in range(width):
        started = np.where(position < traces.tokens.lengths, starts[:, position], 0.0)
        drafted = lengths[:, position]
        n_target += started
        n_draft += started * drafted
        alive = started  # and that its first k tokens are accepted
        for k in range(int(drafted.max(initial=0)) + 1):
            further = np.where(k < drafted, alive * accept[:, position + k], 0.0)
            starts[:, position + k + 1] += alive - further
            n_accepted += further
            alive = further
    tokens = traces.tokens.lengths.astype(np.float64)
    return Counts(tokens, n_target, n_draft, n_draft - n_accepted)


def oracle_counts(traces: Traces) -> Counts:
    """Expected counts of stopping right before each rejection (SpecDec++, Theorem 4.1).

    N_target is then the number of rejections before the last token, plus one: the least that any
    rule reaches, with the least N_draft that reaches it; so no rule takes less time while a drafted
    token costs no more than a forward of the target.
    """
    before_last = np.arange(traces.accept.shape[1]) < traces.tokens.lengths[:, None] - 1
    n_target = 1.0 + np.where(before_last, 1.0 - traces.accept, 0.0).sum(axis=1)
    tokens = traces.tokens.lengths.astype(np.float64)
    return Counts(tokens, n_target, tokens - n_target, np.zeros_like(tokens))


CHANCES = (1e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
GRIDS: dict[str, Sequence[float]] = {
    "confidence": CHANCES,
    "entropy": (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4),
    "cumulative": CHANCES,
}
"""Thresholds of rules without a head, of which the fastest is looked for."""


def saving(rule: Counts, rival: Counts, times: Times, prompts: Sequence[str]) -> Interval:
    """The share of the rival's time a token that a rule saves: 1 - t(rule) / t(rival).

    Both are replayed on the same R rollouts, so their times are paired: a resample draws prompts,
    and both are judged on those. `prompts` (R,) says which prompt each rollout is of.
    """
    _, group = np.unique(prompts, return_inverse=True)
    drawn = resamples(int(group.max()) + 1)
    seconds, rival_seconds = (
        drawn @ np.bincount(group, each.seconds(times)) for each in (rule, rival)
    )
    return Interval.of(1.0 - seconds / rival_seconds)
