"""The places of rounds along known texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdata.lm_head import LMHead

GOLDEN = (5**0.5 - 1) / 2


class Place(NamedTuple):
    """One place of every round along texts.

    Attributes:
        states: (B, T, H) the draft's last; at position t of a round that began at t - s.
        kept: (B, T) bool where they are read.
        share: of the rounds, that were kept.
    """

    states: Tensor
    kept: Tensor
    share: float = 1.0


class Along(Protocol):
    """How a kind of draft gives its states along texts at each place of a round."""

    def __call__(
        self,
        draft: LMHead,
        ids: Tensor,
        count: int,
        /,
        *,
        attention: Tensor | None = None,
        taps: Tensor | None = None,
        begins: Tensor | None = None,
        dropping: int | None = None,
    ) -> Iterator[Place]:
        """The states of a draft along texts.

        Args:
            draft: a gradient reaches it.
            ids: (B, T); padding is on the right, where no token sees it.
            count: how many places; a plain draft, of which all are alike, gives one.
            attention: (B, T), 1 at tokens, for a plain draft.
            taps: (B, T, states) the target's, if the draft reads any.
            begins: (B, T) bool where rounds begin that are asked for, by default anywhere; prompts,
                which nobody drafts, are most of a batch. Places after the first have no meaning
                elsewhere, and at t < s.
            dropping: a number, other in each step, that decides which rounds lose their masks;
                None: none does.
        """


def window(begins: Tensor) -> Tensor:
    """(B, T) bool -> (B, W) consecutive positions that hold all that are wanted of each row."""
    length = begins.shape[1]
    at = torch.arange(length, device=begins.device)
    first = torch.where(begins, at, length).amin(dim=1)
    last = torch.where(begins, at, -1).amax(dim=1)
    width = max(1, int((last - first).max()) + 1)
    return first.clamp(max=length - width)[:, None] + at[:width]


def ranks(begin: Tensor, step: int) -> Tensor:
    """Evenly spread numbers in [0, 1) of rounds, others in each step; float32 would run out."""
    return (begin.double() + step * GOLDEN**2) * GOLDEN % 1.0
