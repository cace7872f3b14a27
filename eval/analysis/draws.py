"""Every draw of code that is not ours as a branch: its exact distribution, without sampling.

Inside `drawing` torch.rand, torch.multinomial and random.random ask an `Rng`: the code can be run
once for every outcome of every draw (`eval.verifiers.rule.outcomes`). A uniform number has no
value there: it is known to lie in an interval, and each comparison with a bound is a branch, taken
with the share of the interval below the bound. What needs the value itself cannot be walked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eval.verifiers.rule import Rng

SHAPES = {"view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "permute", "transpose"}
"""Operations that move uniform numbers about."""
CASTS = {"to", "cpu", "float", "double", "clone", "contiguous", "detach", "item"}
"""Operations that leave them as they are."""


class NotWalkableError(Exception):
    """Code draws in a way of which the outcomes cannot be listed."""


class Uniform:
    """Uniform numbers that nobody has seen: comparisons with them draw branches.

    Args:
        rng: draws the branches.
        intervals: where each number is known to lie; shared with views of the same numbers.
        index: which number stands at a place (...).
    """

    __array_ufunc__ = None  # numpy leaves comparisons to this class

    def __init__(self, rng: Rng, intervals: list[tuple[float, float]], index: Tensor) -> None:
        self.rng, self.intervals, self.index = rng, intervals, index
        self.shape, self.device = index.shape, index.device

    @classmethod
    def of(cls, rng: Rng, *size: int) -> Uniform:
        """New numbers."""
        count = torch.Size(size).numel()
        return cls(rng, [(0.0, 1.0)] * count, torch.arange(count).view(size))

    def __lt__(self, bound: Any) -> Tensor:
        if isinstance(bound, Uniform):
            raise NotWalkableError("two random numbers are compared")
        bounds = torch.as_tensor(bound).double().cpu() + torch.zeros(self.index.shape)
        index, found = self.index.expand(bounds.shape), []
        for number, cut in zip(index.flatten().tolist(), bounds.flatten().tolist(), strict=True):
            low, high = self.intervals[number]
            cut = min(max(cut, low), high) if cut == cut else low  # nothing lies below a NaN
            found.append(self.rng.bernoulli((cut - low) / (high - low)))
            self.intervals[number] = (low, cut) if found[-1] else (cut, high)
        return torch.tensor(found, dtype=torch.bool).view(index.shape)

    def __gt__(self, bound: Any) -> Tensor:
        below: Tensor = self < bound
        return ~below

    __le__, __ge__ = __lt__, __gt__

    def __getattr__(self, name: str) -> Any:
        if name in CASTS:
            return lambda *_, **__: self
        if name not in SHAPES:
            raise NotWalkableError(f"the value of a random number is asked for by {name}")
        return lambda *sizes: Uniform(self.rng, self.intervals, getattr(self.index, name)(*sizes))

    def __getitem__(self, key: Any) -> Uniform:
        return Uniform(self.rng, self.intervals, self.index[key])

    def __float__(self) -> float:
        raise NotWalkableError("the value of a random number is asked for")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, given: Any, named: Any = None) -> Any:
        """`tensor < numbers`, and functions of torch on numbers."""
        name, (first, *others) = function.__name__.strip("_"), given
        if isinstance(first, Uniform):
            comparing = {"lt": "__lt__", "le": "__lt__", "gt": "__gt__", "ge": "__gt__"}
            return getattr(first, comparing.get(name, name))(*others, **(named or {}))
        if name in ("lt", "le"):
            return others[0] > first
        if name in ("gt", "ge"):
            return others[0] < first
        raise NotWalkableError(f"a random number is read by {name}")


@contextmanager
def drawing(rng: Rng) -> Iterator[None]:
    """Have an `Rng` make the draws of torch's and Python's global functions."""

    def rand(*size: Any, **named: Any) -> Uniform:
        size = (named["size"],) if "size" in named else size
        return Uniform.of(rng, *(size if all(isinstance(n, int) for n in size) else size[0]))

    def multinomial(
        weights: Tensor, num_samples: int = 1, replacement: bool = False, **_: Any
    ) -> Tensor:
        drawn = []
        for row in weights.reshape(-1, weights.shape[-1]).tolist():
            for _number in range(num_samples):
                drawn.append(rng.categorical(row))
                if not replacement:
                    row[drawn[-1]] = 0.0
        return torch.tensor(drawn, device=weights.device).view(*weights.shape[:-1], num_samples)

    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch, {"rand": rand, "multinomial": multinomial}),
        (torch, {"rand_like": lambda like, **_: Uniform.of(rng, *like.shape)}),
        (torch.Tensor, {"multinomial": multinomial}),
        (random, {"random": lambda: Uniform.of(rng)}),
    ]
    with ExitStack() as closing:
        for owner, functions in replaced:
            for name, function in functions.items():
                closing.enter_context(patch.object(owner, name, function))
        yield
