"""Asking a head about the tokens of a draft under way, one at a time: what decoding pays for.

A small draft takes half a millisecond a token on a CPU, where a head as torch modules takes a third
of that. So there both kinds of heads are asked by the fewest operations that give the same logits,
which `tests/test_head_inputs.py` holds equal, and by operations that drafting has just run: after
a forward every other call costs its cache misses, a few microseconds each (in numpy twice as many).
"""

from __future__ import annotations

from math import log
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from heads.immediate import ImmediateHead
from heads.inputs import LEAST_CHANCE, DecisionPoint, DrawnToken, HeadInputs, NextToken
from heads.model import AcceptanceHead, BaseHead, ResidualBlock

ROWS = 4096
"""Of an embedding that are read at a time."""


class Judge(Protocol):
    """Asks a head about the tokens of a draft under way, for raw acceptance logits."""

    def upcoming(self, token: NextToken) -> float:
        """Of the token that is about to be drawn, at `DecisionPoint.BEFORE`."""

    def drawn(self, token: DrawnToken) -> float:
        """Of the token that was drawn last, at `DecisionPoint.DRAWN`."""

    def consumed(self, token: DrawnToken, following: NextToken) -> float:
        """Of the token before `following`, whose state is the draft's after consuming it."""


def judge_of(head: BaseHead) -> Judge:
    """The fastest judge of a head, with its weights as they are now."""
    on_cpu = next(head.parameters()).device.type == "cpu"
    if on_cpu and type(head) is ImmediateHead:
        return ImmediateJudge(head)
    if on_cpu and type(head) is AcceptanceHead:
        return ResidualJudge(head)
    return TorchJudge(head)


class TorchJudge:
    """Asks any head, on any device.

    Args:
        head: the head.
    """

    def __init__(self, head: BaseHead) -> None:
        self._head = head

    def upcoming(self, token: NextToken) -> float:
        """See `Judge.upcoming`."""
        with torch.inference_mode():
            return float(self._head.logits(HeadInputs.from_next(self._head.reads, token)))

    def drawn(self, token: DrawnToken) -> float:
        """See `Judge.drawn`."""
        return float(self.drawn_logit(token))

    def consumed(self, token: DrawnToken, following: NextToken) -> float:
        """See `Judge.consumed`."""
        return float(self.consumed_logit(token, following))

    @torch.inference_mode()
    def drawn_logit(self, token: DrawnToken) -> Tensor:
        """The same, (), still on the device."""
        return self._head.logits(HeadInputs.from_drawn(self._head.reads, token))

    @torch.inference_mode()
    def consumed_logit(self, token: DrawnToken, following: NextToken) -> Tensor:
        """The same, (), still on the device."""
        return self._head.logits(HeadInputs.from_drawn(self._head.reads, token, following))


