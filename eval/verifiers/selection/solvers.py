"""Selecting one of K drafted tokens by a named solver, with the exact distribution of the choice.

Khisti et al. 2025 (arXiv:2410.18234) show that the best rule for several drafts is a selection
followed by ordinary speculative sampling, whose draft distribution is that of the selected token,
b. Acceptance is at least sum_x min(p, b), so selections are compared by it. A selection is fitted
to p and the drafts' distributions before the drafted tokens are read, so taking the best of several
fitted rules is exact as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from eval.verifiers.selection.luce import fit_pair, fit_race
from eval.verifiers.selection.pairs import (
    BUCKETS,
    NO_IDS,
    Array,
    Ids,
    PairRule,
    Selection,
    group_masses,
    groups_by_ratio,
    largest,
    pair_masses,
)

Solver = Literal["lp", "truncated", "truncated_nosort", "luce"]

# Tokens that are put in order; the rest have hardly any mass, and a full sort costs milliseconds.
RANKED = 512
# Tokens that remain single where a large vocabulary is reduced to groups.
SINGLE = 512
# Tokens with shares of their own in `_proportional`; the others are grouped by p/q.
PROPORTIONAL = 32
# Selections of vocabularies up to this size are cached, so many: enumeration repeats them.
CACHED_SIZE, CACHED = 4096, 128

Select = Callable[[Array, Sequence[Array]], Selection]
"""(p (V,), the distribution (V,) of every draft) -> Selection. p may sum to less than 1."""
PairRules = Callable[[Array, Array, Array], Iterator[PairRule]]
"""(p, q1, q2), each (V,) -> the rules to choose from."""


def selector(solver: Solver, s: int) -> Select:
    """The selection of a solver.

    From two drafts the solver selects directly; from more by a tournament (Remark 3 of the paper),
    in which the token selected so far, whose distribution is known, is compared with the next
    draft. Luce selection handles any number of drafts of one distribution at once. Raises
    ValueError for another solver, or s < 1.
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {', '.join(get_args(Solver))}; got {solver!r}")
    if not (isinstance(s, int) and s >= 1):
        raise ValueError(f"s must be a whole number from 1, got {s!r}")
    rules: dict[str, PairRules] = {
        "lp": full_program,
        "truncated": partial(truncated, s=s),
        "truncated_nosort": partial(truncated_nosort, s=s),
        "luce": lambda p, q1, q2: iter([fit_pair(p, q1, q2)]),
    }
    return _cached(partial(_select, rules[solver], solver))


def _select(
    rules: PairRules, solver: Solver, p: Array, distributions: Sequence[Array]
) -> Selection:
    alike = all(distribution is distributions[0] for distribution in distributions)
    if solver == "luce" and alike and len(distributions) > 2:
        return fit_race(p, distributions[0], len(distributions))
    reducible = solver in ("truncated", "truncated_nosort") and len(p) > SINGLE + BUCKETS
    if reducible and alike and len(distributions) > 1:
        return _reduced_tournament(rules, p, distributions)
    return tournament(rules, p, distributions)


def _reduced_tournament(rules: PairRules, p: Array, distributions: Sequence[Array]) -> Selection:
    """A tournament over a reduced vocabulary, for drafts of one distribution.

    The likeliest tokens remain single, all others are grouped by p/q. The selection depends on
    groups only, so given its group the selected token is distributed as under q.
    """
    q = distributions[0]
    group = groups_by_ratio(p, q, largest(np.maximum(p, q), SINGLE))
    target, draft = (group_masses(group, each, SINGLE + BUCKETS) for each in (p, q))
    reduced = tournament(rules, target, [draft] * len(distributions))
    gain = reduced.distribution / np.where(draft > 0, draft, 1.0)
    return Selection(
        q * gain.take(group), lambda tokens: reduced.weights([int(group[x]) for x in tokens])
    )


def tournament(rules: PairRules, p: Array, distributions: Sequence[Array]) -> Selection:
    """Select from the first two drafts, then from the selected one and the next, and so on."""
    distribution, chain = distributions[0], []
    for following in distributions[1:]:
        # Of the rule's forms and constant choices the one with the highest acceptance. One half
        # gives b = q for drafts of one distribution; with 1 and 0 the acceptance is at least that
        # of the better draft alone.
        constants = (0.5,) if distribution is following else (0.5, 1.0, 0.0)
        one_group, no_shares = np.zeros(len(p), dtype=np.int64), np.zeros((1, 1))
        forms = [
            *rules(p, distribution, following),
            *(PairRule(one_group, no_shares, first) for first in constants),
        ]
        reached = [(form, form.distribution(distribution, following)) for form in forms]
        best, distribution = max(reached, key=lambda pair: float(np.minimum(p, pair[1]).sum()))
        chain.append(best)

    def weights(tokens: list[int]) -> list[float]:
        chances = [1.0]
        for rule, following in zip(chain, tokens[1:], strict=True):
            stays = [rule.prefer(token, following) for token in tokens[: len(chances)]]
            kept = [chance * stay for chance, stay in zip(chances, stays, strict=True)]
            lost = [chance * (1 - stay) for chance, stay in zip(chances, stays, strict=True)]
            chances = [*kept, sum(lost)]
        return chances

    return Selection(distribution, weights)


