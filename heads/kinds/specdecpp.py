"""SpecDec++'s acceptance head: a residual network on the draft's state after the token."""

from __future__ import annotations

from typing import Any, ClassVar

from heads.model import StateHead


class AcceptanceHead(StateHead, paper_url="https://arxiv.org/abs/2405.19715"):
    """Predict whether the target accepts a drafted token (SpecDec++, Huang et al., 2405.19715).

    A residual network on the draft's last hidden state, the one that its output embedding reads,
    at the position of the drafted token after the draft consumed it. The blocks do not share
    weights.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases the raw output to
            a/(a + w(1 - a)); `probability` undoes that. 1 means no bias.
        **about: draft, sampling and probe of `BaseHead`.
    """

    kind: ClassVar[str] = "specdec++"
    lag: ClassVar[int] = 1
    reads = ("hidden",)

    def __init__(
        self, *, hidden_size: int, depth: int = 3, rejection_weight: float = 1.0, **about: Any
    ) -> None:
        super().__init__(hidden_size, depth, rejection_weight=rejection_weight, **about)
