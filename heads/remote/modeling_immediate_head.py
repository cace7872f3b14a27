"""The acceptance head of a draft model, for transformers' AutoModel with trust_remote_code=True.

The head predicts whether the target will accept a drafted token, from what is known of it at a
decision point: before it is drawn, once it is drawn, or once the draft has consumed it. The file
needs torch and transformers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

# What a head may read, and the decision point from which it is known.
DECISION_POINTS = {"before": 0, "drawn": 1, "consumed": 2}
VECTORS = {"hidden_before": 0, "embedding": 1, "hidden": 2}
NUMBERS = {
    "log_q": 1,
    "log_q_max": 0,
    "margin": 0,
    "entropy": 0,
    "log_mass_above": 1,
    "position": 0,
    "since_rejection": 0,
}
# Bounds that keep logarithms finite.
LARGEST_MARGIN, LEAST_MASS, LEAST_CHANCE = 30.0, 1e-6, 1e-30


class ImmediateHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """The settings of a head.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        reads: names of the features it reads.
        decision_points: names of the decision points it can be asked at.
        width: W of the network.
        depth: number of layers between the sum of what it reads and the output.
        scales: feature -> (mean, standard deviation) by which it is standardised.
        draft: name of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        **kwargs: what every configuration has.
    """

    model_type = "immediate_acceptance_head"

    def __init__(
        self,
        hidden_size: int = 1,
        embedding_size: int = 0,
        reads: Sequence[str] = (),
        decision_points: Sequence[str] = ("drawn",),
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
        self.decision_points = decision_points
        self.width = width
        self.depth = depth
        self.scales = scales
        self.draft = draft
        self.sampling = sampling
        super().__init__(**kwargs)


class ImmediateHeadModel(PreTrainedModel):  # type: ignore[misc]
    """One network for every decision point at which a drafted token can be judged."""

    config_class = ImmediateHeadConfig

    def __init__(self, config: ImmediateHeadConfig) -> None:
        super().__init__(config)
        last = max(DECISION_POINTS[name] for name in config.decision_points)
        reads = [name for name in config.reads if {**VECTORS, **NUMBERS}[name] <= last]
        sizes = {
            name: (config.embedding_size or config.hidden_size)
            if name == "embedding"
            else config.hidden_size
            for name in reads
            if name in VECTORS
        }
        self.numbers = [name for name in reads if name in NUMBERS]
        self.vectors = nn.ModuleDict(
            {name: nn.Linear(size, config.width, bias=False) for name, size in sizes.items()}
        )
        if self.numbers:
            self.number_weights = nn.Linear(len(self.numbers), config.width, bias=False)
        self.point = nn.Embedding(len(DECISION_POINTS), config.width)
        self.layers = nn.ModuleList(
            nn.Linear(config.width, config.width) for _ in range(config.depth)
        )
        self.output = nn.Linear(config.width, 1)
        self.post_init()

    def forward(
        self,
        distribution: Tensor,
        hidden_before: Tensor,
        token: Tensor | None = None,
        embedding: Tensor | None = None,
        hidden: Tensor | None = None,
        *,
        position: int = 0,
        since_rejection: int = 0,
    ) -> Tensor:
        """Return raw acceptance logits; their sigmoid is the probability.

        What is given decides the point: without a token it is not drawn yet, without `hidden` the
        draft has not consumed it.

        Args:
            distribution: (..., V) the distribution that the token is drawn from.
            hidden_before: (..., H) the last hidden state of the draft that gave it.
            token: (...) its id.
            embedding: (..., E) the draft's input embedding of the token.
            hidden: (..., H) the draft's last hidden state after it consumed the token.
            position: place of the token in its draft, from 0.
            since_rejection: tokens since the last rejection, or since the completion began.

        Returns:
            (...) logits.

        Raises:
            ValueError: at a decision point that the head was not trained for, or for another width.
        """
        point = "before" if token is None else "drawn" if hidden is None else "consumed"
        if point not in self.config.decision_points:
            raise ValueError(
                f"this head judges tokens {self.config.decision_points}, not {point!r}"
            )
        given = {"hidden_before": hidden_before, "embedding": embedding, "hidden": hidden}
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(distribution.device.type, enabled=False):
            x = self.point(torch.tensor(DECISION_POINTS[point], device=distribution.device))
            for name, layer in self.vectors.items():
                value = given[name]
                if VECTORS[name] > DECISION_POINTS[point]:
                    continue
                size = layer.in_features
                if value is None or value.shape[-1] != size:
                    raise ValueError(
                        f"this head reads {name} of width {size}, got "
                        f"{None if value is None else value.shape[-1]}; it was trained for the "
                        f"draft {self.config.draft or '(not recorded)'}"
                    )
                _, deviation = (self.config.scales or {}).get(name, (0.0, 1.0))
                x = x + layer(value.to(x.dtype) / deviation)
            if self.numbers:
                places = {"position": position, "since_rejection": since_rejection}
                x = x + self.number_weights(self._numbers(distribution, token, places, x.dtype))
            for layer in self.layers:
                x = layer(x.relu())
            logits: Tensor = self.output(x.relu())
        return logits.squeeze(-1)

    def _numbers(
        self, q: Tensor, token: Tensor | None, places: dict[str, int], dtype: torch.dtype
    ) -> Tensor:
        """(..., numbers) of distributions (..., V), by their scales; 0 where not known."""
        largest = q.topk(2, dim=-1).values.log()
        values = {
            "log_q_max": largest[..., 0],
            "margin": (largest[..., 0] - largest[..., 1]).clamp(max=LARGEST_MARGIN),
            "entropy": torch.special.entr(q).sum(dim=-1),
        }
        if token is not None:
            chance = q.gather(-1, token.unsqueeze(-1))
            above = q.masked_fill(q <= chance, 0.0).sum(dim=-1)
            values["log_q"] = chance.squeeze(-1).clamp(min=LEAST_CHANCE).log()
            values["log_mass_above"] = (above + LEAST_MASS).log()
        values |= {name: torch.full_like(largest[..., 0], place) for name, place in places.items()}
        nothing = torch.zeros_like(largest[..., 0])
        scales = self.config.scales or {}
        standardised = []
        for name in self.numbers:
            mean, deviation = scales.get(name, (0.0, 1.0))
            standardised.append((values[name] - mean) / deviation if name in values else nothing)
        return torch.stack(standardised, dim=-1).to(dtype)