def full_program(p: Array, q1: Array, q2: Array) -> Iterator[PairRule]:
    """The exact optimum for two drafts (equations 8, 9 and 199); p, q1 and q2 are (V,)."""
    head = np.flatnonzero((q1 > 0) | (q2 > 0))
    sure, masses = q1[head] * q2[head], pair_masses(q1[head], q2[head])
    try:
        start = solve_linear_program(p[head], sure, masses)
    except RuntimeError:  # HiGHS gives up on some; augmenting paths, slower, on none
        start = None
    shares = solve_max_flow(p[head], sure, masses, start)
    group = np.zeros(len(p), dtype=np.int64)  # tokens with q = 0 may be in any group
    group[head] = np.arange(len(head))
    yield PairRule(group, shares)


def truncated(p: Array, q1: Array, q2: Array, s: int) -> Iterator[PairRule]:
    """The truncated program (Algorithm 2, equations 10 to 12), and a softer variant.

    Pairs of the s tokens with the largest p - q1 q2 get the optimal shares. In the paper these
    tokens are preferred to all others, and the others are ordered by the same score; that distorts
    b even at p = q. The second rule gives every other pair shares in proportion to p/q.
    """
    ranks = largest(p - q1 * q2, RANKED)
    yield _ordered(p, q1, q2, ranks[:s], ranks[s:])
    yield _proportional(p, q1, q2, ranks[:s])


def truncated_nosort(p: Array, q1: Array, q2: Array, s: int) -> Iterator[PairRule]:
    """The variant of appendix G.1: pairs outside the s best tokens are shared evenly."""
    yield _ordered(p, q1, q2, largest(p - q1 * q2, s), NO_IDS)


def _ordered(p: Array, q1: Array, q2: Array, head: Ids, ranked: Ids) -> PairRule:
    """Optimal shares inside the head, which is preferred to `ranked` (in order) and the rest."""
    first, second = q1[head], q2[head]
    rest_1, rest_2 = max(0.0, q1.sum() - first.sum()), max(0.0, q2.sum() - second.sum())
    sure = first * second + first * rest_2 + second * rest_1
    shares = solve_max_flow(p[head], sure, pair_masses(first, second))
    # Groups: every head token, those in order, the rest; the lower number is preferred.
    size = len(head)
    group = np.full(len(p), size + 1)
    group[ranked] = size
    group[head] = np.arange(size)
    full = np.triu(np.ones((size + 2, size + 2)), 1)
    full[:size, :size] = shares
    return PairRule(group, full, ranked=ranked)


def _proportional(p: Array, q1: Array, q2: Array, inner: Ids) -> PairRule:
    """Optimal shares inside `inner`; other pairs {i, j} are shared as p_i/q_i to p_j/q_j."""
    both = q1 if q1 is q2 else (q1 + q2) / 2
    scores = np.maximum(p, both)
    scores[inner] = -1.0
    head = np.concatenate([inner, largest(scores, min(PROPORTIONAL, len(p) - len(inner)))])
    group = groups_by_ratio(p, both, head)
    count, m = len(head) + BUCKETS, len(inner)
    target, drafts, first, second = (
        group_masses(group, distribution, count) for distribution in (p, both, q1, q2)
    )
    odds = np.outer(target, drafts)  # p_i q_j against p_j q_i: no division by q
    total = odds + odds.T
    shares = np.where(total > 0, odds / np.where(total > 0, total, 1.0), 0.5)
    masses = pair_masses(first, second)
    sure = first[:m] * second[:m] + (masses * shares)[:m, m:].sum(axis=1)
    shares[:m, :m] = solve_max_flow(p[inner], sure, masses[:m, :m])
    return PairRule(group, shares)


def _cached(select: Select) -> Select:
    """Cache the selections of small vocabularies."""

    @lru_cache(maxsize=CACHED)
    def small(p: bytes, distributions: tuple[bytes, ...]) -> Selection:
        # One array for each distinct distribution, so that equal ones are recognised by identity;
        # copies, because torch wants writable arrays.
        arrays = {each: np.frombuffer(each).copy() for each in distributions}
        return select(np.frombuffer(p).copy(), [arrays[each] for each in distributions])

    def cached(p: Array, distributions: Sequence[Array]) -> Selection:
        if len(p) > CACHED_SIZE:
            return select(p, distributions)
        return small(p.tobytes(), tuple(each.tobytes() for each in distributions))

    return cached


