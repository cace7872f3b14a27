"""Which of K drafted tokens goes on to speculative sampling, and the exact distribution of that token.

Khisti et al. 2025 (arXiv:2410.18234) show that the best rule for several drafts is a selection
followed by ordinary speculative sampling whose draft distribution is the selected token's distribution b. Acceptance
is sum_x min(p, b) at least, so a selection is judged by it. A selection may look at p and at the
draft's distributions but chooses its form before it sees the tokens, so taking the best of several forms
costs nothing in exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eval.verifiers.selection.linear_program import solve_flow, solve_program
from eval.verifiers.selection.luce import fit_pair, fit_race
from eval.verifiers.selection.pairs import (
    BUCKETS,
    NO_IDS,
    PairRule,
    blind,
    groups_by_ratio,
    largest,
    pair_masses,
    sums,
)

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Solver = Literal["lp", "truncated", "truncated_nosort", "luce"]

# Tokens that are put in order; the rest hold next to no mass, and a full sort costs milliseconds.
RANKED = 512
# Tokens that are letters of their own where drafts of one distribution meet a large vocabulary.
LETTERS = 512
# Tokens with soft shares of their own; the others share theirs with tokens of similar p/q.
SOFT = 32
# Selections of vocabularies up to this size are remembered: enumeration asks for the same again.
REMEMBERED_SIZE, REMEMBERED = 64, 512


@dataclass(frozen=True)
class Selection:
    """One of n drafted tokens, chosen at random.

    Args:
        distribution: (V,) exact distribution b of the selected token.
        weights: the weight with which each of the n drafts is selected, given their tokens.
    """

    distribution: Array
    weights: Callable[[list[int]], list[float]]


Select = Callable[[Array, Sequence[Array]], Selection]
"""(p (V,), the distribution (V,) of every draft) -> Selection. p may be part of a distribution, summing below 1."""
PairForms = Callable[[Array, Array, Array], Iterator[PairRule]]
"""(p, q1, q2) -> the forms to choose from."""


def selector(solver: Solver, s: int) -> Select:
    """The selection of a solver.

    Two drafts are selected from as the solver says; more by a tournament (Remark 3 of the paper),
    in which the winner so far, whose distribution is known, meets the next draft. Luce selection takes any
    number of drafts of one distribution at once.

    Args:
        solver: "lp", "truncated", "truncated_nosort" or "luce".
        s: tokens whose pairs are optimised by the truncated solvers.

    Raises:
        ValueError: for another solver, or s < 1.
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {', '.join(get_args(Solver))}; got {solver!r}")
    if not (isinstance(s, int) and s >= 1):
        raise ValueError(f"s must be a whole number from 1, got {s!r}")
    forms: dict[str, PairForms] = {
        "lp": full_program,
        "truncated": partial(truncated, s=s),
        "truncated_nosort": partial(truncated_nosort, s=s),
        "luce": luce_pair,
    }
    return _remembering(partial(_select, forms[solver], solver))


def _select(
    forms: PairForms, solver: Solver, p: Array, distributions: Sequence[Array]
) -> Selection:
    alike = all(distribution is distributions[0] for distribution in distributions)
    if solver == "luce" and alike and len(distributions) > 2:
        fitted = fit_race(p, distributions[0], len(distributions))
        return Selection(fitted.distribution, fitted.weights)
    reducible = solver in ("truncated", "truncated_nosort") and len(p) > LETTERS + BUCKETS
    if reducible and alike and len(distributions) > 1:
        return _by_letters(forms, p, distributions)
    return tournament(forms, p, distributions)


def _by_letters(forms: PairForms, p: Array, distributions: Sequence[Array]) -> Selection:
    """A tournament over a reduced vocabulary, for many drafts of one distribution.

    A letter is one of the likeliest tokens, or all others of nearly the same p/q. Selection sees
    letters only, so the selected token of a letter is distributed as q is on that letter.
    """
    q = distributions[0]
    letter = groups_by_ratio(p, q, largest(np.maximum(p, q), LETTERS))
    target, draft = (sums(letter, distribution, LETTERS + BUCKETS) for distribution in (p, q))
    inner = tournament(forms, target, [draft] * len(distributions))
    gain = inner.distribution / np.where(draft > 0, draft, 1.0)
    return Selection(
        q * gain.take(letter), lambda tokens: inner.weights([int(letter[x]) for x in tokens])
    )


def tournament(forms: PairForms, p: Array, distributions: Sequence[Array]) -> Selection:
    """Select between the first two drafts, then between the winner and the next one, and so on."""
    distribution, rules = distributions[0], []
    for challenger in distributions[1:]:
        rule, distribution = best_form(
            p, distribution, challenger, forms(p, distribution, challenger)
        )
        rules.append(rule)

    def weights(tokens: list[int]) -> list[float]:
        chances = [1.0]
        for rule, challenger in zip(rules, tokens[1:], strict=True):
            stays = [rule.prefer(token, challenger) for token in tokens[: len(chances)]]
            kept = [chance * stay for chance, stay in zip(chances, stays, strict=True)]
            lost = [chance * (1 - stay) for chance, stay in zip(chances, stays, strict=True)]
            chances = [*kept, sum(lost)]
        return chances

    return Selection(distribution, weights)


