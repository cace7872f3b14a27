"""The residual of greedy block verification, which persists from one round into the next.

Greedy block verification accepts as much of a draft of L tokens as any coupling of the two joint
distributions can. After a rejection the output is still correct only if the next `remaining` tokens
follow a modified target, norm((ratio p - q)+), whose ratio is updated with every token (Sun et al.
2024, arXiv:2403.10444v1, Algorithm 3). A rejection while such a residual persists adds another
one on top of it, so there may be several at once; the oldest modifies p itself, every later one
modifies the target as the earlier ones leave it.

Persistent residuals are plain values. The verifier of the next round holds them
(`Verifier.residuals`), so the decoder passes them on by using the verifier that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eval.drafts import DraftTree
from specdata.probability import residual


@dataclass(frozen=True, slots=True)
class PersistentResidual:
    """A modification of the target for the next tokens.

    The ratio is the joint target probability over the joint draft probability of the tokens since
    the start of the round in which the rejection occurred.
    """

    ratio: float
    remaining: int  # tokens still to be drawn from the modified target, at least 1


PersistentResiduals = tuple[PersistentResidual, ...]
"""Oldest first."""


def scaled_residual(ratio: float, p: Tensor, q: Tensor) -> Tensor:
    """(V,) norm((ratio p - q)+), or p where that has no mass; no large ratio overflows."""
    return residual(p, q / ratio) if ratio > 1.0 else residual(ratio * p, q)


def modified_targets(residuals: PersistentResiduals, p: Tensor, q: Tensor) -> list[Tensor]:
    """At one position p (V,), then p as modified by the oldest residual, then by the next, too."""
    distributions = [p]
    for item in residuals:
        distributions.append(scaled_residual(item.ratio, distributions[-1], q))
    return distributions


def advance(
    residuals: PersistentResiduals, targets: Sequence[Tensor], q: Tensor, token: int
) -> PersistentResiduals:
    """The persistent residuals after one more token: ratios updated, expired ones dropped.

    A token with q = 0 has an infinite ratio: the modified target then equals the one below it, and
    the residual is dropped.

    `targets` are the n distributions (V,) that the residuals modify, from `modified_targets`.
    """
    kept, drafted = [], float(q[token])
    for item, distribution in zip(residuals, targets, strict=True):
        ratio = item.ratio * float(distribution[token]) / drafted if drafted > 0 else math.inf
        if item.remaining > 1 and math.isfinite(ratio):
            kept.append(PersistentResidual(ratio, item.remaining - 1))
    return tuple(kept)


def modified_rows(residuals: PersistentResiduals, tree: DraftTree, target: Tensor) -> Tensor:
    """The target's distributions (L+1, V) along a chain, modified by residuals of earlier rounds.

    Rows after a drafted token that the modified target excludes keep the target's own values: no
    verification reaches them. Raises ValueError if a residual reaches past the chain and
    `tree.tail` is missing.
    """
    if needs_tail(residuals, len(tree)) and tree.tail is None:
        raise ValueError(
            f"a residual persists over the next {max(item.remaining for item in residuals)} tokens,"
            f" but the draft's distribution after its {len(tree)} tokens is missing: pass"
            " DraftTree.chain(..., tail=...) whenever verifier.needs_tail(length) is True"
        )
    rows = target.clone()
    for depth in range(len(tree) + 1):
        if not residuals:
            break
        q = draft_distribution(tree, depth)
        *targets, rows[depth] = modified_targets(residuals, target[depth], q)
        if depth < len(tree):
            x = tree.token_list[depth]
            if not float(rows[depth, x]) > 0:
                break
            residuals = advance(residuals, targets, q, x)
    return rows


def residuals_after_round(
    residuals: PersistentResiduals,
    new: PersistentResidual | None,
    tree: DraftTree,
    target: Tensor,
    accepted: int,
    token: int,
) -> PersistentResiduals:
    """The residuals that the next round starts with, of those that this one started with.

    Args:
        residuals: these.
        new: the residual that this round's rejection adds at the last accepted token, if any.
        tree: the chain of L tokens that was verified.
        target: (L+1, V) the target's own distributions, unmodified.
        accepted: how many drafted tokens were accepted.
        token: the token emitted after them.
    """
    for depth, x in enumerate([*tree.token_list[:accepted], token]):
        if depth == accepted and new is not None:
            residuals = (*residuals, new)
        if residuals:
            q = draft_distribution(tree, depth)
            # The target as modified by the newest residual is not needed to update the ratios.
            targets = modified_targets(residuals[:-1], target[depth], q)
            residuals = advance(residuals, targets, q, x)
    return residuals


def needs_tail(residuals: Sequence[PersistentResidual], length: int) -> bool:
    """True if a chain of `length` tokens must hold the draft's distribution after its last one."""
    return any(item.remaining > length for item in residuals)


def draft_distribution(tree: DraftTree, depth: int) -> Tensor:
    """(V,) the draft's distribution after `depth` tokens of a chain."""
    if depth < len(tree):
        return tree.distribution_of(depth + 1)
    assert tree.tail is not None
    return tree.tail
