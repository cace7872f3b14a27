"""Two devices that are none: their tensors hold the CPU's data and refuse what CUDA's refuse.

`model.to("pretend:0")` works as `model.to("cuda:0")` does. Refused are: tensors of two devices in
one operation, but for what CUDA takes of the CPU (a number, indices, a copy), `numpy()`, and draws,
which no CPU could repeat. `reads()` counts what waits for a device. It is torch 2.13's PrivateUse1
device in Python: autograd, autocast and inference mode are torch's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from torch.library import Library
from torch.utils import backend_registration as registration

from distill import training, watch
from specdata import models

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
CPU, aten = torch.device("cpu"), torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# Which take a tensor of no dimensions from the CPU, as all pointwise operations do.
NUMBERS = {*INDEXED, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor}
# What comes out, or how large it is, is known to the CPU when the device has answered.
WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_waits: list[str] = []


class PretendTensor(Tensor):
    """A tensor of such a device; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Self:
        with torch._C._InferenceMode(False):  # a view of what was made outside of it is not of it
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=device,
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _kernel(func, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy: use .cpu()")

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is made of several others; inference mode hands it on as one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE.name)


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on what its tensors hold; its result lies where a device's would."""
    if _is_composite(func):
        return func._op_dk(COMPOSITE, *args, **kwargs)
    given: list[Tensor] = []
    held_args = _held(args, given)
    held_kwargs = {name: _held(value, given) for name, value in kwargs.items()}
    asked = kwargs.get("device")
    place = asked or args[0].device if func in COPIES else _one_place(func, args, given, asked)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if draws and not any(value == 0 for value in args if isinstance(value, float)):  # dropout 0
        raise RuntimeError(
            f"Expected a '{place}' device type for generator but found 'cpu': {func}"
        )
    masks = func in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
    if func in WAITS or masks or (func in COPIES and place.type == "cpu"):
        _waits.append(str(func))
    made = func(*held_args, **held_kwargs)
    if place.type == "cpu":
        return made
    place = torch.device(place.type, place.index or 0)
    return _placed(made, place, {id(x.held): x for x in given if isinstance(x, PretendTensor)})


def _held(value: Any, given: list[Tensor]) -> Any:
    """The same of the CPU; its tensors are added to those that are given."""
    if isinstance(value, list | tuple):
        return type(value)([_held(each, given) for each in value])
    if isinstance(value, Tensor):
        given.append(value)
    if isinstance(value, PretendTensor):
        return value.held
    return CPU if isinstance(value, torch.device) else value


def _placed(made: Any, place: torch.device, given: dict[int, PretendTensor]) -> Any:
    """The same on a device; what was changed in place is what was given."""
    if isinstance(made, list | tuple):
        return type(made)([_placed(each, place, given) for each in made])
    if not isinstance(made, Tensor):
        return made
    if (changed := given.get(id(made))) is None:
        return PretendTensor(made, place)
    if changed.shape != made.shape:
        changed.data = PretendTensor(made, place)
    return changed


def _one_place(func: Any, args: Any, given: list[Tensor], asked: Any) -> torch.device:
    """The device of all tensors; raises RuntimeError if there are two, as CUDA does."""
    takes = func in INDEXED and isinstance(args[0], PretendTensor)
    of_cpu = {id(index) for index in args[1]} if takes else set()
    numbers = func in NUMBERS or torch.Tag.pointwise in func.tags
    places = {
        x.device
        for x in given
        if isinstance(x, PretendTensor) or not (id(x) in of_cpu or (numbers and x.dim() == 0))
    }
    if len(places) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, places)))}: {func} of {[x.shape for x in given]}"
        )
    return asked or places.pop()


@contextmanager
def reads() -> Iterator[list[str]]:
    """The operations that have waited for a device since."""
    _waits.clear()
    yield _waits


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """In the block every stage computes on this device, as if it were the machine's GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (models, training, watch):
            patch.setattr(module, "device", lambda: torch.device(name))
        patch.setenv("ACCELERATE_TORCH_DEVICE", name)
        patch.setenv("ACCELERATE_USE_CPU", str(name == "cpu"))  # also where there is a GPU
        # Weights that two modules share stay shared where they move, as on a GPU.
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        PartialState._reset_state()
        yield
        PartialState._reset_state()


class _Backend(registration._DummyBackendModule):
    def is_available(self) -> bool:
        return False  # to whom looks for an accelerator, as other tests of this process do

    def device_count(self) -> int:
        return 2

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


registration._setup_privateuseone_for_python_backend("pretend", backend_module=_Backend())
_all, _aten = Library("_", "IMPL"), Library("aten", "IMPL")
_all.fallback(_kernel, "PrivateUse1")
# `torch.tensor` does not find the fallback, and the others would resize what is empty.
_resizing = [aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default]
for _func in (aten.copy_.default, *_resizing):
    _aten.impl(_func.name(), partial(_kernel, _func), "PrivateUse1")
