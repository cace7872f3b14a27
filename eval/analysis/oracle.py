"""Replay of recorded acceptance under a stopping rule, with the oracle of SpecDec++ as the bound.

An acceptance trace holds for each position of a sequence whether the token that the draft proposed
there was accepted. A round that drafts K tokens from a position emits the accepted ones before the
first rejection and one more, from the target. For greedy decoding that is exactly what decoding
does; with sampling it assumes that the sequence continues as recorded also after an accepted token
that differs from the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

DraftLength = Callable[[int, int], int]
"""(position in the sequence, most tokens that may be drafted) -> tokens to draft from there."""


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Counts of a replay; those of several sequences add up.

    Args:
        tokens: emitted (N).
        n_target: rounds, each one forward of the target.
        n_draft: drafted tokens.
        n_discarded: drafted tokens that were not accepted.
    """

    tokens: int = 0
    n_target: int = 0
    n_draft: int = 0
    n_discarded: int = 0

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(
            self.tokens + other.tokens,
            self.n_target + other.n_target,
            self.n_draft + other.n_draft,
            self.n_discarded + other.n_discarded,
        )

    def seconds_per_token(self, draft_seconds: float, target_seconds: float) -> float:
        """(t_d N_draft + t_t N_target) / N, in seconds."""
        return (draft_seconds * self.n_draft + target_seconds * self.n_target) / self.tokens


def replay(accepted: Sequence[bool], draft_length: DraftLength) -> ReplayCounts:
    """Decode one recorded sequence.

    Args:
        accepted: (n,) whether the draft's token at each position is accepted.
        draft_length: the stopping rule. Every round ends with a token of the target, so the last
            position is never drafted and its outcome has no effect.

    Raises:
        ValueError: if the rule drafts more tokens than it may.
    """
    position, counts = 0, ReplayCounts()
    while position < len(accepted):
        most = len(accepted) - position - 1
        drafted = draft_length(position, most)
        if not 0 <= drafted <= most:
            raise ValueError(
                f"a stopping rule may draft 0 to {most} tokens at {position}, got {drafted}"
            )
        kept = _accepted_run(accepted, position, drafted)
        counts += ReplayCounts(kept + 1, 1, drafted, drafted - kept)
        position += kept + 1
    return counts


def oracle(accepted: Sequence[bool]) -> DraftLength:
    """Stop right before each rejection: nothing is discarded (SpecDec++, Theorem 4.1).

    N_target is then the number of rejections before the last token, plus one: the least that any
    rule reaches, with the least N_draft that reaches it; so no rule takes less time while a drafted
    token costs no more than a forward of the target.
    """
    return lambda position, most: _accepted_run(accepted, position, most)


def constant_length(length: int) -> DraftLength:
    """Draft `length` tokens in every round that is long enough."""
    return lambda position, most: min(length, most)


def until_product_below(
    estimates: Sequence[float],
    least: float,
    *,
    limit: int,
    lag: int = 0,
    newest: Sequence[float] | None = None,
) -> DraftLength:
    """Draft until the product of estimated acceptance probabilities is below `least`.

    Args:
        estimates: (n,) estimated acceptance probability of the draft's token at each position.
        least: stop once the product is below it; 1 - h for a threshold h on the probability of a
            rejection, t_d / (lambda abar) for the cost rule.
        limit: most tokens drafted.
        lag: 1 if there is no estimate of the newest token yet, as with an acceptance head.
        newest: (n,) estimates that stand in for the missing one; none by default.
    """

    def draft_length(position: int, most: int) -> int:
        survival = 1.0
        for drafted in range(1, min(limit, most) + 1):
            if drafted > lag:
                survival *= estimates[position + drafted - 1 - lag]
            if survival * (newest[position + drafted - 1] if newest else 1.0) < least:
                return drafted
        return min(limit, most)

    return draft_length


def until_value_below(values: Sequence[float], least: float, *, limit: int) -> DraftLength:
    """Draft up to the first token whose own value is below `least` (draft confidence).

    Args:
        values: (n,) a value of the draft's token at each position.
        least: stop once the value is below it.
        limit: most tokens drafted.
    """

    def draft_length(position: int, most: int) -> int:
        longest = min(limit, most)
        below = (k for k in range(1, longest + 1) if values[position + k - 1] < least)
        return next(below, longest)

    return draft_length


def dinkelbach(
    traces: Sequence[Sequence[bool]],
    rule: Callable[[int, float], DraftLength],
    *,
    draft_seconds: float,
    target_seconds: float,
    steps: int = 16,
) -> tuple[ReplayCounts, float]:
    """Replay a rule that depends on lambda, the time per token that the rule itself achieves.

    Dinkelbach's iteration: every step replays the rule with the lambda of the last one, until
    lambda no longer falls.

    Args:
        traces: for each sequence, whether the token at each position is accepted.
        rule: (number of the sequence, lambda in seconds) -> the rule for it.
        draft_seconds: t_d.
        target_seconds: t_t, where lambda starts.
        steps: most iterations.

    Returns:
        The counts of the best step and its lambda.
    """
    seconds, best = target_seconds, ReplayCounts()
    for _ in range(steps):
        counts = sum(
            (replay(accepted, rule(number, seconds)) for number, accepted in enumerate(traces)),
            ReplayCounts(),
        )
        achieved = counts.seconds_per_token(draft_seconds, target_seconds)
        if best.tokens and achieved >= seconds:
            break
        best, seconds = counts, achieved
    return best, seconds


def _accepted_run(accepted: Sequence[bool], position: int, most: int) -> int:
    """Accepted tokens from a position on before the first rejection, at most `most`."""
    kept = 0
    while kept < most and accepted[position + kept]:
        kept += 1
    return kept
