"""The places of rounds along known texts.

A round that begins after position t drafts the tokens at t + 1, t + 2, ...: place s of it, counted
from 0, is read at t + s. What a draft says there its kind knows (`distill.drafts.round_places`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

DECAY = 0.8
"""Weight of each place of a round over the one before it (that of arXiv:2503.01840)."""
GOLDEN = (5**0.5 - 1) / 2


class Texts(NamedTuple):
    """Whole texts that a draft reads, and which of their rounds are asked for."""

    ids: Tensor  # (B, T); padding is on the right, where no token sees it
    place_count: int  # of a round; a plain draft, of which all are alike, gives one
    attention: Tensor | None = None  # (B, T), 1 at tokens, for a plain draft
    taps: Tensor | None = None  # (B, T, F) the target's states, if the draft reads any
    # (B, T) bool where the rounds begin that are asked for, by default anywhere: prompts, which
    # nobody drafts, are most of a batch. Later places mean nothing elsewhere, nor at t < s.
    begins: Tensor | None = None
    dropping: int | None = None  # of the step, decides which rounds lose masks; None: none does


class Place(NamedTuple):
    """One place of every round along texts."""

    states: Tensor  # (B, T, H) the draft's last; at position t of a round that began at t - s
    kept: Tensor  # (B, T) bool where they are read
    share: float = 1.0  # of the rounds, that were kept


def window(begins: Tensor) -> Tensor:
    """(B, T) bool -> (B, W) consecutive positions that hold all that are wanted of each row."""
    length = begins.shape[1]
    index = torch.arange(length, device=begins.device)
    first = torch.where(begins, index, length).amin(dim=1)
    last = torch.where(begins, index, -1).amax(dim=1)
    width = max(1, int((last - first).max()) + 1)
    return first.clamp(max=length - width)[:, None] + index[:width]


def placed(
    states: Tensor, begin: Tensor, step: int, length: int, kept: Tensor, share: float
) -> Place:
    """Place `step` of texts, of (B, W, H) states of the rounds that begin at (B, W), if `kept`."""
    row = torch.arange(len(begin), device=begin.device)[:, None]
    everywhere = states.new_zeros(len(begin), length, states.shape[-1])
    everywhere = everywhere.index_put((row, begin), states)
    is_kept = kept.new_zeros(len(begin), length)
    is_kept[row, begin] = kept
    return Place(
        nn.functional.pad(everywhere, (0, 0, step, 0))[:, :length],
        nn.functional.pad(is_kept, (step, 0))[:, :length],
        share,
    )


def ranks(begin: Tensor, step: int) -> Tensor:
    """Evenly spread numbers in [0, 1) of rounds, others in each step; float32 would run out."""
    return (begin.double() + step * GOLDEN**2) * GOLDEN % 1.0


def of_round(learnt: Tensor, step: int) -> Tensor:
    """(B, T) bool positions whose tokens are learnt -> those whose round began at such a one."""
    return learnt & nn.functional.pad(learnt, (step, 0))[:, : learnt.shape[1]]


def weights_of(count: int) -> list[float]:
    """Weights of the places of a round, 1 together."""
    weights: list[float] = [DECAY**step for step in range(count)]
    return [weight / sum(weights) for weight in weights]
