"""The best shares of a set of pairs: the program of Khisti et al. and an equivalent flow."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from eval.verifiers.selection.groups import Array

# More pairs than this take minutes and gigabytes (630 tokens).
MAX_PAIRS = 200_000
# Flow below this is rounding.
EPSILON = 1e-15


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
    came_from = {int(i): -1 for i in np.flatnonzero(surplus > EPSILON)}
    if not came_from or not (surplus < -EPSILON).any():
        return None
    queue = deque(came_from)
    movable = held > EPSILON
    while queue:
        i = queue.popleft()
        for j in np.flatnonzero(movable[i]).tolist():
            if j in came_from:
                continue
            came_from[j] = i
            if surplus[j] < -EPSILON:
                chain = [j]
                while came_from[chain[-1]] >= 0:
                    chain.append(came_from[chain[-1]])
                return chain[::-1]
            queue.append(j)
    return None
