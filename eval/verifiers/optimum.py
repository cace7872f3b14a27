"""The best acceptance that any lossless rule can reach, the reference for every verifier.

Of all joint distributions of (drafts, emitted token) with the right marginals, the best one puts
as much mass as possible on emitted tokens that were drafted. That is a maximum flow (drafts ->
their tokens -> sink, with capacities Pr(drafts) and p), so by its minimum cut

    alpha* = 1 + min over token sets H of P(H) - Pr(all drafts lie in H).

Khisti et al. 2025 (arXiv:2410.18234) prove it for K = 2 (Theorems 2 and 3, with p and q swapped)
and conjecture it for more; Hu et al. 2025 (ICLR) prove it in general.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eval.verifiers.selection.pairs import Array

# Gap at which the search over independent drafts stops.
OPTIMUM_TOLERANCE = 1e-11
# Step of the trapezoid rule in log time; its error is below 1e-14 (the integrand is analytic).
LOG_STEP = 0.2


def optimal_acceptance(
    p: Tensor, q: Tensor, k: int, how: Literal["iid", "distinct"] = "iid"
) -> float:
    """Best acceptance of K = `k` drafts from one distribution, of (V,) p and q.

    The minimising set is a prefix of the tokens in falling order of q/p, so one sort and two
    cumulative sums find it: O(V log V). For distinct drafts, drawn one after the other without
    replacement, the probability that all lie in a prefix is an integral over an exponential race,
    O(K V) more with about 500 nodes. Raises ValueError for k < 1, another `how`, or distributions
    of different sizes.
    """
    if how not in ("iid", "distinct"):
        raise ValueError(f"how must be 'iid' or 'distinct', got {how!r}")
    target, (draft,) = _distributions(p, [q])
    if k < 1:
        raise ValueError(f"the number of drafts must be 1 or larger, got {k}")
    drafted = np.flatnonzero(draft)
    target, draft = target[drafted], draft[drafted]
    with np.errstate(divide="ignore", over="ignore"):
        order = np.argsort(-draft / target, kind="stable")
    target, draft = target[order], draft[order]
    inside = np.cumsum(draft) ** k if how == "iid" else _all_inside(draft, min(k, len(draft)))
    return float(1.0 + min(0.0, (np.cumsum(target) - inside).min()))


def _all_inside(draft: Array, k: int) -> Array:
    """(V,) for every prefix, Pr(all of K draws without replacement lie in it).

    Let token x arrive at an exponential time of rate q(x): the order of arrivals is the order of
    draws. All K draws lie in H if K tokens of H arrive before the first one outside, so the
    complement is int (1 - Q) exp(-(1 - Q) t) Pr(fewer than K of H by t) dt, and the counts of a
    prefix follow from those of the last one.
    """
    draft = np.maximum(draft, 1e-250)  # smaller rates leave the range of a float64
    outside = np.append(np.cumsum(draft[::-1])[::-1][1:], 0.0)
    slowest = max(outside[:-1].min(initial=1.0), 1e-290)  # keeps 40/slowest finite
    times = np.exp(np.arange(-40.0, np.log(40.0 / slowest) + LOG_STEP, LOG_STEP))
    counts = np.zeros((k, len(times)))  # counts[j]: probability that exactly j tokens arrived
    counts[0] = 1.0
    missed = np.empty(len(draft))
    for index, (rate, rest) in enumerate(zip(draft, outside, strict=True)):
        absent = np.exp(-rate * times)
        arrived = counts[:-1] * (1.0 - absent)
        counts *= absent
        counts[1:] += arrived
        density = rest * times * np.exp(-rest * times)
        missed[index] = LOG_STEP * (density @ counts.sum(axis=0))
    inside = 1.0 - missed
    inside[-1] = 1.0  # nothing lies outside
    return inside


def optimal_acceptance_independent(p: Tensor, qs: Tensor | Sequence[Tensor]) -> float:
    """Best acceptance of independent drafts, each from its own distribution: (K, V), or K of (V,).

    alpha* = 1 + min_H {P(H) - prod_k Q_k(H)}. With different distributions no order of the tokens
    makes the minimiser a prefix, but it is a threshold set: x lies in H where p(x) < sum_k c_k
    q_k(x), and outside where p(x) is larger, with c_k = prod_{j != k} Q_j(H). A branch and bound
    over the box of (Q_1(H), ..., Q_K(H)) uses this to decide tokens, and bounds the product from
    above by the linear interpolants of its factors.

    Guaranteed to within 1e-11 of the optimum for any p, any distributions and any K. Every box
    costs O(K V); ten to a few thousand boxes are needed for two to four distributions, and their
    number may grow exponentially with K. Raises ValueError if there is no distribution, or sizes
    differ.
    """
    target, drafts = _distributions(p, list(qs))
    everything = (np.zeros(len(drafts)), np.ones(len(drafts)))
    best, ticket = 0.0, itertools.count()
    open_boxes = [(-1.0, next(ticket), *everything)]
    while open_boxes:
        bound, _, low, high = heapq.heappop(open_boxes)
        if bound >= best - OPTIMUM_TOLERANCE:
            break
        axis = int(np.argmax(high - low))
        middle = (low[axis] + high[axis]) / 2
        below, above = high.copy(), low.copy()
        below[axis] = above[axis] = middle
        for part in ((low, below), (above, high)):
            bounds = _bounds(target, drafts, *part)
            if bounds is None:
                continue
            value, bound, smallest, largest = bounds
            best = min(best, value)
            if bound < best - OPTIMUM_TOLERANCE:
                heapq.heappush(open_boxes, (bound, next(ticket), smallest, largest))
    return float(1.0 + best)


def _bounds(
    target: Array, drafts: Array, low: Array, high: Array
) -> tuple[float, float, Array, Array] | None:
    """A value, a lower bound and a smaller box for sets with low <= Q(H) <= high; None if empty."""
    inside = target < _slopes(low) @ drafts
    possible = target <= _slopes(high) @ drafts
    low = np.maximum(low, drafts[:, inside].sum(axis=1))
    high = np.minimum(high, drafts[:, possible].sum(axis=1))
    if (low > high + 1e-15).any():
        return None
    open_tokens = possible & ~inside
    value, bound = _value(target, drafts, inside), -np.inf
    for order in (range(len(low)), range(len(low))[::-1]):
        slopes = _interpolant(low, high, order)
        gain = target - slopes @ drafts
        members = inside | (open_tokens & (gain < 0))
        bound = max(bound, float(gain[members].sum() + slopes @ low - low.prod()))
        value = min(value, _value(target, drafts, members))
    return value, bound, low, high


def _value(target: Array, drafts: Array, members: NDArray[np.bool_]) -> float:
    """P(H) - prod_k Q_k(H)."""
    return float(target[members].sum() - drafts[:, members].sum(axis=1).prod())


def _slopes(point: Array) -> Array:
    """(K,) product of the other entries."""
    return np.array([np.delete(point, k).prod() for k in range(len(point))])


def _interpolant(low: Array, high: Array, order: Sequence[int]) -> Array:
    """Slopes of a linear upper bound of the product on a box, exact at `low`.

    prod a - prod low telescopes into terms (a_k - low_k) times factors a (before k) and low (after
    k); every factor a is at most its upper end.
    """
    slopes = np.empty(len(low))
    for place, k in enumerate(order):
        before, after = list(order[:place]), list(order[place + 1 :])
        slopes[k] = high[before].prod() * low[after].prod()
    return slopes


def _distributions(p: Tensor, qs: Sequence[Tensor]) -> tuple[Array, Array]:
    """Distributions as float64 arrays that sum to 1: (V,) and (K, V)."""
    if not qs or any(distribution.shape != p.shape or p.ndim != 1 for distribution in qs):
        shapes = [tuple(distribution.shape) for distribution in qs]
        raise ValueError(f"p and every q must have one shape (V,), got {tuple(p.shape)}, {shapes}")
    target = p.detach().double().cpu().numpy()
    drafts = np.stack([distribution.detach().double().cpu().numpy() for distribution in qs])
    return target / target.sum(), drafts / drafts.sum(axis=1, keepdims=True)
