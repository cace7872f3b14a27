"""CarriedResiduals: what greedy block verification owes to the tokens after a rejection.

Greedy block verification accepts as much as any coupling of two distributions of L tokens can. It pays for
that after a rejection: the next `left` tokens follow a modified target, norm((ratio p - q)+), whose
ratio is updated with every token (Sun et al. 2024, arXiv:2403.10444v1, Algorithm 3). A rejection
inside that region opens another carried residual over the first, so there may be several; the oldest is the
innermost and modifies p itself.

CarriedResiduals are plain values. The verifier of the next round holds them (`Verifier.carried`).
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
    """A modified target for the next tokens.

    Args:
        ratio: target over draft probability of the tokens since the carried residual's round began.
        left: tokens that are still to be drawn under the carried residual, at least 1.
    """

    ratio: float
    left: int


CarriedResiduals = tuple[CarriedResidual, ...]
"""Oldest first."""


def scaled_residual(ratio: float, p: Tensor, q: Tensor) -> Tensor:
    """norm((ratio p - q)+), (V,); p where nothing is left. A large ratio does not overflow."""
    return residual(p, q / ratio) if ratio > 1.0 else residual(ratio * p, q)


def layers(carried: CarriedResiduals, p: Tensor, q: Tensor) -> list[Tensor]:
    """The target without carried, under the oldest, .. under all: distributions (V,) at one place.

    Args:
        carried: n carried.
        p: the target's own distribution there.
        q: the draft's.
    """
    distributions = [p]
    for item in carried:
        distributions.append(scaled_residual(item.ratio, distributions[-1], q))
    return distributions


def advanced(
    carried: CarriedResiduals, below: Sequence[Tensor], q: Tensor, token: int
) -> CarriedResiduals:
    """The carried after a token was emitted.

    A token that the draft never proposes has an infinite ratio: nothing is owed for it any more.

    Args:
        carried: n carried.
        below: the target that each carried residual modifies, from `layers`.
        q: (V,) the draft's distribution at the place of the token.
        token: what was emitted there.
    """
    kept, drafted = [], float(q[token])
    for item, distribution in zip(carried, below, strict=True):
        ratio = item.ratio * float(distribution[token]) / drafted if drafted > 0 else math.inf
        if item.left > 1 and math.isfinite(ratio):
            kept.append(CarriedResidual(ratio, item.left - 1))
    return tuple(kept)


def target_with_carried(carried: CarriedResiduals, tree: DraftTree, target: Tensor) -> Tensor:
    """(L+1, V) the target's distributions along a chain, under the carried held before it.

    Rows behind a token that the framed target excludes are left alone: no one gets there.

    Raises:
        ValueError: if the carried reach past the chain and `tree.tail` is missing.
    """
    check_tail(carried, tree)
    rows = target.clone()
    for depth in range(len(tree) + 1):
        if not carried:
            break
        q = distribution_at(tree, depth)
        *below, rows[depth] = layers(carried, target[depth], q)
        if depth < len(tree):
            x = tree.token_list[depth]
            if not float(rows[depth, x]) > 0:
                break
            carried = advanced(carried, below, q, x)
    return rows


def carried_after(
    carried: CarriedResiduals,
    opened: CarriedResidual | None,
    tree: DraftTree,
    target: Tensor,
    accepted: int,
    token: int,
) -> CarriedResiduals:
    """The carried that the next round starts with.

    Args:
        carried: those that this round started with.
        opened: the carried residual that this round's rejection opens at the last accepted token.
        tree: the chain that was verified.
        target: (L+1, V) the target's own distributions, without carried.
        accepted: how many drafted tokens were accepted.
        token: the token emitted after them.
    """
    for depth in range(accepted):
        if carried:
            carried = _passed(carried, tree, target, depth, tree.token_list[depth])
    if opened is not None:
        carried = (*carried, opened)
    return _passed(carried, tree, target, accepted, token) if carried else ()


def _passed(
    carried: CarriedResiduals, tree: DraftTree, target: Tensor, depth: int, token: int
) -> CarriedResiduals:
    q = distribution_at(tree, depth)
    # The distribution above the newest carried residual is not needed to go on.
    return advanced(carried, layers(carried[:-1], target[depth], q), q, token)


def needs_tail(carried: Sequence[CarriedResidual], length: int) -> bool:
    """Whether a chain of `length` tokens must carry the draft's distribution after its last one."""
    return any(item.left > length for item in carried)


def check_tail(carried: CarriedResiduals, tree: DraftTree) -> None:
    """Raise ValueError unless the draft's distributions are known wherever the carried reach."""
    if needs_tail(carried, len(tree)) and tree.tail is None:
        raise ValueError(
            f"a residual is carried over the next {max(item.left for item in carried)} tokens, but"
            f" the draft's distribution after its {len(tree)} tokens is missing: pass DraftTree.chain(...,"
            " tail=...) whenever verifier.needs_tail(length) is True"
        )


def distribution_at(tree: DraftTree, depth: int) -> Tensor:
    """(V,) the draft's distribution after `depth` tokens of a chain."""
    if depth < len(tree):
        return tree.distribution_of(depth + 1)
    if tree.tail is None:
        raise ValueError(f"the draft's distribution after its {len(tree)} tokens (tail) is missing")
    return tree.tail
