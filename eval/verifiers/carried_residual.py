"""The residual that greedy block verification carries from one round into the next.

Greedy block verification accepts as much of a draft of L tokens as any coupling of the two joint
distributions can. After a rejection the output is still correct only if the next `remaining` tokens
follow a modified target, norm((ratio p - q)+), whose ratio is updated with every token (Sun et al.
2024, arXiv:2403.10444v1, Algorithm 3). A rejection while such a residual is carried adds another
one on top of it, so several may be carried at once; the oldest modifies p itself, every later one
modifies the target as the earlier ones leave it.

Carried residuals are plain values. The verifier of the next round holds them
(`Verifier.carried`), so the decoder passes them on by using the verifier that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eval.drafts import DraftTree
from specdata.probability import residual


@dataclass(frozen=True, slots=True)
class CarriedResidual:
    """A modification of the target for the next tokens.

    Args:
        ratio: joint target probability over joint draft probability of the tokens since the start
            of the round in which the rejection occurred.
        remaining: tokens that are still to be drawn from the modified target, at least 1.
    """

    ratio: float
    remaining: int


CarriedResiduals = tuple[CarriedResidual, ...]
"""Oldest first."""


def scaled_residual(ratio: float, p: Tensor, q: Tensor) -> Tensor:
    """norm((ratio p - q)+), or p where that has no mass; does not overflow for large ratios.

    Args:
        ratio: factor of p, not negative.
        p: (V,) target's distribution.
        q: (V,) draft's distribution.

    Returns:
        (V,) distribution.
    """
    return residual(p, q / ratio) if ratio > 1.0 else residual(ratio * p, q)


def modified_targets(carried: CarriedResiduals, p: Tensor, q: Tensor) -> list[Tensor]:
    """The target's distribution at one position before and after every modification.

    Args:
        carried: n residuals.
        p: (V,) the target's own distribution.
        q: (V,) the draft's distribution.

    Returns:
        n + 1 distributions (V,): p, then the target as modified by the oldest residual, and so on;
        the last one is modified by all of them.
    """
    distributions = [p]
    for item in carried:
        distributions.append(scaled_residual(item.ratio, distributions[-1], q))
    return distributions


def advance(
    carried: CarriedResiduals, targets: Sequence[Tensor], q: Tensor, token: int
) -> CarriedResiduals:
    """The carried residuals after one more token: ratios updated, expired ones dropped.

    A token with q = 0 has an infinite ratio: the modified target then equals the one below it, and
    the residual is dropped.

    Args:
        carried: n residuals.
        targets: n distributions (V,), the target that each residual modifies, as given by
            `modified_targets`.
        q: (V,) the draft's distribution at the position of the token.
        token: what was emitted there.
    """
    kept, drafted = [], float(q[token])
    for item, distribution in zip(carried, targets, strict=True):
        ratio = item.ratio * float(distribution[token]) / drafted if drafted > 0 else math.inf
        if item.remaining > 1 and math.isfinite(ratio):
            kept.append(CarriedResidual(ratio, item.remaining - 1))
    return tuple(kept)


def modified_rows(carried: CarriedResiduals, tree: DraftTree, target: Tensor) -> Tensor:
    """The target's distributions along a chain, modified by the residuals carried into it.

    Rows after a drafted token that the modified target excludes keep the target's own values: no
    verification reaches them.

    Args:
        carried: residuals from earlier rounds.
        tree: a chain of L tokens.
        target: (L+1, V) the target's own distributions.

    Returns:
        (L+1, V).

    Raises:
        ValueError: if a residual reaches past the chain and `tree.tail` is missing.
    """
    check_tail(carried, tree)
    rows = target.clone()
    for depth in range(len(tree) + 1):
        if not carried:
            break
        q = draft_distribution(tree, depth)
        *targets, rows[depth] = modified_targets(carried, target[depth], q)
        if depth < len(tree):
            x = tree.token_list[depth]
            if not float(rows[depth, x]) > 0:
                break
            carried = advance(carried, targets, q, x)
    return rows


def carried_after_round(
    carried: CarriedResiduals,
    new: CarriedResidual | None,
    tree: DraftTree,
    target: Tensor,
    accepted: int,
    token: int,
) -> CarriedResiduals:
    """The residuals that the next round starts with.

    Args:
        carried: those that this round started with.
        new: the residual that this round's rejection adds at the last accepted token, if any.
        tree: the chain of L tokens that was verified.
        target: (L+1, V) the target's own distributions, unmodified.
        accepted: how many drafted tokens were accepted.
        token: the token emitted after them.
    """
    for depth in range(accepted):
        if carried:
            carried = _advance_at(carried, tree, target, depth, tree.token_list[depth])
    if new is not None:
        carried = (*carried, new)
    return _advance_at(carried, tree, target, accepted, token) if carried else ()


def _advance_at(
    carried: CarriedResiduals, tree: DraftTree, target: Tensor, depth: int, token: int
) -> CarriedResiduals:
    q = draft_distribution(tree, depth)
    # The target as modified by the newest residual is not needed to update the ratios.
    return advance(carried, modified_targets(carried[:-1], target[depth], q), q, token)


def needs_tail(carried: Sequence[CarriedResidual], length: int) -> bool:
    """Whether a chain of `length` tokens must hold the draft's distribution after its last one."""
    return any(item.remaining > length for item in carried)


def check_tail(carried: CarriedResiduals, tree: DraftTree) -> None:
    """Raise ValueError unless q is known at every position that a carried residual reaches."""
    if needs_tail(carried, len(tree)) and tree.tail is None:
        raise ValueError(
            f"a residual is carried over the next {max(item.remaining for item in carried)} tokens,"
            f" but the draft's distribution after its {len(tree)} tokens is missing: pass"
            " DraftTree.chain(..., tail=...) whenever verifier.needs_tail(length) is True"
        )


def draft_distribution(tree: DraftTree, depth: int) -> Tensor:
    """(V,) the draft's distribution after `depth` tokens of a chain.

    Raises:
        ValueError: after the last token of a chain without `tail`.
    """
    if depth < len(tree):
        return tree.distribution_of(depth + 1)
    if tree.tail is None:
        raise ValueError(f"the draft's distribution after its {len(tree)} tokens (tail) is missing")
    return tree.tail
