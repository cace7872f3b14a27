"""Linear layers of a captured graph, side by side and in the layout that oneDNN wants.

Layers that read the same input (queries, keys and values; gate and up) become one product, and
large matrices are kept in oneDNN's blocked layout, which for the few rows of a verification is
about twice as fast as the matrix library's own. Both are copies of the weights, so this is done for
float32 on a CPU only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

# With fewer weights than this the layout matters less than the detour to it.
SMALLEST_PACKED = 1 << 17


def can_prepack(model: PreTrainedModel) -> bool:
    """Whether the weights may be kept in oneDNN's layout: float32 on a CPU."""
    return bool(
        model.device.type == "cpu"
        and model.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


Layer = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,)."""


class Prepacker:
    """Rewrites the linear layers of the graphs of one model, which share the copied weights.

    The copies live as long as this object, which must live as long as the graphs.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, ...], Layer] = {}
        self._packed: dict[tuple[int, ...], int] = {}

    def pack(self, traced: fx.GraphModule) -> None:
        """Rewrite a graph with `aten.linear` nodes in place."""
        groups: dict[fx.Node, list[Any]] = {}
        for node in traced.graph.nodes:
            if node.target is torch.ops.aten.linear.default and node.args[1].op == "get_attr":
                groups.setdefault(node.args[0], []).append(node)
        for group in groups.values():
            layers = [_layer(traced, node) for node in group]
            large = sum(weight.numel() for weight, _ in layers) >= SMALLEST_PACKED
            if large or len(group) > 1:
                with traced.graph.inserting_before(group[0]):
                    whole = self._insert(traced, group[0], layers, large=large)
                    parts = _split(traced.graph, whole, [len(weight) for weight, _ in layers])
                for node, part in zip(group, parts, strict=True):
                    node.replace_all_uses_with(part)
                    traced.graph.erase_node(node)
        traced.graph.eliminate_dead_code()
        traced.recompile()

    def _insert(
        self, traced: fx.GraphModule, first: Any, layers: Sequence[Layer], *, large: bool
    ) -> fx.Node:
        """The node that applies all layers at once to the input of the first."""
        key = tuple(weight.data_ptr() for weight, _ in layers)
        if large:
            if key not in self._packed:
                self._packed[key] = _KEPT.add(self, *_join(layers))
            size = sum(len(weight) for weight, _ in layers)
            return traced.graph.call_function(
                torch.ops.draftsmith.packed_linear.default, (first.args[0], self._packed[key], size)
            )
        if key not in self._joined:
            self._joined[key] = _join(layers)
        held = []
        for kind, value in zip(("weight", "bias"), self._joined[key], strict=True):
            if value is not None:
                name = f"joined_{kind}_{first.name}"
                traced.register_buffer(name, value, persistent=False)
                held.append(traced.graph.get_attr(name))
        return traced.graph.call_function(torch.ops.aten.linear.default, (first.args[0], *held))


def _layer(traced: fx.GraphModule, node: Any) -> Layer:
    bias = node.args[2] if len(node.args) > 2 else None
    return getattr(traced, node.args[1].target), bias and getattr(traced, bias.target)


def _join(layers: Sequence[Layer]) -> Layer:
    """One layer of several; one without a bias gets zeros if another has one."""
    weight = torch.cat([one.detach() for one, _ in layers])
    if all(bias is None for _, bias in layers):
        return weight, None
    parts = [one.new_zeros(len(one)) if bias is None else bias.detach() for one, bias in layers]
    return weight, torch.cat(parts)


def _split(graph: fx.Graph, whole: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    if len(sizes) == 1:
        return [whole]
    return [
        graph.call_function(torch.ops.aten.slice.Tensor, (whole, -1, start, end))
        for start, end in pairwise(accumulate(sizes, initial=0))
    ]


class _Kept:
    """Packed weights by a number that no other weight ever gets.

    Inductor cannot hold tensors of oneDNN's layout in a graph, so graphs hold the number.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._next = 0

    def add(self, owner: object, weight: Tensor, bias: Tensor | None) -> int:
        handle, self._next = self._next, self._next + 1
        self._layers[handle] = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        weakref.finalize(owner, self._layers.pop, handle)
        return handle

    def linear(self, x: Tensor, handle: int, _size: int) -> Tensor:
        weight, bias = self._layers[handle]
        # Looked up here, because builds of torch without oneDNN do not have it.
        linear = torch.ops.mkldnn._linear_pointwise.default
        out: Tensor = linear(x, weight, bias, "none", [], "")
        return out


_KEPT = _Kept()
_TORCH_LIBRARY: Any = torch.library.Library("draftsmith", "DEF")  # type: ignore[no-untyped-call]
_TORCH_LIBRARY.define("packed_linear(Tensor x, int handle, int size) -> Tensor")
_TORCH_LIBRARY.impl("packed_linear", _KEPT.linear, "CPU")
torch.library.register_fake(
    "draftsmith::packed_linear",
    lambda x, _handle, size: x.new_empty(*x.shape[:-1], size),
    lib=_TORCH_LIBRARY,
)