# More pairs than this take minutes and gigabytes (630 tokens).
MAX_PAIRS = 200_000
# Flow below this is rounding.
LEAST_FLOW = 1e-15


def solve_linear_program(p: Array, sure: Array, masses: Array) -> Array:
    """(m, m) share of the pair {i, j} that goes to i, by the linear program, solved with HiGHS.

    Implements equation 9 of Khisti et al. 2025 (arXiv:2410.18234), with p and q swapped: maximise
    sum_k t_k over shares w in [0, 1] and t_k <= p_k, t_k <= b_k, where b_k is the mass that goes to
    token k in any case (`sure`) plus its share of every pair. Shares are clipped to [0, 1], so that
    the distribution b that a caller computes from them is exact whatever the solver's tolerance. Of
    (m,) p and sure, and (m, m) symmetric masses of the pairs, diagonal 0. Raises ValueError for
    more than `MAX_PAIRS` pairs, RuntimeError if HiGHS finds no solution.
    """
    size = len(p)
    rows, columns = np.nonzero(np.triu(masses))
    pairs = len(rows)
    if pairs > MAX_PAIRS:
        raise ValueError(
            f"the full linear program takes at most {MAX_PAIRS} pairs of tokens, got {pairs}:"
            " use solver='truncated' or 'luce', or a smaller alphabet"
        )
    shares = np.full((size, size), 0.5)
    if pairs == 0:
        return shares
    weight = masses[rows, columns]
    variable, token = np.arange(pairs), pairs + np.arange(size)
    entries = np.concatenate([-weight, weight, np.ones(size)])
    where = (
        np.concatenate([rows, columns, np.arange(size)]),
        np.concatenate([variable, variable, token]),
    )
    limits = sure + np.bincount(columns, weight, size)
    bounds = np.zeros((pairs + size, 2))
    bounds[:pairs, 1], bounds[pairs:, 1] = 1.0, p
    cost = np.concatenate([np.zeros(pairs), -np.ones(size)])
    solution = linprog(
        cost,
        A_ub=coo_array((entries, where), shape=(size, pairs + size)).tocsr(),
        b_ub=limits,
        bounds=bounds,
        method="highs",
    )
    if solution.x is None:
        raise RuntimeError(f"the linear program was not solved: {solution.message}")
    won = np.clip(solution.x[:pairs], 0.0, 1.0)
    shares[rows, columns], shares[columns, rows] = won, 1.0 - won
    return shares


def solve_max_flow(p: Array, sure: Array, masses: Array, start: Array | None = None) -> Array:
    """The same shares by augmenting paths: the program is a maximum flow problem.

    Pairs supply their mass, tokens take at most p of it. Mass is moved along shortest chains of
    pairs from a token with more than p to one with less until no chain is left; the program is
    then solved without a solver's tolerance. For the five tokens of Algorithm 2 this takes a
    fraction of a solver's time; for many it refines a solver's answer, which is good to 1e-7, given
    as `start`.
    """
    # held[i, j]: mass of the pair {i, j} that goes to i
    held = masses * (0.5 if start is None else start)
    surplus = sure + held.sum(axis=1) - p
    while (chain := _chain(held, surplus)) is not None:
        links = list(pairwise(chain))
        amount = min(surplus[chain[0]], -surplus[chain[-1]], *(held[link] for link in links))
        for i, j in links:
            held[i, j] -= amount
            held[j, i] += amount
        surplus[chain[0]] -= amount
        surplus[chain[-1]] += amount
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: Array = np.where(masses > 0, held / masses, 0.5)
    return np.clip(shares, 0.0, 1.0)


def _chain(held: Array, surplus: Array) -> list[int] | None:
    """Shortest chain of tokens along which surplus mass can move to a token with a deficit."""
    came_from = {int(i): -1 for i in np.flatnonzero(surplus > LEAST_FLOW)}
    if not came_from or not (surplus < -LEAST_FLOW).any():
        return None
    queue = deque(came_from)
    movable = held > LEAST_FLOW
    while queue:
        i = queue.popleft()
        for j in np.flatnonzero(movable[i]).tolist():
            if j in came_from:
                continue
            came_from[j] = i
            if surplus[j] < -LEAST_FLOW:
                chain = [j]
                while came_from[chain[-1]] >= 0:
                    chain.append(came_from[chain[-1]])
                return chain[::-1]
            queue.append(j)
    return None
