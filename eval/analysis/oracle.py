"""Replay recorded acceptance under any stopping rule, the oracle of SpecDec++ among them.

A profile says for each place of a text whether the token that the draft proposed there was
accepted. A round that drafts K tokens from a place emits the accepted ones before the first
rejection and one more, from the target. For greedy decoding that is exactly what decoding would do;
with sampling it takes the text to go on as recorded also after an accepted token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Plan = Callable[[int, int], int]
"""(place in the text, most tokens that may be drafted) -> tokens to draft from there."""


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What a replay did; sums of several texts add up.

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
        """(t_d N_draft + t_t N_target) / N."""
        return (draft_seconds * self.n_draft + target_seconds * self.n_target) / self.tokens


def replay(accepted: Sequence[bool], plan: Plan) -> ReplayCounts:
    """Run one text.

    Args:
        accepted: (n,) whether the draft's token at each place is accepted.
        plan: the stopping rule. Of what is left one place belongs to the target, so the last
            place is never drafted and its outcome never matters.

    Raises:
        ValueError: if the plan drafts past the room it was given.
    """
    place, counts = 0, ReplayCounts()
    while place < len(accepted):
        room = len(accepted) - place - 1
        drafted = plan(place, room)
        if not 0 <= drafted <= room:
            raise ValueError(f"a plan may draft 0 to {room} tokens at {place}, got {drafted}")
        kept = _agreed(accepted, place, drafted)
        counts += ReplayCounts(kept + 1, 1, drafted, drafted - kept)
        place += kept + 1
    return counts


def oracle(accepted: Sequence[bool]) -> Plan:
    """Stop right before each rejection: nothing is discarded (SpecDec++, Theorem 4.1).

    N_target is then the number of rejections before the last token, plus one: the least that any
    rule reaches, with the least N_draft that reaches it; so no rule takes less time while a drafted
    token costs no more than a forward of the target.
    """
    return lambda place, room: _agreed(accepted, place, room)


def fixed_length(length: int) -> Plan:
    """Draft `length` tokens wherever there is room."""
    return lambda place, room: min(length, room)


def while_alive(
    estimates: Sequence[float],
    least: float,
    *,
    limit: int,
    lag: int = 0,
    newest: Sequence[float] | None = None,
) -> Plan:
    """Draft until the product of estimated acceptances is below `least`.

    Args:
        estimates: (n,) estimated acceptance of the draft's token at each place.
        least: stop once the product is below it; 1 - h for a threshold h on the chance of a
            rejection, t_d / (lambda abar) for the cost rule.
        limit: most tokens drafted.
        lag: 1 if the newest token is not yet estimated, as for an acceptance head.
        newest: (n,) what is multiplied in for it then; nothing by default.
    """

    def plan(place: int, room: int) -> int:
        alive = 1.0
        for drafted in range(1, min(limit, room) + 1):
            if drafted > lag:
                alive *= estimates[place + drafted - 1 - lag]
            if alive * (newest[place + drafted - 1] if newest else 1.0) < least:
                return drafted
        return min(limit, room)

    return plan


def first_below(values: Sequence[float], least: float, *, limit: int) -> Plan:
    """Draft up to the first token whose own value is below `least` (draft confidence)."""

    def plan(place: int, room: int) -> int:
        most = min(limit, room)
        below = (k for k in range(1, most + 1) if values[place + k - 1] < least)
        return next(below, most)

    return plan


def dinkelbach(
    profiles: Sequence[Sequence[bool]],
    plans: Callable[[int, float], Plan],
    *,
    draft_seconds: float,
    target_seconds: float,
    steps: int = 16,
) -> tuple[ReplayCounts, float]:
    """Replay a rule that depends on lambda, with lambda set to what the rule itself achieves.

    Args:
        profiles: the texts.
        plans: (number of the text, lambda) -> its plan.
        draft_seconds: t_d.
        target_seconds: t_t, where lambda starts.
        steps: most iterations.

    Returns:
        The counts of the best step and its lambda.
    """
    price, best = target_seconds, ReplayCounts()
    for _ in range(steps):
        counts = sum(
            (replay(accepted, plans(text, price)) for text, accepted in enumerate(profiles)),
            ReplayCounts(),
        )
        found = counts.seconds_per_token(draft_seconds, target_seconds)
        if best.tokens and found >= price:
            break
        best, price = counts, found
    return best, price


def _agreed(accepted: Sequence[bool], place: int, most: int) -> int:
    """Accepted tokens from a place on before the first rejection, at most `most`."""
    kept = 0
    while kept < most and accepted[place + kept]:
        kept += 1
    return kept
