"""Linear layers by copies that are read faster, while a model only reads its weights.

For the rows of a batch or of a verification, a weight matrix is rearranged for every product, which
in float32 takes as long as the product and in bfloat16 a fifth to a half of it. Libraries in torch
keep a rearranged copy. FBGEMM keeps it in half precision and multiplies in float32: half the bytes
to read, where that loses nothing that float32 would keep, as of most weights that were stored in
bfloat16 or float16. oneDNN keeps the others, and with AVX-512 wide ones that batches read. So this
is done on a CPU only, and costs a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

# Larger models are left as they are: the copy may not fit beside them. In bytes.
LARGEST_COPY = 4 << 30
# Matrices of so many outputs, as a vocabulary has, are multiplied with many rows faster by oneDNN
# than by FBGEMM where there is AVX-512.
WIDE = 1 << 14
# With fewer weights than this the copy gains less than calling its library costs.
SMALLEST_LAYER = 1 << 15
Packed = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A linear layer: an operator, and what it takes behind the input."""


class prepacked:  # noqa: N801 - used as a function is, `with prepacked(model):`
    """Run the linear layers of models from `packed` copies in the `with` block.

    The copies are made once, for any number of blocks. Results are equal up to rounding. Weights
    must not change meanwhile; forwards that record gradients use the weights themselves. In a
    precision that no library multiplies here, on another device, and for models whose copies
    would exceed `LARGEST_COPY`, nothing changes.
    """

    def __init__(self, *models: nn.Module) -> None:
        layers: dict[int, nn.Linear] = {}
        for model in models:
            linear = {id(layer): layer for layer in model.modules() if _can_prepack(layer)}
            # A weight that two layers share counts twice: it is copied twice.
            if sum(layer.weight.nbytes for layer in linear.values()) <= LARGEST_COPY:
                layers |= linear
        self._layers = [
            (layer, partial(_forward, layer, packed(layer.weight, layer.bias, few_rows=False)))
            for layer in layers.values()
        ]

    def __enter__(self) -> None:
        for layer, forward in self._layers:
            layer.forward = forward  # type: ignore[method-assign]

    def __exit__(self, *_error: object) -> None:
        for layer, _ in self._layers:
            layer.__dict__.pop("forward", None)


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies matrices of this precision on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _can_prepack(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return bool(
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and type(layer.weight.data) is Tensor  # not the part of one that several processes hold
        and layer.weight.numel() >= SMALLEST_LAYER
        and multiplies(layer.weight.device, layer.weight.dtype)
    )


def _forward(layer: nn.Linear, copy: Packed, x: Tensor) -> Tensor:
    """The layer's function of x: (..., in) -> (..., out)."""
    if torch.is_grad_enabled() or x.dtype != layer.weight.dtype or x.dim() < 2:
        return nn.functional.linear(x, layer.weight, layer.bias)
    operator, behind = copy
    return operator(x, *behind)


def packed(weight: Tensor, bias: Tensor | None, *, few_rows: bool) -> Packed:
    """A copy of a layer's weight (out, in) and bias (out,), for a precision that `multiplies`.

    For inputs of a few rows, or of many.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    # Looked up here, because builds of torch without these libraries do not have them.
    fbgemm = torch.backends.quantized.engine in ("x86", "fbgemm")
    if fbgemm and (few_rows or len(weight) < WIDE or not has_avx512()) and is_half(weight):
        copy = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return torch.ops.quantized.linear_dynamic_fp16.default, (copy,)
    copy = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    bias = None if bias is None else bias.contiguous()  # oneDNN does not ask for its strides
    return torch.ops.mkldnn._linear_pointwise.default, (copy, bias, "none", [], "")


def has_avx512() -> bool:
    """True if torch computes with AVX-512 here."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_half(weight: Tensor) -> bool:
    """True if half precision loses less of a float32 weight than its products are rounded by."""
    return weight.dtype == torch.float32 and all(
        (rows.half().double() - rows).norm() <= 2**-24 * rows.double().norm()
        for rows in torch.split(weight, 256)
    )
