"""SpecDec++'s acceptance head: from the draft's state after a token to the odds of acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.base import SPECDEC, BaseHead
from heads.inputs import HeadInputs, Moment


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)): (..., H) -> (..., H)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the block to (..., H)."""
        return hidden + nn.functional.silu(self.linear(hidden))


class AcceptanceHead(BaseHead, paper_url="https://arxiv.org/abs/2405.19715"):
    """Predict whether the target accepts a drafted token (SpecDec++, Huang et al., 2405.19715).

    A residual network on the draft's last hidden state, the one that its output embedding reads,
    at the position of the drafted token after the draft consumed it. The blocks do not share
    weights.

    Attributes:
        reads: names of the features in `heads.inputs.FEATURES` that `forward` takes, in its order.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases the raw output to
            a/(a + w(1 - a)); `probability` undoes that. 1 means no bias.
        draft: name or path of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        probe: values of that draft's hidden states; see `heads.probe`.

    Raises:
        ValueError: if a size is out of range.
    """

    kind: ClassVar[str] = SPECDEC
    reads = ("hidden",)
    moments = (Moment.CONSUMED,)

    def __init__(
        self,
        *,
        hidden_size: int,
        depth: int = 3,
        rejection_weight: float = 1.0,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        if hidden_size < 1 or depth < 0:
            raise ValueError(
                f"a head needs hidden_size >= 1 and depth >= 0, got {hidden_size} and {depth}"
            )
        if not 0.0 < rejection_weight < math.inf:
            raise ValueError(f"rejection_weight must be positive, got {rejection_weight}")
        super().__init__()
        self.hidden_size = hidden_size
        self.depth = depth
        self.rejection_weight = rejection_weight
        self.draft = draft
        self.sampling = sampling
        self.probe = probe
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the raw acceptance logit of the token just consumed.

        Args:
            hidden: (..., H), any float type.

        Returns:
            (...) logits in the precision of the parameters, float32 unless the head was converted.

        Raises:
            ValueError: if the last dimension is not H.
        """
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"this head reads hidden states of width {self.hidden_size}, got {hidden.shape[-1]}"
                f"; it was trained for the draft {self.draft or '(not recorded)'}"
            )
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            state = hidden.to(self.output.weight.dtype)
            for block in self.blocks:
                state = block(state)
            logits: Tensor = self.output(state)
        return logits.squeeze(-1)

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`."""
        logits: Tensor = self(*(inputs[name] for name in self.reads))
        return logits
