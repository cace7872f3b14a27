"""Frames: what greedy block verification owes to the tokens after a rejection.

Greedy block verification accepts as much as any coupling of two laws of L tokens can. It pays for
that after a rejection: the next `left` tokens follow a modified target, norm((ratio p - q)+), whose
ratio is updated with every token (Sun et al. 2024, arXiv:2403.10444v1, Algorithm 3). A rejection
inside that region opens another frame over the first, so there may be several; the oldest is the
innermost and modifies p itself.

Frames are plain values. The verifier of the next round holds them (`Verifier.frames`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eval.drafts import DraftTree
from specdata.probability import leftover


@dataclass(frozen=True, slots=True)
class Frame:
    """A modified target for the next tokens.

    Args:
        ratio: target over draft probability of the tokens since the frame's round began.
        left: tokens that are still to be drawn under the frame, at least 1.
    """

    ratio: float
    left: int


Frames = tuple[Frame, ...]
"""Oldest first."""


def residual(ratio: float, p: Tensor, q: Tensor) -> Tensor:
    """norm((ratio p - q)+), (V,); p where nothing is left. A large ratio does not overflow."""
    return leftover(p, q / ratio) if ratio > 1.0 else leftover(ratio * p, q)


def layers(frames: Frames, p: Tensor, q: Tensor) -> list[Tensor]:
    """The target without frames, under the oldest, .. under all: laws (V,) at one place.

    Args:
        frames: n frames.
        p: the target's own law there.
        q: the draft's.
    """
    laws = [p]
    for frame in frames:
        laws.append(residual(frame.ratio, laws[-1], q))
    return laws


def advanced(frames: Frames, below: Sequence[Tensor], q: Tensor, token: int) -> Frames:
    """The frames after a token was emitted.

    A token that the draft never proposes has an infinite ratio: nothing is owed for it any more.

    Args:
        frames: n frames.
        below: the target that each frame modifies, from `layers`.
        q: (V,) the draft's law at the place of the token.
        token: what was emitted there.
    """
    kept, drafted = [], float(q[token])
    for frame, law in zip(frames, below, strict=True):
        ratio = frame.ratio * float(law[token]) / drafted if drafted > 0 else math.inf
        if frame.left > 1 and math.isfinite(ratio):
            kept.append(Frame(ratio, frame.left - 1))
    return tuple(kept)


def framed_target(frames: Frames, tree: DraftTree, target: Tensor) -> Tensor:
    """(L+1, V) the target's laws along a chain, under the frames held before it.

    Rows behind a token that the framed target excludes are left alone: no one gets there.

    Raises:
        ValueError: if the frames reach past the chain and `tree.tail` is missing.
    """
    check_tail(frames, tree)
    rows = target.clone()
    for depth in range(len(tree) + 1):
        if not frames:
            break
        q = law_at(tree, depth)
        *below, rows[depth] = layers(frames, target[depth], q)
        if depth < len(tree):
            x = tree.token_list[depth]
            if not float(rows[depth, x]) > 0:
                break
            frames = advanced(frames, below, q, x)
    return rows


def frames_after(
    frames: Frames,
    opened: Frame | None,
    tree: DraftTree,
    target: Tensor,
    accepted: int,
    token: int,
) -> Frames:
    """The frames that the next round starts with.

    Args:
        frames: those that this round started with.
        opened: the frame that this round's rejection opens at the last accepted token.
        tree: the chain that was verified.
        target: (L+1, V) the target's own laws, without frames.
        accepted: how many drafted tokens were accepted.
        token: the token emitted after them.
    """
    for depth in range(accepted):
        if frames:
            frames = _passed(frames, tree, target, depth, tree.token_list[depth])
    if opened is not None:
        frames = (*frames, opened)
    return _passed(frames, tree, target, accepted, token) if frames else ()


def _passed(frames: Frames, tree: DraftTree, target: Tensor, depth: int, token: int) -> Frames:
    q = law_at(tree, depth)
    # The law above the newest frame is not needed to go on.
    return advanced(frames, layers(frames[:-1], target[depth], q), q, token)


def needs_tail(frames: Sequence[Frame], length: int) -> bool:
    """Whether a chain of `length` tokens must carry the draft's law after its last one."""
    return any(frame.left > length for frame in frames)


def check_tail(frames: Frames, tree: DraftTree) -> None:
    """Raise ValueError unless the draft's laws are known wherever the frames reach."""
    if needs_tail(frames, len(tree)) and tree.tail is None:
        raise ValueError(
            f"a residual is carried over the next {max(frame.left for frame in frames)} tokens, but"
            f" the draft's law after its {len(tree)} tokens is missing: pass DraftTree.chain(...,"
            " tail=...) whenever verifier.needs_tail(length) is True"
        )


def law_at(tree: DraftTree, depth: int) -> Tensor:
    """(V,) the draft's law after `depth` tokens of a chain."""
    if depth < len(tree):
        return tree.law_of(depth + 1)
    if tree.tail is None:
        raise ValueError(f"the draft's law after its {len(tree)} tokens (tail) is missing")
    return tree.tail
