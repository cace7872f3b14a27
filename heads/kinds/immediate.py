"""Our own acceptance head: a small network on what is known once the token is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from heads.inputs import (
    FEATURES,
    LEAST_CHANCE,
    DrawnToken,
    captured_embeddings,
    captured_state,
    under_way,
)
from heads.model import BaseHead, Judge, copied

EMBEDDED_AT_ONCE = 4096
"""Of an embedding that are read at a time."""


class ImmediateHead(BaseHead):
    """Predict whether the target accepts a drafted token, from what is known once it is drawn.

    So it costs no forward of the draft and, unlike SpecDec++'s head, has no lag. Each vector
    feature goes through its own linear map, the standardised numbers through one; ReLU layers
    follow their sum. So what a token adds is a row of a table, and one small matrix reads the rest:
    `ImmediateJudge` asks in microseconds. A norm, or a further layer, costs more than it predicts.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        reads: names of features in `heads.inputs.FEATURES`.
        scales: number feature -> (mean, standard deviation) by which it is standardised; vector ->
            (0, root mean square of its values); (0, 1) for those that are missing.
        width: of the sum and of the layers.
        depth: number of layers after the sum.
        **about: draft, sampling and probe of `BaseHead`.
    """

    kind: ClassVar[str] = "immediate"
    number_means: Tensor
    number_deviations: Tensor

    def __init__(
        self,
        *,
        hidden_size: int,
        embedding_size: int = 0,
        reads: Sequence[str] = ("hidden_before", "embedding", "log_q"),
        width: int = 64,
        depth: int = 0,
        scales: Mapping[str, Sequence[float]] | None = None,
        **about: Any,
    ) -> None:
        if embedding_size < 0 or width < 1:
            raise ValueError(
                f"a head needs embedding_size >= 0 and width >= 1, got {embedding_size} and {width}"
            )
        if unknown := [name for name in reads if name not in FEATURES]:
            raise ValueError(f"unknown features {', '.join(unknown)}: known are {[*FEATURES]}")
        super().__init__(hidden_size, depth=depth, **about)
        self.embedding_size = embedding_size or hidden_size
        self.reads = tuple(reads)
        self.width = width
        self.scales = self._checked(scales or {})
        widths = {"hidden": self.hidden_size, "embedding": self.embedding_size}
        self.sizes = {
            name: widths[FEATURES[name].shape]
            for name in self.reads
            if FEATURES[name].shape in widths
        }
        self.numbers = tuple(name for name in self.reads if name not in self.sizes)
        self.vectors = nn.ModuleDict(
            {name: nn.Linear(size, width, bias=False) for name, size in self.sizes.items()}
        )
        if self.numbers:  # weights that nothing reads would never get a gradient
            self.number_weights = nn.Linear(len(self.numbers), width, bias=False)
        for buffer, place in (("number_means", 0), ("number_deviations", 1)):
            values = torch.tensor([self.scales[name][place] for name in self.numbers])
            self.register_buffer(buffer, values, persistent=False)
        self.bias = nn.Parameter(torch.randn(width))
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

    def forward(self, *features: Tensor) -> Tensor:
        """Return (...) raw acceptance logits of features, (...) or (..., size), in `reads`'s order.

        Raises ValueError if a vector has another width than the draft's.
        """
        given = dict(zip(self.reads, features, strict=True))
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(features[0].device.type, enabled=False):
            x: Tensor = self.bias
            for name, layer in self.vectors.items():
                self._check_width(name, given[name], self.sizes[name])
                x = x + layer(given[name].to(x.dtype) / self.scales[name][1])
            if self.numbers:
                numbers = torch.stack([given[name].to(x.dtype) for name in self.numbers], dim=-1)
                standardised = (numbers - self.number_means) / self.number_deviations
                x = x + self.number_weights(standardised)
            for layer in self.layers:
                x = layer(x.relu())
            logits: Tensor = self.output(x.relu())
        return logits.squeeze(-1)

    def judge(self) -> Judge:
        """See `BaseHead.judge`."""
        return ImmediateJudge(self) if self._is_fast() else self


class ImmediateJudge:
    """Asks an `ImmediateHead` on a CPU; its weights are copied.

    What a token adds is a row of a table, which is made when the first one is judged; scales are
    folded into the matrices.
    """

    @torch.no_grad()
    def __init__(self, head: ImmediateHead) -> None:
        self._vectors = {
            name: cast(nn.Linear, layer).weight / head.scales[name][1]
            for name, layer in head.vectors.items()
        }
        self._before = self._vectors.get("hidden_before")
        weights = head.bias.new_zeros(head.width, 0)
        if head.numbers:
            weights = head.number_weights.weight / head.number_deviations
        self._numbers = dict(zip(head.numbers, weights.T.contiguous(), strict=True))
        self._base = head.bias - weights @ head.number_means.to(weights)
        self._table: Tensor | None = None
        self._layers = [copied(cast(nn.Linear, layer)) for layer in head.layers]
        self._output, self._bias = head.output.weight[0].clone(), float(head.output.bias)

    def logit(self, drawn: DrawnToken) -> float:
        """See `Judge.logit`."""
        if self._table is None:
            self._table = self._tabled(drawn)
        x = self._table[drawn.token]
        if self._before is None:
            x = x.clone()
        else:
            x = torch.addmv(x, self._before, captured_state(drawn).to(x.dtype))
        for name, weights in self._numbers.items():
            if name == "log_q":  # the one that costs next to nothing
                value = math.log(max(float(drawn.distribution[drawn.token]), LEAST_CHANCE))
            else:
                value = float(FEATURES[name].compute(under_way(drawn)))
            x.add_(weights, alpha=value)
        x = x.relu()
        for weight, bias in self._layers:
            x = torch.addmv(bias, weight, x).relu_()
        return float(x.dot(self._output)) + self._bias

    def _tabled(self, drawn: DrawnToken) -> Tensor:
        """(V, W) what each token adds when it is drawn."""
        rows = self._base.repeat(len(drawn.distribution), 1)
        if "embedding" in self._vectors:
            for start in range(0, len(rows), EMBEDDED_AT_ONCE):
                ids = torch.arange(start, min(start + EMBEDDED_AT_ONCE, len(rows)))
                embedded, vectors = captured_embeddings(drawn, ids), self._vectors["embedding"]
                rows[start : start + EMBEDDED_AT_ONCE] += (
                    embedded.detach().to(vectors.dtype) @ vectors.T
                )
        return rows
