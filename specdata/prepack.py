"""Linear layers in oneDNN's blocked layout, while a model only reads its weights.

For the tens of rows of a batch that is decoded, a weight matrix is rearranged for every product,
which in float32 takes as long as the product and in bfloat16 a fifth to a half of it. oneDNN keeps
the rearranged copy. So this is done on a CPU only, and costs a copy of the weights.
"""

from __future__ import annotations

from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

# Larger models are left as they are: the copy may not fit beside them. In bytes.
LARGEST_COPY = 4 << 30
# With fewer weights than this the layout gains less than calling oneDNN costs.
SMALLEST_LAYER = 1 << 15


class prepacked:  # noqa: N801 - used as a function is, `with prepacked(model):`
    """Run the linear layers of models from copies in oneDNN's layout in the `with` block.

    The copies are made once, for any number of blocks. Results are equal up to rounding. Weights
    must not change meanwhile; forwards that record gradients use the weights themselves. In a
    precision that oneDNN does not multiply here, on another device, and for models whose copies
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
            (layer, partial(_forward, layer, reordered(layer.weight.detach())))
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


def _forward(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    """The layer's function of x: (..., in) -> (..., out)."""
    if torch.is_grad_enabled() or x.dtype != layer.weight.dtype:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return reordered_linear(x, packed, layer.bias)


def reordered(weight: Tensor) -> Tensor:
    """A copy of a (out, in) weight in oneDNN's layout, for `reordered_linear` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def reordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with a `reordered` weight: (..., in) -> (..., out)."""
    # Looked up here, because builds of torch without oneDNN do not have it.
    linear = torch.ops.mkldnn._linear_pointwise.default
    out: Tensor = linear(x, weight, bias, "none", [], "")
    return out
