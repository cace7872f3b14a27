"""What drafts say along known texts at each token of a round, for training and measuring.

A round that begins after position t drafts the tokens at t + 1, t + 2, ...: place s of it, counted
from 0, is read at t + s. `along_rounds` gives the states there, of a whole text at a time, as the
draft's kind does (`distill.kinds`): a plain draft reads the text once, and every place is alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from distill.kinds import KINDS
from distill.places import Place
from specdata.draft_kinds import kind_of
from specdata.lm_head import LMHead

DECAY = 0.8
"""Weight of each place of a round over the one before it (that of arXiv:2503.01840)."""


def along_rounds(draft: LMHead, ids: Tensor, count: int, **named: Any) -> Iterator[Place]:
    """The states of a draft along texts at each place of a round; arguments as of `Along`."""
    return KINDS[kind_of(draft.model.config).name].along(draft, ids, count, **named)


def of_round(learnt: Tensor, step: int) -> Tensor:
    """(B, T) bool positions whose tokens are learnt -> those whose round began at such a one."""
    return learnt & nn.functional.pad(learnt, (step, 0))[:, : learnt.shape[1]]


def weights_of(count: int) -> list[float]:
    """Of the places of a round, 1 together."""
    each: list[Any] = [DECAY**step for step in range(count)]
    return [weight / sum(each) for weight in each]