class ImmediateJudge:
    """Asks an `ImmediateHead` on a CPU.

    What a token adds is a row of a table, which is made when the first one is judged; scales are
    folded into the matrices.

    Args:
        head: the head; its weights are copied.
    """

    @torch.no_grad()
    def __init__(self, head: ImmediateHead) -> None:
        self._vectors = {
            name: cast(nn.Linear, layer).weight / head.scales[name][1]
            for name, layer in head.vectors.items()
        }
        self._before = self._vectors.get("hidden_before")
        weights = head.point.weight.new_zeros(head.width, 0)
        if head.numbers:
            weights = head.number_weights.weight / head.number_deviations
        self._numbers = dict(zip(head.numbers, weights.T.contiguous(), strict=True))
        self._means = {name: head.scales[name][0] for name in head.numbers}
        self._base = head.point.weight - weights @ head.number_means.to(weights)
        self._table: Tensor | None = None
        self._layers = [_weights(cast(nn.Linear, layer)) for layer in head.layers]
        self._output, self._bias = head.output.weight[0].clone(), float(head.output.bias)
        self._newest: tuple[DrawnToken | None, Tensor] = (None, self._base)

    def upcoming(self, token: NextToken) -> float:
        """See `Judge.upcoming`."""
        x = self._base[DecisionPoint.BEFORE].clone()
        known = HeadInputs.from_next([*self._numbers], token).features
        for name, weights in self._numbers.items():  # one that is not known adds nothing: its mean
            x += weights * known.get(name, self._means[name])
        if self._before is not None:
            x += self._before.mv(_state(token, x))
        return self._logit(x)

    def drawn(self, token: DrawnToken) -> float:
        """See `Judge.drawn`."""
        return self._logit(self._drawn(token))

    def consumed(self, token: DrawnToken, following: NextToken) -> float:
        """See `Judge.consumed`."""
        x = self._newest[1] if self._newest[0] is token else self._drawn(token)
        x = x + self._base[DecisionPoint.CONSUMED] - self._base[DecisionPoint.DRAWN]
        if "hidden" in self._vectors:
            x += self._vectors["hidden"].mv(_state(following, x))
        return self._logit(x)

    def _drawn(self, token: DrawnToken) -> Tensor:
        """(W,) the sum of what is known when a token is drawn, at that point."""
        if self._table is None:
            self._table = self._tabled(token)
        x = self._table[token.token]
        before = self._before
        x = x.clone() if before is None else torch.addmv(x, before, _state(token, x))
        for name, weights in self._numbers.items():
            if name == "log_q":  # the one that costs next to nothing
                value = log(max(float(token.distribution[token.token]), LEAST_CHANCE))
            else:
                value = float(HeadInputs.from_drawn([name], token)[name])
            x.add_(weights, alpha=value)
        self._newest = token, x
        return x

    def _tabled(self, token: DrawnToken) -> Tensor:
        """(V, W) what each token adds when it is drawn."""
        rows = self._base[DecisionPoint.DRAWN].repeat(len(token.distribution), 1)
        if "embedding" in self._vectors:
            for start in range(0, len(rows), ROWS):
                ids = torch.arange(start, min(start + ROWS, len(rows)))
                if (embedded := token.embed(ids)) is None:
                    raise ValueError("the draft's input embeddings are needed and not captured")
                vectors = self._vectors["embedding"]
                rows[start : start + ROWS] += embedded.detach().to(vectors.dtype) @ vectors.T
        return rows

    def _logit(self, x: Tensor) -> float:
        """The layers on (W,)."""
        x = x.relu()
        for weight, bias in self._layers:
            x = torch.addmv(bias, weight, x).relu_()
        return float(x.dot(self._output)) + self._bias


class ResidualJudge:
    """Asks SpecDec++'s head on a CPU.

    Args:
        head: the head; its weights are copied.
    """

    @torch.no_grad()
    def __init__(self, head: AcceptanceHead) -> None:
        self._blocks = [_weights(cast(ResidualBlock, block).linear) for block in head.blocks]
        self._output, self._bias = head.output.weight[0].clone(), float(head.output.bias)

    def consumed(self, _token: DrawnToken, following: NextToken) -> float:
        """See `Judge.consumed`."""
        x = _state(following, self._output)
        for weight, bias in self._blocks:
            x = nn.functional.silu(torch.addmv(bias, weight, x)).add_(x)
        return float(x.dot(self._output)) + self._bias

    def drawn(self, token: DrawnToken) -> float:
        """Never asked."""
        raise AssertionError("SpecDec++'s head judges a token once the draft has consumed it")

    def upcoming(self, token: NextToken) -> float:
        """Never asked."""
        raise AssertionError("SpecDec++'s head judges a token once the draft has consumed it")


def _state(token: NextToken, weights: Tensor) -> Tensor:
    """(H,) the state that a token is drawn from, of the type that the weights are of."""
    if token.state is None:
        raise ValueError("the draft's states are needed and were not captured")
    return token.state.to(weights.dtype)


def _weights(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Copies of the weights (out, in) and bias (out,) of a layer."""
    return layer.weight.clone(), layer.bias.clone()
