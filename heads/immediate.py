"""Our own acceptance head: it judges a token as soon as it is drawn, or even before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.config import DEFAULT_FEATURES
from heads.inputs import FEATURES, DecisionPoint, HeadInputs
from heads.model import BaseHead


class ImmediateHead(BaseHead):
    """Predict whether the target accepts a drafted token, from all that is known by then.

    One network for every decision point that it was trained for (`heads.inputs.DecisionPoint`).
    Before the token is drawn it predicts the ex-ante acceptance sum_x min(p(x), q(x)); once it is
    drawn, and again once the draft has consumed it, the ex-post acceptance min(1, p/q). The first
    costs no forward of the draft more than drawing does, so unlike SpecDec++'s head it has no lag.

    Each vector feature goes through its own linear map, the standardised numbers through one; ReLU
    layers follow their sum with a learned vector of the decision point. Features that are not known
    yet add nothing. So what a token adds is a row of a table, and one small matrix reads the rest:
    `heads.judge` asks in microseconds. A norm, or a further layer, costs more than it predicts.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        reads: names of features; those not known at a decision point are not used there, and those
            not known at any are left out.
        decision_points: names of what may be known: "before", "drawn", "consumed".
        width: W of the network.
        depth: number of layers between the sum and the output.
        scales: number feature -> (mean, standard deviation) by which it is standardised; vector ->
            (0, root mean square of its values); (0, 1) for those that are missing.
        draft: name or path of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        probe: values of that draft's hidden states; see `heads.probe`.

    Raises:
        ValueError: if a size is out of range, or a name is unknown.
    """

    kind: ClassVar[str] = "immediate"
    rejection_weight = 1.0
    number_means: Tensor
    number_deviations: Tensor
    number_points: Tensor

    def __init__(  # noqa: PLR0913 - all that config.json holds
        self,
        *,
        hidden_size: int,
        embedding_size: int = 0,
        reads: Sequence[str] = DEFAULT_FEATURES,
        decision_points: Sequence[str] = ("before", "drawn", "consumed"),
        width: int = 64,
        depth: int = 0,
        scales: Mapping[str, Sequence[float]] | None = None,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        if hidden_size < 1 or embedding_size < 0 or width < 1 or depth < 0:
            raise ValueError(
                "a head needs hidden_size >= 1, embedding_size >= 0, width >= 1 and depth >= 0, "
                f"got {hidden_size}, {embedding_size}, {width} and {depth}"
            )
        if unknown := [name for name in reads if name not in FEATURES]:
            raise ValueError(f"unknown features {', '.join(unknown)}: known are {[*FEATURES]}")
        known = {point.name.lower(): point for point in DecisionPoint}
        if not decision_points or not set(decision_points) <= known.keys():
            raise ValueError(
                f"decision_points must name some of {[*known]}, got {list(decision_points)}"
            )
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding_size = embedding_size or hidden_size
        self.decision_points = tuple(sorted({known[name] for name in decision_points}))
        self.reads = tuple(
            name for name in reads if FEATURES[name].point <= self.decision_points[-1]
        )
        self.width = width
        self.depth = depth
        self.draft = draft
        self.sampling = sampling
        self.probe = probe
        widths = {"hidden": self.hidden_size, "embedding": self.embedding_size}
        self.sizes = {
            name: widths[feature.shape]
            for name in self.reads
            if (feature := FEATURES[name]).shape in widths
        }
        self.numbers = tuple(name for name in self.reads if name not in self.sizes)
        self.scales = self._checked(scales or {})
        self.vectors = nn.ModuleDict(
            {name: nn.Linear(size, width, bias=False) for name, size in self.sizes.items()}
        )
        if self.numbers:  # weights that nothing reads would never get a gradient
            self.number_weights = nn.Linear(len(self.numbers), width, bias=False)
        for name, values in (
            ("number_means", [self.scales[name][0] for name in self.numbers]),
            ("number_deviations", [self.scales[name][1] for name in self.numbers]),
            ("number_points", [int(FEATURES[name].point) for name in self.numbers]),
        ):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.point = nn.Embedding(len(DecisionPoint), width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.output = nn.Linear(width, 1)

    def _checked(self, scales: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
        checked = {}
        for name in self.reads:
            mean, deviation = scales.get(name, (0.0, 1.0))
            if not (math.isfinite(mean) and 0.0 < deviation < math.inf):
                raise ValueError(
                    f"scales must give a finite mean and a positive standard deviation of {name}, "
                    f"got {mean} and {deviation}"
                )
            checked[name] = (float(mean), float(deviation))
        return checked

    def forward(self, point: Tensor, *features: Tensor | None) -> Tensor:
        """Return raw acceptance logits.

        Args:
            point: int64, what is known of each token; its shape broadcasts to (...).
            *features: in the order of `reads`, each (...) or (..., size); None if it is known of no
                token. Values of tokens of which they are not known yet are not used.

        Returns:
            (...) logits.

        Raises:
            ValueError: if a vector has another width than the draft's.
        """
        given = dict(zip(self.reads, features, strict=True))
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(point.device.type, enabled=False):
            x = self.point(point)
            for name, layer in self.vectors.items():
                value = given[name]
                if value is not None:
                    self._check_width(name, value)
                    added = layer(value.to(x.dtype) / self.scales[name][1])
                    known = (point >= FEATURES[name].point).unsqueeze(-1)
                    x = x + torch.where(known, added, 0.0)
            if self.numbers:
                x = x + self.number_weights(self._standardised(point, given, x.dtype))
            for layer in self.layers:
                x = layer(x.relu())
            logits: Tensor = self.output(x.relu())
        return logits.squeeze(-1)

    def _standardised(
        self, point: Tensor, given: Mapping[str, Tensor | None], dtype: torch.dtype
    ) -> Tensor:
        """(..., numbers) the numbers by their scales, 0 where they are not known."""
        nothing = torch.zeros((), dtype=dtype, device=point.device)
        values = [
            nothing if (value := given[name]) is None else value.to(dtype) for name in self.numbers
        ]
        shape = max((value.shape for value in values), key=len)
        stacked = torch.stack([value.expand(shape) for value in values], dim=-1)
        known = point.unsqueeze(-1) >= self.number_points
        return torch.where(known, (stacked - self.number_means) / self.number_deviations, 0.0)

    def _check_width(self, name: str, value: Tensor) -> None:
        if value.shape[-1] != self.sizes[name]:
            raise ValueError(
                f"this head reads {name} of width {self.sizes[name]}, got {value.shape[-1]}; it "
                f"was trained for the draft {self.draft or '(not recorded)'}"
            )

    def check_point(self, point: DecisionPoint) -> None:
        """Raise ValueError at a decision point that the head was not trained for."""
        if point not in self.decision_points:
            raise ValueError(
                f"this head judges tokens {', '.join(m.name.lower() for m in self.decision_points)}"
                f", not {point.name.lower()}"
            )

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`.

        Raises:
            ValueError: at a decision point that the head was not trained for.
        """
        self.check_point(inputs.point)
        device = self.output.weight.device
        point = torch.tensor(int(inputs.point), device=device)
        logits: Tensor = self(point, *(inputs.features.get(name) for name in self.reads))
        return logits
