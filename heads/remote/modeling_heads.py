"""Acceptance heads of draft models, for transformers' AutoModel with trust_remote_code=True.

A head predicts whether the target will accept a drafted token: SpecDec++'s (Huang et al.,
arXiv:2405.19715) from the draft's last hidden state after it consumed the token, the immediate one
from what is known of the token once it is drawn, that of kind confidence from the state before it.
The file needs torch and transformers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

# What an immediate head may read.
VECTORS = ("hidden_before", "embedding")
NUMBERS = ("log_q", "log_q_max", "margin", "entropy", "log_mass_above")
# Bounds that keep logarithms finite.
LARGEST_MARGIN, LEAST_MASS, LEAST_CHANCE = 30.0, 1e-6, 1e-30


class AcceptanceHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """The settings of a head.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases sigmoid(logit) to
            a/(a + w(1 - a)) where a is the probability of acceptance; sigmoid(logit + log w) is a.
        draft: name of the draft whose hidden states the head reads.
        sampling: temperature, top_k, top_p and min_p under which its labels were made.
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
        reads_state_alone: what its forward takes.
    """

    config_class: type[PretrainedConfig] = AcceptanceHeadConfig
    lag = 1
    reads_state_alone = True

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
        """
        _check_width("hidden states", hidden, self.config.hidden_size, self.config.draft)
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            state = hidden.to(self.output.weight.dtype)
            for block in self.blocks:
                state = block(state)
            logits: Tensor = self.output(state)
        return logits.squeeze(-1)


class ConfidenceHeadConfig(AcceptanceHeadConfig):
    """The same settings, without blocks."""

    model_type = "confidence_acceptance_head"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "depth": 0})


class ConfidenceHeadModel(AcceptanceHeadModel):
    """One linear map of the draft's last hidden state, of the token that is drawn from it."""

    config_class = ConfidenceHeadConfig
    lag = 0


class ImmediateHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """The settings of a head.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        reads: names of the features it reads.
        width: W of the network.
        depth: number of layers between the sum of what it reads and the output.
        scales: feature -> (mean, standard deviation) by which it is standardised.
        draft: name of the draft whose hidden states the head reads.
        sampling: temperature, top_k, top_p and min_p under which its labels were made.
    """

    model_type = "immediate_acceptance_head"

    def __init__(
        self,
        hidden_size: int = 1,
        embedding_size: int = 0,
        reads: Sequence[str] = (),
        width: int = 1,
        depth: int = 0,
        scales: Mapping[str, Sequence[float]] | None = None,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.embedding_size = embedding_size
        self.reads = reads
        self.width = width
        self.depth = depth
        self.scales = scales
        self.draft = draft
        self.sampling = sampling
        super().__init__(**kwargs)


class ImmediateHeadModel(PreTrainedModel):  # type: ignore[misc]
    """A small network on the draft's state, the token's embedding and numbers of the draft."""

    config_class = ImmediateHeadConfig
    lag = 0
    reads_state_alone = False

    def __init__(self, config: ImmediateHeadConfig) -> None:
        super().__init__(config)
        sizes = {
            "hidden_before": config.hidden_size,
            "embedding": config.embedding_size or config.hidden_size,
        }
        self.numbers = [name for name in config.reads if name in NUMBERS]
        self.vectors = nn.ModuleDict(
            {
                name: nn.Linear(sizes[name], config.width, bias=False)
                for name in config.reads
                if name in VECTORS
            }
        )
        if self.numbers:
            self.number_weights = nn.Linear(len(self.numbers), config.width, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.width))
        self.layers = nn.ModuleList(
            nn.Linear(config.width, config.width) for _ in range(config.depth)
        )
        self.output = nn.Linear(config.width, 1)
        self.post_init()

    def forward(
        self, distribution: Tensor, hidden_before: Tensor, token: Tensor, embedding: Tensor
    ) -> Tensor:
        """Return raw acceptance logits; their sigmoid is the probability.

        Args:
            distribution: (..., V) the distribution that the token was drawn from.
            hidden_before: (..., H) the last hidden state of the draft that gave it.
            token: (...) its id.
            embedding: (..., E) the draft's input embedding of the token.

        Returns:
            (...) logits.
        """
        given = {"hidden_before": hidden_before, "embedding": embedding}
        scales = self.config.scales or {}
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(distribution.device.type, enabled=False):
            x: Tensor = self.bias
            for name, layer in self.vectors.items():
                value, size = given[name], cast(nn.Linear, layer).in_features
                _check_width(name, value, size, self.config.draft)
                x = x + layer(value.to(x.dtype) / scales.get(name, (0.0, 1.0))[1])
            if self.numbers:
                x = x + self.number_weights(self._numbers(distribution, token).to(x.dtype))
            for layer in self.layers:
                x = layer(x.relu())
            logits: Tensor = self.output(x.relu())
        return logits.squeeze(-1)

    def _numbers(self, q: Tensor, token: Tensor) -> Tensor:
        """(..., numbers) of distributions (..., V), by their scales."""
        largest = q.topk(2, dim=-1).values.log()
        chance = q.gather(-1, token.unsqueeze(-1))
        above = q.masked_fill(q <= chance, 0.0).sum(dim=-1)
        values = {
            "log_q": chance.squeeze(-1).clamp(min=LEAST_CHANCE).log(),
            "log_q_max": largest[..., 0],
            "margin": (largest[..., 0] - largest[..., 1]).clamp(max=LARGEST_MARGIN),
            "entropy": torch.special.entr(q).sum(dim=-1),
        }
        values["log_mass_above"] = (above + LEAST_MASS).log()
        standardised = []
        for name in self.numbers:
            mean, deviation = (self.config.scales or {}).get(name, (0.0, 1.0))
            standardised.append((values[name] - mean) / deviation)
        return torch.stack(standardised, dim=-1)


def _check_width(name: str, vectors: Tensor, width: int, draft: str | None) -> None:
    if vectors.shape[-1] != width:
        raise ValueError(
            f"this head reads {name} of width {width}, got {vectors.shape[-1]}; it was trained for "
            f"the draft {draft or '(not recorded)'}"
        )
