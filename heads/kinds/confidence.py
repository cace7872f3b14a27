"""The acceptance head that engines ask of DSpark drafts: a linear map of the state before."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from heads.model import StateHead


class ConfidenceHead(StateHead, paper_url="https://arxiv.org/abs/2607.05147"):
    """Predict whether the target accepts a drafted token, by one linear map of the state before it.

    That is the form of DSpark's (2607.05147), whose states are [h ; markov_w1[token before]], and
    the one head that engines ask. It sees neither the token nor its distribution.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        rejection_weight: as of `AcceptanceHead`.
        **about: draft, sampling and probe of `BaseHead`.
    """

    kind: ClassVar[str] = "confidence"
    reads = ("hidden_before",)

    def __init__(self, *, hidden_size: int, rejection_weight: float = 1.0, **about: Any) -> None:
        super().__init__(hidden_size, 0, rejection_weight=rejection_weight, **about)

    def for_engines(self) -> tuple[Tensor, Tensor]:
        """See `BaseHead.for_engines`."""
        weight, bias = self.output.weight.detach(), self.output.bias.detach()
        return weight, bias + math.log(self.rejection_weight)
