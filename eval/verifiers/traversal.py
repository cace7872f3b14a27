"""Traversal verification: block verification on a tree, leaves first."""

from __future__ import annotations

import math

from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.persistent_residual import scaled_residual
from eval.verifiers.rule import Outcome, Rng
from specdata.errors import NotFiniteError


def traversal(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Test every path down to its leaf, in draw order, before rejecting the prefix it shares.

    Implements Weng et al. 2025 (NeurIPS, arXiv:2505.12398). Paper symbols: M_b is the target p, M_s
    the draft q. Lossless; on a chain it is block verification. Paths are merged by prefix: a path
    that repeats a token already tried is rejected, which still uses up its draw.

    Every node has a share, the probability with which its subtree is to be accepted: 1 for the
    root, and min(1, a p(x)/q(x)) for a child x of a node with share a. A subtree of any form
    accepts with exactly that probability, so it may be tested before later siblings.
    """
    end = _visit(tree, target, rng, [0], 1.0)
    assert end is not None, "the root accepts"
    return end


def _visit(
    tree: DraftTree, target: Tensor, rng: Rng, group: list[int], share: float
) -> Outcome | None:
    """Where the path ends in the subtree below a node (on paths, a group with one prefix)."""
    node, p = group[0], target[group[0]]
    children = tree.children(group)
    removed: list[int] = []
    for index, child in enumerate(children):
        x, q = tree.token_list[child - 1], tree.distribution_of(child)
        if removed:  # the distribution that the token was drawn from lacks the earlier picks
            q = q.clone()
            q[removed] = 0.0
            q = q / q.sum()
        below = share * float(p[x]) / float(q[x])
        if math.isnan(below):
            raise NotFiniteError
        below = min(1.0, below)
        if below > 0.0:
            end = _visit(tree, target, rng, tree.follow(children, index), below)
            if end is not None:
                return end
        last = index == len(children) - 1
        used = share
        if share < 1.0:  # after this rejection m / (m + 1 - a), m = sum (a p - q)+
            mass = float((share * p - q).clamp(min=0.0).sum())
            share = mass / (mass + 1.0 - share)
        # The residual is computed only where a later sibling or the outcome needs it.
        if share == 0.0 or (last and node and not rng.bernoulli(share)):
            return None
        p = scaled_residual(used, p, q)
        if last:
            return Outcome(node, p)
        if tree.how == "distinct":
            removed.append(x)
    return Outcome(node, p) if node == 0 or rng.bernoulli(share) else None
