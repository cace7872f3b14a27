"""The best number of tokens to draft, exactly, for acceptance that follows a Markov chain.

A round drafts K tokens, then pays for one target forward; it emits the accepted tokens and one
more. Drafted token i is accepted with probability a_i, which is known once the token is drafted
(the prediction of an acceptance head). Stopping rules are compared with the least time per emitted
token, E[c K + t] / E[accepted + 1], over all rules that decide by a_1 .. a_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

RULE_CHANGES = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Times that make up a round.

    Args:
        draft_seconds: c, one draft forward.
        target_seconds: t, one target forward.
        limit: the most tokens that a round may draft.
    """

    draft_seconds: float
    target_seconds: float
    limit: int


@dataclass(frozen=True)
class AcceptanceChain:
    """Acceptance probabilities of drafted tokens as a Markov chain with S states.

    Args:
        accept: (S,) acceptance probability in each state.
        initial: (S,) distribution of the first token's state.
        transition: (S, S) distribution of the next token's state.
    """

    accept: tuple[float, ...]
    initial: tuple[float, ...]
    transition: tuple[tuple[float, ...], ...]

    @classmethod
    def iid(cls, accept: Sequence[float], weights: Sequence[float]) -> AcceptanceChain:
        """Independent acceptance probabilities with one distribution."""
        distribution = tuple(weights)
        return cls(tuple(accept), distribution, (distribution,) * len(distribution))


@dataclass(frozen=True, slots=True)
class Policy:
    """Expectations of a round under a stopping rule.

    Args:
        drafted: E[K].
        emitted: E[accepted + 1].
        seconds_per_token: E[c K + t] / E[accepted + 1].
    """

    drafted: float
    emitted: float
    seconds_per_token: float


StateCounts = tuple[int, ...]
"""The number of drafted tokens that were in each state: (S,)."""

Continues = Callable[[int, float, int | None], bool]
"""(tokens drafted, prod a_i, state of the last token or None) -> whether to draft another."""


def evaluate(chain: AcceptanceChain, costs: Costs, continues: Continues) -> Policy:
    """The expectations of a stopping rule, by enumeration of all histories (equal ones merged)."""

    def continues_after(
        counts: StateCounts, state: int | None, _drafted: float, _accepted: float
    ) -> bool:
        return continues(sum(counts), _prefix_acceptance(chain, counts), state)

    return _policy(chain, costs, continues_after)


def optimal(chain: AcceptanceChain, costs: Costs) -> Policy:
    """The best stopping rule: the root of t - lambda + W(0) = 0, by renewal reward.

    For a price lambda of time per token, W(k, info) = min(0, c + E[-lambda P a' + W(k + 1, info')])
    is solved backwards; the best rule for that price has a ratio of its own, which is the next
    price (Dinkelbach's iteration). Prices fall until the rule no longer changes, in a few steps.

    Raises:
        ArithmeticError: if the rule still changes after `RULE_CHANGES` steps.
    """
    best = evaluate(chain, costs, lambda *_: False)
    for _ in range(RULE_CHANGES):
        price = best.seconds_per_token

        def pays(
            _counts: StateCounts,
            _state: int | None,
            drafted: float,
            accepted: float,
            price: float = price,
        ) -> bool:
            return costs.draft_seconds * drafted < price * accepted

        better = _policy(chain, costs, pays)
        if better.seconds_per_token >= best.seconds_per_token:
            return best
        best = better
    raise ArithmeticError(f"the rule still changes after {RULE_CHANGES} steps for {chain}, {costs}")


def _policy(
    chain: AcceptanceChain,
    costs: Costs,
    continues: Callable[[StateCounts, int | None, float, float], bool],
) -> Policy:
    """The expectations of a rule that may read E[further tokens drafted, accepted]."""

    @cache
    def ahead(counts: StateCounts, state: int | None) -> tuple[float, float]:
        if sum(counts) == costs.limit:
            return 0.0, 0.0
        drafted, accepted = 1.0, 0.0
        distribution = chain.initial if state is None else chain.transition[state]
        for following, weight in enumerate(distribution):
            if weight > 0:
                later = (*counts[:following], counts[following] + 1, *counts[following + 1 :])
                rest = ahead(later, following)
                drafted += weight * rest[0]
                accepted += weight * (_prefix_acceptance(chain, later) + rest[1])
        return (drafted, accepted) if continues(counts, state, drafted, accepted) else (0.0, 0.0)

    drafted, accepted = ahead((0,) * len(chain.accept), None)
    time = costs.draft_seconds * drafted + costs.target_seconds
    return Policy(drafted, accepted + 1.0, time / (accepted + 1.0))


def best_length_policy(chain: AcceptanceChain, costs: Costs) -> tuple[int, Policy]:
    """The best number of tokens to draft in every round, and its policy."""
    policies = [length_policy(chain, costs, length) for length in range(costs.limit + 1)]
    best = min(range(len(policies)), key=lambda k: policies[k].seconds_per_token)
    return best, policies[best]


def length_policy(chain: AcceptanceChain, costs: Costs, length: int) -> Policy:
    """Draft `length` tokens in every round. Constant a: (c K + t) (1 - a) / (1 - a^(K+1))."""
    emitted, weights = 1.0, chain.initial
    for _ in range(length):
        alive = [weight * accept for weight, accept in zip(weights, chain.accept, strict=True)]
        emitted += sum(alive)
        columns = zip(*chain.transition, strict=True)
        weights = tuple(sum(a * t for a, t in zip(alive, col, strict=True)) for col in columns)
    time = costs.draft_seconds * length + costs.target_seconds
    return Policy(float(length), emitted, time / emitted)


def _prefix_acceptance(chain: AcceptanceChain, counts: StateCounts) -> float:
    """Prod a_i: the probability that all drafted tokens are accepted."""
    prefix_acceptance = 1.0
    for accept, count in zip(chain.accept, counts, strict=True):
        prefix_acceptance *= accept**count
    return prefix_acceptance
