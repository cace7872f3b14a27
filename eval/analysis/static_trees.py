"""Draft trees that are fixed beforehand: how many tokens a round they emit, and which is best.

The target's own text decides this without drawing anything. Let x be text sampled from p, and v_d
the probability, given x, that a round which starts at some position accepts at least d tokens of
it. Every lossless verifier continues as p does from where it stands, so the next start is d + 1
tokens on with probability v_d - v_(d+1), and the number of rounds that a text takes in expectation
follows from left to right (`round_starts`). For rules that decide node by node v_d is a sum over
the nodes of depth d of products of w_r, the probability, given the token of the text, that the
candidate of rank r is accepted and is that token (`eval.analysis.tree_trace`).

The search for the best tree of n nodes is Sequoia's (Chen et al. 2024, arXiv:2402.12374, section
4.1): one acceptance probability a rank, here also a depth, and a dynamic programme over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Tree = tuple["Tree", ...]
"""What hangs below a node: the subtree of each child, in the order of their ranks."""
DEEPEST = 8
"""Most levels of a tree."""


def k_configuration(widths: Sequence[int]) -> Tree:
    """The tree with `widths[d]` children of every node at depth d."""
    tree: Tree = ()
    for width in reversed(widths):
        tree = (tree,) * width
    return tree


def monotone_configurations(product: int, depth: int = DEEPEST) -> Iterator[tuple[int, ...]]:
    """Every k-configuration that widens nowhere, k_1 >= k_2 >= ..., MCSD's monotonic rule.

    Args:
        product: most paths, the product of the widths (MCSD: arXiv:2401.06706).
        depth: most levels.
    """

    def continued(widths: tuple[int, ...], paths: int) -> Iterator[tuple[int, ...]]:
        if widths:
            yield widths
        if len(widths) == depth:
            return
        for width in range(1, min(widths[-1] if widths else product, product // paths) + 1):
            yield from continued((*widths, width), paths * width)

    yield from continued((), 1)


@cache
def nodes_of(tree: Tree) -> int:
    """Drafted nodes, N."""
    return sum(1 + nodes_of(child) for child in tree)


@cache
def depth_of(tree: Tree) -> int:
    """Levels."""
    return max((1 + depth_of(child) for child in tree), default=0)


@cache
def inner_nodes_of(tree: Tree) -> int:
    """Nodes that the draft runs to draw their children, the committed token among them."""
    return int(bool(tree)) + sum(inner_nodes_of(child) for child in tree)


def child_counts(tree: Tree) -> list[list[int]]:
    """Children of each node, level by level from the root; childless ends are left out."""
    counts, level = [], [tree]
    while any(level):
        counts.append([len(node) for node in level])
        level = [child for node in level for child in node]
    return counts


def survival(tree: Tree, ranks: Reals) -> Reals:
    """The probability, given the text, that a round accepts at least d of its tokens.

    Args:
        tree: of depth D.
        ranks: (R, N, S) w_r at each position of R texts, 0 in the padding; S or fewer children.

    Returns:
        (D, R, N): of rounds that start at each position, d = 1 .. D.

    Raises:
        ValueError: if a node has more children than there are ranks.
    """
    rollouts, width, known = ranks.shape
    ones = np.ones((1, rollouts, width))

    @cache
    def below(node: Tree) -> Reals:
        """(1 + depth, R, N); row 0 is the node itself."""
        if len(node) > known:
            raise ValueError(f"the trace knows {known} ranks, and a node has {len(node)} children")
        made = np.concatenate([ones, np.zeros((depth_of(node), rollouts, width))])
        for child in set(node):
            of_child = [rank for rank, each in enumerate(node) if each == child]
            weight = ranks[..., of_child].sum(axis=-1)
            further = below(child)
            made[1, :, :] += weight
            made[2 : 1 + len(further), :, :-1] += weight[:, :-1] * further[1:, :, 1:]
        return made

    return below(tree)[1:]


def round_starts(survived: Reals, lengths: NDArray[np.int64]) -> Reals:
    """The probability, given the text, that a round starts at each position: (R, N).

    Its sum over positions is the expected number of rounds that the text takes.

    Args:
        survived: (D, R, N) from `survival`, or any v_d that does not rise with d.
        lengths: (R,) tokens of each text; those that are accepted beyond it end it.
    """
    depth, rollouts, width = survived.shape
    reached = np.concatenate([np.ones((1, rollouts, width)), survived])
    # Of a round at a position: that it accepts d tokens and no more, d = 0 .. D.
    ends = reached - np.concatenate([survived, np.zeros((1, rollouts, width))])
    starts = np.zeros((rollouts, width + depth + 1))
    starts[:, 0] = 1.0
    for position in range(width):
        starts[:, position] *= position < lengths
        here = starts[:, position]
        starts[:, position + 1 : position + depth + 2] += here[:, None] * ends[:, :, position].T
    return starts[:, :width]


@dataclass(frozen=True, slots=True)
class BestTree:
    """The best tree of at most so many nodes under one acceptance probability a depth and rank.

    Attributes:
        tree: it.
        tokens: what it emits a round in expectation, the bonus token included.
    """

    tree: Tree
    tokens: float


def positional_acceptance(
    ranks: Reals, lengths: NDArray[np.int64], starts: Reals, depth: int = DEEPEST
) -> Reals:
    """(depth, S) the acceptance of each rank at each depth, averaged over texts.

    Acceptance clusters: where one token was accepted, the next is more likely to be, and rounds
    start where drafts fail. Depth d is therefore averaged over the positions d after a start by the
    chance that a round starts there and the first candidates of the d before were accepted.

    Args:
        ranks: (R, N, S) as in `survival`.
        lengths: (R,) tokens of each text.
        starts: (R, N) chance that a round starts at a position, as from `round_starts`.
        depth: how many depths.
    """
    inside = np.arange(ranks.shape[1]) < lengths[:, None]
    alive, levels = starts, []
    for level in range(depth):
        here = ranks[:, level:]
        weight = alive[:, : here.shape[1]] * inside[:, level:]
        levels.append((weight[..., None] * here).sum(axis=(0, 1)) / max(weight.sum(), 1e-300))
        alive = weight * here[..., 0]
    return np.stack(levels)


def positional_tokens(tree: Tree, acceptance: Reals) -> float:
    """Expected tokens a round of a tree if acceptance only depends on depth and rank.

    Args:
        tree: it.
        acceptance: (D, S) as from `positional_acceptance`; D at least the tree's depth.
    """

    @cache
    def below(node: Tree, depth: int) -> float:
        return 1.0 + sum(
            float(acceptance[depth, rank]) * below(child, depth + 1)
            for rank, child in enumerate(node)
        )

    return below(tree, 0)


def best_trees(acceptance: Reals, nodes: int) -> list[BestTree]:
    """The tree of at most n nodes that emits most tokens a round, for n = 0 .. `nodes`.

    F(d, n) is what a node at depth d adds with n nodes below it: 1, and the best division of these
    among its children. G(d, n, r) is that division from the child of rank r on:
    max over s of a(d, r) F(d + 1, s - 1) + G(d, n - s, r + 1), or no child at all.

    Args:
        acceptance: (D, S) of each rank at each depth; no tree is deeper, and no node has more
            children.
        nodes: the largest tree.

    Raises:
        ValueError: if acceptance is negative.
    """
    if (acceptance < 0).any():
        raise ValueError("acceptance probabilities must not be negative")
    deepest, ranks = acceptance.shape
    value = np.ones((deepest + 1, nodes + 1))  # F
    division = np.zeros((deepest, nodes + 1, ranks + 1))  # G
    first = np.zeros((deepest, nodes + 1, ranks), dtype=np.int64)  # s, 0: no child
    for depth in reversed(range(deepest)):
        for rank in reversed(range(ranks)):
            gains = acceptance[depth, rank] * value[depth + 1]
            for n in range(1, nodes + 1):
                # s = 1 .. n nodes go to this child, itself included.
                options = gains[:n] + division[depth, n - 1 :: -1, rank + 1][:n]
                best = int(options.argmax())
                if options[best] > 0.0:
                    division[depth, n, rank] = options[best]
                    first[depth, n, rank] = best + 1
        value[depth] = 1.0 + division[depth, :, 0]

    @cache
    def built(depth: int, n: int) -> Tree:
        children: list[Tree] = []
        rank = 0
        while depth < deepest and rank < ranks and (share := int(first[depth, n, rank])):
            children.append(built(depth + 1, share - 1))
            n, rank = n - share, rank + 1
        return tuple(children)

    return [BestTree(built(0, n), float(value[0, n])) for n in range(nodes + 1)]
