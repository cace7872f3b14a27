"""Selecting one of two drafted tokens, by a rule whose distribution is known exactly.

A rule for two drafts X1 ~ q1, X2 ~ q2 is given by shares of unordered pairs: the pair {i, j} has
mass q1(i) q2(j) + q1(j) q2(i), and the rule decides which share of it goes to i. (Khisti
et al. 2025, arXiv:2410.18234, equation 197, lets the share depend on who drew which; averaging
over that reaches the same distributions with half the variables.) A large vocabulary is reduced
to a few groups: likely tokens by themselves, the others by their p/q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

# Ratios p/q from 1/16 to 16 in steps of an eighth of an octave.
OCTAVES, PER_OCTAVE = 4, 8
BUCKETS = 2 * OCTAVES * PER_OCTAVE

NO_IDS: Ids = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Selection:
    """A random choice of one of n drafted tokens."""

    distribution: Array  # (V,) exact distribution b of the selected token
    weights: Callable[[list[int]], list[float]]  # of each draft, given the n tokens


@dataclass(frozen=True)
class PairRule:
    """Which of two different tokens is selected.

    Tokens are sorted into G groups. Between groups there is a share for every pair of groups;
    within a group the first draft is taken with a constant probability, except that the tokens of
    one group may be put in a strict order of preference.
    `shares` (G, G) has the probability that the token in group g is selected over one in group h:
    shares[g, h] + shares[h, g] = 1. The diagonal is not used.
    """

    group: Ids  # (V,) of every token
    shares: Array
    first: float = 0.5  # probability of taking the first draft if both lie in one group
    ranked: Ids = field(default_factory=lambda: NO_IDS)  # all tokens of a group in order

    def prefer(self, i: int, j: int) -> float:
        """Probability of selecting the first draft, given X1 = i and X2 = j."""
        if i == j:
            return 1.0
        g, h = self.group[i], self.group[j]
        if g != h:
            return float(self.shares[g, h])
        if not (self.ranked.size and self.group[self.ranked[0]] == g):
            return self.first
        return float(np.flatnonzero(self.ranked == i)[0] < np.flatnonzero(self.ranked == j)[0])

    def distribution(self, q1: Array, q2: Array) -> Array:
        """(V,) the exact distribution b of the selected token, in O(V + G^2).

        Implements equations 9, 11 and 196 of Khisti et al. 2025 (198 to 201 for q1 != q2), for
        whatever shares the rule has: token i of group g gets its part of every pair it is in,
        q1(i) sum_h Q2(h) shares[g, h] + q2(i) sum_h Q1(h) shares[g, h]. Where drafts have one
        distribution, q1 and q2 are the same array.
        """
        same = q1 is q2
        if len(self.shares) == 1:  # first q1 + (1 - first) q2, one of them itself where it is that
            if same or self.first == 1.0:
                return q1
            return q2 if self.first == 0.0 else self.first * q1 + (1.0 - self.first) * q2
        gain_1, gain_2 = self._gains(q1, q2)
        b = gain_1.take(self.group) if not same else (gain_1 + gain_2).take(self.group)
        b *= q1
        if not same:
            b += q2 * gain_2.take(self.group)
        r1, r2 = q1[self.ranked], q2[self.ranked]
        b[self.ranked] += r1 * r2 + r1 * _after(r2) + r2 * _after(r1)
        return b

    def _gains(self, q1: Array, q2: Array) -> tuple[Array, Array]:
        """Two arrays (G,): what a group adds to b per unit of q1, and of q2, in it."""
        count = len(self.shares)
        groups_1 = group_masses(self.group, q1, count)
        groups_2 = groups_1 if q1 is q2 else group_masses(self.group, q2, count)
        within = np.full(count, self.first), np.full(count, 1.0 - self.first)
        if self.ranked.size:  # the order decides there
            ordered = self.group[self.ranked[0]]
            within[0][ordered] = within[1][ordered] = 0.0
        between = self.shares.copy()
        np.fill_diagonal(between, 0.0)
        return (
            between @ groups_2 + within[0] * groups_2,
            between @ groups_1 + within[1] * groups_1,
        )


def pair_masses(q1: Array, q2: Array) -> Array:
    """(m,), (m,) -> (m, m) probability of every unordered pair of different tokens; diagonal 0."""
    masses: Array = np.outer(q1, q2)
    masses += masses.T.copy()
    np.fill_diagonal(masses, 0.0)
    return masses


def _after(masses: Array) -> Array:
    """(n,) for every entry the sum of those after it."""
    later: Array = np.cumsum(masses[::-1])[::-1]
    return np.append(later[1:], 0.0)


def largest(scores: Array, count: int) -> Ids:
    """Ids (count,) of the largest of scores (V,), largest first; all ids if there are fewer."""
    ids: Ids = torch.from_numpy(scores).topk(min(count, len(scores))).indices.numpy()
    return ids


def groups_by_ratio(p: Array, q: Array, head: Ids) -> Ids:
    """A group for every head token, and `BUCKETS` groups of other tokens with similar p/q.

    Tokens with equal p/q should be selected with equal preference, so a group loses no more than
    the width of its interval costs. The h head tokens get the groups 0 .. h-1.
    """
    # Single precision suffices: any assignment gives an exact rule.
    target, draft = torch.from_numpy(p).float(), torch.from_numpy(q).float()
    octaves = target.div_(draft).log2_().nan_to_num_(nan=0.0)
    bucket = ((octaves + OCTAVES) * PER_OCTAVE).clamp_(0, BUCKETS - 1)
    group: Ids = bucket.long().numpy() + len(head)
    group[head] = np.arange(len(head))
    return group


def group_masses(group: Ids, distribution: Array, count: int) -> Array:
    """(count,) probability of every group under a distribution (V,)."""
    masses: Array = np.bincount(group, distribution, count).astype(np.float64, copy=False)
    return masses
