"""Asking a head about the tokens of a draft under way, one at a time: what decoding pays for.

A small draft takes half a millisecond a token on a CPU, where a head as torch modules takes a third
of that. So there heads are asked by the fewest operations that give the same logits,
which `tests/test_head_inputs.py` holds equal, and by operations that drafting has just run: after
a forward every other call costs its cache misses, a few microseconds each (in numpy twice as many).
"""

from __future__ import annotations

from math import log
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from heads.inputs import FEATURES, LEAST_CHANCE, DrawnToken, captured_state, under_way
from heads.model import KINDS, BaseHead, ImmediateHead, ResidualBlock, StateHead

ROWS = 4096
"""Of an embedding that are read at a time."""


class Judge(Protocol):
    """Asks a head about the tokens of a draft under way, for raw acceptance logits."""

    def logit(self, drawn: DrawnToken) -> float:
        """Of the newest token that the head can judge once `drawn` is: itself, or one before it."""


def judge_of(head: BaseHead) -> Judge:
    """The fastest judge of a head, with its weights as they are now."""
    # A subclass may compute anything.
    is_fast = type(head) in KINDS.values() and next(head.parameters()).device.type == "cpu"
    if is_fast and isinstance(head, ImmediateHead):
        return ImmediateJudge(head)
    if is_fast and isinstance(head, StateHead):
        return ResidualJudge(head)
    return TorchJudge(head)


class TorchJudge:
    """Asks any head, on any device."""

    def __init__(self, head: BaseHead) -> None:
        self._head = head

    def logit(self, drawn: DrawnToken) -> float:
        """See `Judge.logit`."""
        return float(self.logit_on_device(drawn))

    @torch.inference_mode()
    def logit_on_device(self, drawn: DrawnToken) -> Tensor:
        """The same, (), still on the device."""
        if not self._head.lag:
            return self._head.logits(under_way(drawn))
        # What a token is drawn from is the state after the one before it.
        logit: Tensor = self._head(captured_state(drawn))
        return logit


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
        self._layers = [_weights(cast(nn.Linear, layer)) for layer in head.layers]
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
                value = log(max(float(drawn.distribution[drawn.token]), LEAST_CHANCE))
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
            for start in range(0, len(rows), ROWS):
                ids = torch.arange(start, min(start + ROWS, len(rows)))
                if (embedded := drawn.embed(ids)) is None:
                    raise ValueError("the draft's input embeddings are needed and not captured")
                vectors = self._vectors["embedding"]
                rows[start : start + ROWS] += embedded.detach().to(vectors.dtype) @ vectors.T
        return rows


class ResidualJudge:
    """Asks SpecDec++'s head or a linear one on a CPU; its weights are copied."""

    @torch.no_grad()
    def __init__(self, head: StateHead) -> None:
        self._blocks = [_weights(cast(ResidualBlock, block).linear) for block in head.blocks]
        self._output, self._bias = head.output.weight[0].clone(), float(head.output.bias)

    def logit(self, drawn: DrawnToken) -> float:
        """See `Judge.logit`: by the state that this token is drawn from."""
        x = captured_state(drawn).to(self._output.dtype)
        for weight, bias in self._blocks:
            x = nn.functional.silu(torch.addmv(bias, weight, x)).add_(x)
        return float(x.dot(self._output)) + self._bias


def _weights(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Copies of the weights (out, in) and bias (out,) of a layer."""
    return layer.weight.clone(), layer.bias.clone()
