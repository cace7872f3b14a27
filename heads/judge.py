"""Asking a head about the tokens of a draft under way, one at a time: what decoding pays for.

A small draft takes half a millisecond a token on a CPU, and there the head's network as torch
operations takes as long: 40 calls with a microsecond of arithmetic each. `NumpyJudge` gives the
same logits in a tenth of that time. It is the one second copy of the features and of the network of
`ImmediateHead`; `tests/test_head_inputs.py` keeps it equal to them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heads.immediate import FeedForwardBlock, ImmediateHead
from heads.inputs import (
    FEATURES,
    LARGEST_MARGIN,
    LEAST_CHANCE,
    LEAST_MASS,
    DecisionPoint,
    DrawnToken,
    HeadInputs,
    NextToken,
)
from heads.model import BaseHead

Reals = NDArray[np.float32]

# The features that `NumpyJudge` has; a head that reads others is asked as it is.
COPIED = frozenset(
    {
        "hidden_before",
        "embedding",
        "hidden",
        "log_q",
        "log_q_max",
        "margin",
        "entropy",
        "log_mass_above",
        "position",
        "since_rejection",
    }
)
LAYER_EPSILON = 1e-5  # of nn.LayerNorm
# Added to every probability, so that the logarithm of 0 is finite; far below LEAST_CHANCE.
TINY = np.float32(1e-37)


class Judge(Protocol):
    """Asks a head about the tokens of a draft under way."""

    def newest(self, drafted: Sequence[DrawnToken], point: DecisionPoint) -> float | None:
        """The raw acceptance logit of the newest token of which so much is known.

        Args:
            drafted: the tokens drawn so far in this round, in order.
            point: DRAWN for the last of them, CONSUMED for the one before it.

        Returns:
            The logit, None if there is no such token yet.
        """

    def upcoming(self, token: NextToken) -> float:
        """The raw logit, at `DecisionPoint.BEFORE`, of the token that is about to be drawn."""


def judge_of(head: BaseHead) -> Judge:
    """The fastest judge of a head, with its weights as they are now."""
    on_cpu = next(head.parameters()).device.type == "cpu"
    if on_cpu and isinstance(head, ImmediateHead) and COPIED.issuperset(head.reads):
        return NumpyJudge(head)
    return TorchJudge(head)


class TorchJudge:
    """Asks any head, on any device.

    Args:
        head: the head.
    """

    def __init__(self, head: BaseHead) -> None:
        self._head = head

    @torch.inference_mode()
    def newest(self, drafted: Sequence[DrawnToken], point: DecisionPoint) -> float | None:
        """See `Judge.newest`."""
        inputs = HeadInputs.from_drafted(self._head.reads, drafted, point)
        return None if inputs is None else float(self._head.logits(inputs))

    @torch.inference_mode()
    def upcoming(self, token: NextToken) -> float:
        """See `Judge.upcoming`."""
        return float(self._head.logits(HeadInputs.from_next(self._head.reads, token)))


class NumpyJudge:
    """Asks an `ImmediateHead` on a CPU, in float32.

    Scales and the weights of norms are folded into the matrices that follow them, biases are a last
    column, and SiLU(2 y) is y + y tanh(y). What the network adds up before its blocks is kept for
    the two newest tokens: once a token has been consumed, only the state after it is added.

    Args:
        head: the head; its weights are copied.
    """

    @torch.no_grad()
    def __init__(self, head: ImmediateHead) -> None:
        self._head = head
        self._before = _normed(head, "hidden_before")
        self._after = _normed(head, "hidden")
        self._embedding = _normed(head, "embedding")
        self._embedded: dict[int, Reals] = {}
        self._numbers = head.numbers
        self._number_weights, self._bias = _folded(head)
        self._blocks = [_folded_block(cast(FeedForwardBlock, block)) for block in head.blocks]
        self._output = _array(head.output.weight[0] * head.norm.weight)
        self._output_bias, self._epsilon = float(head.output.bias), _epsilon(head.norm)
        self._width = head.width
        self._row = np.ones(head.width + 1, np.float32)  # its last value multiplies the biases
        self._sums: deque[tuple[DrawnToken, Reals]] = deque(maxlen=2)
        self._normal: tuple[Tensor | None, Reals] = (None, self._row)

    def newest(self, drafted: Sequence[DrawnToken], point: DecisionPoint) -> float | None:
        """See `Judge.newest`."""
        self._head.check_point(point)
        if point is not DecisionPoint.CONSUMED:
            return self._logit(self._drawn(drafted[-1]) + self._bias[point]) if drafted else None
        if len(drafted) < 2:
            return None
        x = self._drawn(drafted[-2]) + self._bias[point]
        if self._after is not None:
            x += self._after.dot(self._standardised(drafted[-1].state))
        return self._logit(x)

    def upcoming(self, token: NextToken) -> float:
        """See `Judge.upcoming`."""
        self._head.check_point(DecisionPoint.BEFORE)
        return self._logit(self._inputs(token, None) + self._bias[DecisionPoint.BEFORE])

    def _drawn(self, drawn: DrawnToken) -> Reals:
        """(W,) what the features of a token that do not need the state after it add up to."""
        for known, x in self._sums:
            if known is drawn:
                return x
        x = self._inputs(drawn, drawn.token)
        if self._embedding is not None:
            if drawn.token not in self._embedded:
                state = drawn.embedding
                self._embedded[drawn.token] = self._embedding @ self._standardised(state)
            x = x + self._embedded[drawn.token]
        self._sums.append((drawn, x))
        return x

    def _inputs(self, known: NextToken, token: int | None) -> Reals:
        """(W,) the sum over the numbers and the state before; no token: only what needs none."""
        values = _numbers(known, token)
        x: Reals = self._number_weights.dot(
            np.array([values[name] for name in self._numbers], np.float32)
        )
        if self._before is not None:
            x += self._before.dot(self._standardised(known.state))
        return x

    def _standardised(self, state: Tensor | None) -> Reals:
        """(H,) a state less its mean, over its deviation: what a LayerNorm makes before weights."""
        if state is None:
            raise ValueError("the draft's states are needed and were not captured")
        if state is self._normal[0]:
            return self._normal[1]
        values = _values(state)
        centred: Reals = values - float(np.add.reduce(values)) / values.size
        centred *= 1.0 / math.sqrt(float(centred.dot(centred)) / values.size + LAYER_EPSILON)
        self._normal = (state, centred)
        return centred

    def _logit(self, x: Reals) -> float:
        """The blocks and the output layer on (W,), which is changed."""
        row = self._row
        for inner, outer, inside, epsilon in self._blocks:
            np.multiply(x, 1.0 / math.sqrt(float(x.dot(x)) / self._width + epsilon), out=row[:-1])
            y = inner.dot(row)
            np.tanh(y, out=inside[:-1])
            inside[:-1] *= y
            inside[:-1] += y
            x += outer.dot(inside)
        scale = 1.0 / math.sqrt(float(x.dot(x)) / self._width + self._epsilon)
        return float(x.dot(self._output)) * scale + self._output_bias


def _numbers(known: NextToken, token: int | None) -> dict[str, float]:
    """The number features of one token; 0 for those that need the token if it is None."""
    q = _values(known.distribution)
    logarithms = np.log(q + TINY)
    entropy = -float(q.dot(logarithms))
    best = int(logarithms.argmax())
    largest, log_q, log_mass_above = float(logarithms[best]), 0.0, 0.0
    if token is not None:
        chance = q[token]
        log_q = max(float(logarithms[token]), math.log(LEAST_CHANCE))
        above = float(q.dot((q > chance).astype(np.float32))) if token != best else 0.0
        log_mass_above = math.log(above + LEAST_MASS)
    logarithms[best] = -np.inf
    second = float(logarithms[int(logarithms.argmax())])
    return {
        "log_q": log_q,
        "log_q_max": largest,
        "margin": min(largest - second, LARGEST_MARGIN),
        "entropy": entropy,
        "log_mass_above": log_mass_above,
        "position": float(known.position),
        "since_rejection": float(known.since_rejection),
    }


def _values(values: Tensor) -> Reals:
    """The same memory if it is float32 already."""
    array: Reals = (values if values.dtype is torch.float32 else values.float()).numpy()
    return array


def _array(values: Tensor) -> Reals:
    return np.ascontiguousarray(values.detach().float().numpy())


def _normed(head: ImmediateHead, name: str) -> Reals | None:
    """(W, size) what multiplies a standardised vector feature; None if the head reads it not."""
    if name not in head.norms:
        return None
    layer, norm = _layers(head, name)
    return _array(layer.weight * norm.weight)


def _layers(head: ImmediateHead, name: str) -> tuple[nn.Linear, nn.LayerNorm]:
    return cast(nn.Linear, head.vectors[name]), cast(nn.LayerNorm, head.norms[name])


def _folded(head: ImmediateHead) -> tuple[Reals, dict[DecisionPoint, Reals]]:
    """(W, numbers) factors of the numbers as they are, and (W,) what is added at each point."""
    weights = torch.zeros(head.width, 0)
    if head.numbers:
        weights = head.number_weights.weight / head.number_deviations
    added = {}
    for point in head.decision_points:
        x = head.point.weight[point].clone()
        for number, name in enumerate(head.numbers):
            if FEATURES[name].point <= point:
                x -= weights[:, number] * head.number_means[number]
        for name in head.norms:
            if FEATURES[name].point <= point:
                layer, norm = _layers(head, name)
                x += layer.weight @ norm.bias
        added[point] = _array(x)
    return _array(weights), added


def _folded_block(block: FeedForwardBlock) -> tuple[Reals, Reals, Reals, float]:
    """(2 W, W + 1) and (W, 2 W + 1) with the biases last; room for what lies between; epsilon."""
    inner = torch.cat([block.inner.weight * block.norm.weight, block.inner.bias[:, None]], dim=1)
    outer = torch.cat([block.outer.weight, block.outer.bias[:, None]], dim=1)
    inside = np.ones(outer.shape[1], np.float32)
    return _array(inner / 2.0), _array(outer), inside, _epsilon(block.norm)


def _epsilon(norm: nn.RMSNorm) -> float:
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
