"""The memory that work takes, found without taking it.

A model can be made of shapes alone (torch's `FakeTensorMode`). What a stage does with its models is
done with such ones, by the same code: nothing is computed, nothing allocated, and torch's
`MemTracker` adds up what is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a process holds on its device when it holds most, by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def of_shapes(model: Model, dtype: torch.dtype) -> Model:
    """A model, on any device, whose weights become shapes of this precision, in place.

    Those that are one weight stay one.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is None:
                    continue
                if id(value) not in made:
                    made[id(value)] = shape_of(
                        *value.shape, dtype=dtype if value.is_floating_point() else value.dtype
                    )
                    if isinstance(value, nn.Parameter):
                        made[id(value)] = nn.Parameter(made[id(value)], value.requires_grad)
                values[name] = made[id(value)]  # type: ignore[assignment]
    return model


def is_of_shapes(model: Any) -> bool:
    """True of a model of `of_shapes`, whose numbers nobody can ask for."""
    return isinstance(model.get_input_embeddings().weight, FakeTensor)


def shape_of(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without numbers."""
    with _shapes():
        return torch.empty(shape, dtype=dtype)


def peak(work: Callable[[], object], *models: nn.Module) -> int:
    """The most bytes that are alive while work is done with models of shapes, theirs included."""
    # Here: a part of torch that may move, which nothing but a plan needs.
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.mod_tracker import ModTracker

    class NoModules(ModTracker):
        """No account by modules, which takes neither frozen weights nor several calls of one."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            return

    tracker: Any = MemTracker()
    tracker._mod_tracker = NoModules()  # type: ignore[no-untyped-call]
    tracker.track_external(*models)
    with tracker, _Places():  # type: ignore[no-untyped-call]
        work()
    return sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


def size_of(*models: nn.Module) -> int:
    """Bytes of all weights of models, each counted once."""
    weights = {id(each): each.nbytes for model in models for each in model.parameters()}
    return sum(weights.values())


@cache
def _shapes() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


class _Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes positions by mask: which, and so how many, is known, as texts are real."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.index.Tensor:
            places: list[Tensor | None] = []
            for each in args[1]:
                is_mask = each is not None and each.dtype == torch.bool
                places += each.nonzero().unbind(dim=1) if is_mask else [each]
            args = (args[0], places)
        return func(*args, **(kwargs or {}))