def best_form(p: Array, q1: Array, q2: Array, forms: Iterator[PairRule]) -> tuple[PairRule, Array]:
    """The form that accepts most, with its distribution; taking either draft blindly is always an option."""
    # One half makes b = q for drafts of one distribution; 1 and 0 keep what the better draft alone reaches.
    halves = (0.5,) if q1 is q2 else (0.5, 1.0, 0.0)
    rules = (*forms, *(blind(len(p), first) for first in halves))
    distributions = [(rule, rule.distribution(q1, q2)) for rule in rules]
    return max(distributions, key=lambda pair: float(np.minimum(p, pair[1]).sum()))


def full_program(p: Array, q1: Array, q2: Array) -> Iterator[PairRule]:
    """The exact optimum for two drafts (equations 8, 9 and 199)."""
    head = np.flatnonzero((q1 > 0) | (q2 > 0))
    sure, masses = q1[head] * q2[head], pair_masses(q1[head], q2[head])
    shares = solve_flow(p[head], sure, masses, solve_program(p[head], sure, masses))
    group = np.zeros(len(p), dtype=np.int64)  # undrafted tokens may be anywhere
    group[head] = np.arange(len(head))
    yield PairRule(group, shares)


def truncated(p: Array, q1: Array, q2: Array, s: int) -> Iterator[PairRule]:
    """The truncated program (Algorithm 2, equations 10 to 12), and a softer filling.

    The s tokens with the largest p - q1 q2 share optimally among themselves. The paper lets them
    win over all others, and the others rank among themselves by the same score; that distorts b
    even at p = q. The second form gives every other pair shares in proportion to p/q.
    """
    ranks = largest(p - q1 * q2, RANKED)
    yield _inner_program(p, q1, q2, ranks[:s], ranks[s:])
    yield _soft(p, q1, q2, ranks[:s])


def truncated_nosort(p: Array, q1: Array, q2: Array, s: int) -> Iterator[PairRule]:
    """The variant of appendix G.1: pairs outside the s best tokens are shared evenly."""
    yield _inner_program(p, q1, q2, largest(p - q1 * q2, s), NO_IDS)


def luce_pair(p: Array, q1: Array, q2: Array) -> Iterator[PairRule]:
    """Luce selection from two drafts."""
    yield fit_pair(p, q1, q2)


def _inner_program(p: Array, q1: Array, q2: Array, head: Ids, ranked: Ids) -> PairRule:
    """Optimal shares inside the head, which wins over everything else."""
    first, second = q1[head], q2[head]
    rest_1, rest_2 = max(0.0, q1.sum() - first.sum()), max(0.0, q2.sum() - second.sum())
    sure = first * second + first * rest_2 + second * rest_1
    shares = solve_flow(p[head], sure, pair_masses(first, second))
    # Groups: every head token, those in order, the rest; the lower number wins.
    size = len(head)
    group = np.full(len(p), size + 1)
    group[ranked] = size
    group[head] = np.arange(size)
    full = np.triu(np.ones((size + 2, size + 2)), 1)
    full[:size, :size] = shares
    return PairRule(group, full, ranked=ranked)


def _soft(p: Array, q1: Array, q2: Array, inner: Ids) -> PairRule:
    """Optimal shares inside `inner`; elsewhere i wins over j as p_i/q_i is to p_j/q_j."""
    both = q1 if q1 is q2 else (q1 + q2) / 2
    scores = np.maximum(p, both)
    scores[inner] = -1.0
    head = np.concatenate([inner, largest(scores, min(SOFT, len(p) - len(inner)))])
    group = groups_by_ratio(p, both, head)
    count, m = len(head) + BUCKETS, len(inner)
    target, drafts, first, second = (
        sums(group, distribution, count) for distribution in (p, both, q1, q2)
    )
    odds = np.outer(target, drafts)  # p_i q_j against p_j q_i: no division by q
    total = odds + odds.T
    shares = np.where(total > 0, odds / np.where(total > 0, total, 1.0), 0.5)
    masses = pair_masses(first, second)
    sure = first[:m] * second[:m] + (masses * shares)[:m, m:].sum(axis=1)
    shares[:m, :m] = solve_flow(p[inner], sure, masses[:m, :m])
    return PairRule(group, shares)


def _remembering(select: Select) -> Select:
    """Remember the selections of small vocabularies."""

    @lru_cache(maxsize=REMEMBERED)
    def small(p: bytes, distributions: tuple[bytes, ...]) -> Selection:
        # One array for each distinct distribution, so that equal distributions are recognised; writable, for torch.
        arrays = {
            distribution: np.frombuffer(distribution).copy() for distribution in distributions
        }
        return select(
            np.frombuffer(p).copy(), [arrays[distribution] for distribution in distributions]
        )

    def remembered(p: Array, distributions: Sequence[Array]) -> Selection:
        if len(p) > REMEMBERED_SIZE:
            return select(p, distributions)
        return small(p.tobytes(), tuple(distribution.tobytes() for distribution in distributions))

    return remembered
