"""The acceptance head of a draft model, for transformers' AutoModel with trust_remote_code=True.

From the last hidden state of the draft after it consumed a drafted token, the head predicts whether
the target will accept that token (SpecDec++, Huang et al., arXiv:2405.19715). The file needs torch
and transformers only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class AcceptanceHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """The settings of a head.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases sigmoid(logit) to
            a/(a + w(1 - a)) where a is the probability of acceptance; sigmoid(logit + log w) is a.
        draft: name of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        **kwargs: what every configuration has.
    """

    model_type = "acceptance_head"

    def __init__(
        self,
        hidden_size: int = 1,
        depth: int = 3,
        rejection_weight: float = 1.0,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.depth = depth
        self.rejection_weight = rejection_weight
        self.draft = draft
        self.sampling = sampling
        super().__init__(**kwargs)


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)): (..., H) -> (..., H)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the block to (..., H)."""
        return hidden + nn.functional.silu(self.linear(hidden))


class AcceptanceHeadModel(PreTrainedModel):  # type: ignore[misc]
    """A residual network on the draft's last hidden state, the one its output embedding reads.

    Attributes:
        lag: tokens that must be drawn after a token before the head judges it.
    """

    config_class = AcceptanceHeadConfig
    lag = 1

    def __init__(self, config: AcceptanceHeadConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.depth))
        self.output = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the raw acceptance logit of the token just consumed.

        Args:
            hidden: (..., H), any float type.

        Returns:
            (...) logits in the precision of the parameters.

        Raises:
            ValueError: if the last dimension is not H.
        """
        if hidden.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"this head reads hidden states of width {self.config.hidden_size}, got "
                f"{hidden.shape[-1]}; it was trained for the draft "
                f"{self.config.draft or '(not recorded)'}"
            )
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            state = hidden.to(self.output.weight.dtype)
            for block in self.blocks:
                state = block(state)
            logits: Tensor = self.output(state)
        return logits.squeeze(-1)
