"""The best number of tokens to draft, exactly, for acceptance that follows a Markov chain.

A round drafts K tokens, then pays for one target forward; it emits the accepted tokens and one
more. Drafted token i is accepted with probability a_i, which is known once the token is drafted
(the prediction of an acceptance head). Stopping rules are compared with the least time per emitted
token, E[c K + 1] / E[accepted + 1], over all rules that decide by a_1 .. a_k.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

GoesOn = Callable[[int, float, float, float], bool]
"""(tokens drafted, prod a_i, E[further drafted], E[further accepted]) -> whether to go on."""


@dataclass(frozen=True)
class AcceptanceChain:
    """Acceptance probabilities (S,) of S states; the states' first distribution and transitions.

    `draft_seconds` is c, in forwards of the target; at most `limit` tokens are drafted.
    """

    accept: tuple[float, ...]
    initial: tuple[float, ...]
    transition: tuple[tuple[float, ...], ...]
    draft_seconds: float
    limit: int

    @classmethod
    def iid(cls, accept: Sequence[float], weights: Sequence[float], draft_seconds: float) -> Self:
        """Independent acceptance probabilities with one distribution."""
        first = tuple(weights)
        return cls(tuple(accept), first, (first,) * len(first), draft_seconds, limit=25)


def seconds_per_token(chain: AcceptanceChain, goes_on: GoesOn) -> float:
    """Of a stopping rule, by enumeration of all histories (equal ones merged)."""

    def alive(counts: tuple[int, ...]) -> float:
        return math.prod(a**count for a, count in zip(chain.accept, counts, strict=True))

    @cache
    def ahead(counts: tuple[int, ...], state: int | None) -> tuple[float, float]:
        """E[further drafted, accepted] after so many tokens in each state."""
        if sum(counts) == chain.limit:
            return 0.0, 0.0
        drafted, accepted = 1.0, 0.0
        following = chain.initial if state is None else chain.transition[state]
        for then, weight in enumerate(following):
            later = (*counts[:then], counts[then] + 1, *counts[then + 1 :])
            rest = ahead(later, then)
            drafted += weight * rest[0]
            accepted += weight * (alive(later) + rest[1])
        keep = goes_on(sum(counts), alive(counts), drafted, accepted)
        return (drafted, accepted) if keep else (0.0, 0.0)

    drafted, accepted = ahead((0,) * len(chain.accept), None)
    return (chain.draft_seconds * drafted + 1.0) / (accepted + 1.0)


def optimum(chain: AcceptanceChain) -> float:
    """Of the best rule, by Dinkelbach's iteration: the best rule for a price is the next price's.

    At a price of time per token W(k, info) = min(0, c + E[-price P a' + W(k + 1, info')]) is solved
    backwards. Prices fall until the rule no longer changes, in a few steps.
    """
    price, former = seconds_per_token(chain, lambda *_: False), math.inf
    while price < former:
        former = price
        worth = chain.draft_seconds / price
        price = seconds_per_token(chain, lambda _n, _alive, n, more, w=worth: n * w < more)
    return former


def best_length(chain: AcceptanceChain) -> float:
    """Of the best number of tokens to draft in every round."""
    lengths = range(chain.limit + 1)
    return min(seconds_per_token(chain, lambda n, *_, k=k: n < k) for k in lengths)
