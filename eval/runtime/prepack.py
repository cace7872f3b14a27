"""Linear layers of a captured graph, joined and in the layout that oneDNN reads fastest.

Layers that read the same input (queries, keys and values; gate and up) become one product, and
large matrices are kept in oneDNN's blocked layout, which for the few rows of a verification is
about twice as fast as the matrix library's own. Both are copies of the weights, so this is done on
a CPU only, in float32, and in bfloat16 where the processor multiplies it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from specdata.prepack import reordered, reordered_linear

# With fewer weights than this the layout gains less than calling oneDNN costs.
SMALLEST_PREPACKED = 1 << 17

LinearWeights = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,) of a linear layer."""


class Prepacker:
    """Rewrites the linear layers of the graphs of one model, which share the copied weights.

    The copies live as long as this object, which must live as long as the graphs.
    """

    def __init__(self) -> None:
        # By the addresses of the weights that were joined.
        self._joined: dict[tuple[int, ...], LinearWeights] = {}
        self._handles: dict[tuple[int, ...], int] = {}

    def rewrite(self, traced: fx.GraphModule) -> None:
        """Rewrite the `aten.linear` nodes of a graph in place."""
        by_input: dict[fx.Node, list[Any]] = {}
        for node in traced.graph.nodes:
            if node.target is torch.ops.aten.linear.default and node.args[1].op == "get_attr":
                by_input.setdefault(node.args[0], []).append(node)
        for nodes in by_input.values():
            layers = [_weights(traced, node) for node in nodes]
            large = sum(weight.numel() for weight, _ in layers) >= SMALLEST_PREPACKED
            if large or len(nodes) > 1:
                with traced.graph.inserting_before(nodes[0]):
                    joined = self._insert(traced, nodes[0], layers, large=large)
                    parts = _split(traced.graph, joined, [len(weight) for weight, _ in layers])
                for node, part in zip(nodes, parts, strict=True):
                    node.replace_all_uses_with(part)
                    traced.graph.erase_node(node)
        traced.graph.eliminate_dead_code()
        traced.recompile()

    def _insert(
        self, traced: fx.GraphModule, first: Any, layers: Sequence[LinearWeights], *, large: bool
    ) -> fx.Node:
        """Add the node that applies all layers at once to the input of the first."""
        key = tuple(weight.data_ptr() for weight, _ in layers)
        if large:
            if key not in self._handles:
                self._handles[key] = _PREPACKED.add(self, *_join(layers))
            size = sum(len(weight) for weight, _ in layers)
            return traced.graph.call_function(
                torch.ops.draftsmith.prepacked_linear.default,
                (first.args[0], self._handles[key], size),
            )
        if key not in self._joined:
            self._joined[key] = _join(layers)
        arguments = []
        for kind, value in zip(("weight", "bias"), self._joined[key], strict=True):
            if value is not None:
                name = f"joined_{kind}_{first.name}"
                traced.register_buffer(name, value, persistent=False)
                arguments.append(traced.graph.get_attr(name))
        return traced.graph.call_function(
            torch.ops.aten.linear.default, (first.args[0], *arguments)
        )


def _weights(traced: fx.GraphModule, node: Any) -> LinearWeights:
    bias = node.args[2] if len(node.args) > 2 else None
    return getattr(traced, node.args[1].target), bias and getattr(traced, bias.target)


def _join(layers: Sequence[LinearWeights]) -> LinearWeights:
    """One layer of several; one without a bias gets zeros if another has one."""
    joined = torch.cat([weight.detach() for weight, _ in layers])
    if all(bias is None for _, bias in layers):
        return joined, None
    biases = [
        weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in layers
    ]
    return joined, torch.cat(biases)


def _split(graph: fx.Graph, joined: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    """The nodes that take the output of a joined layer apart."""
    if len(sizes) == 1:
        return [joined]
    return [
        graph.call_function(torch.ops.aten.slice.Tensor, (joined, -1, start, end))
        for start, end in pairwise(accumulate(sizes, initial=0))
    ]


class _PrepackedWeights:
    """Weights in oneDNN's layout, by handles: numbers that are never used again.

    Inductor cannot hold tensors of that layout in a graph, so graphs hold the handle.
    """

    def __init__(self) -> None:
        self._layers: dict[int, LinearWeights] = {}
        self._next = 0

    def add(self, owner: object, weight: Tensor, bias: Tensor | None) -> int:
        """Store a layer for as long as `owner` lives; return its handle."""
        handle, self._next = self._next, self._next + 1
        self._layers[handle] = reordered(weight), bias
        weakref.finalize(owner, self._layers.pop, handle)
        return handle

    def linear(self, x: Tensor, handle: int, _size: int) -> Tensor:
        """Apply a layer: (..., in) to (..., out)."""
        return reordered_linear(x, *self._layers[handle])


_PREPACKED = _PrepackedWeights()
_TORCH_LIBRARY: Any = torch.library.Library("draftsmith", "DEF")  # type: ignore[no-untyped-call]
_TORCH_LIBRARY.define("prepacked_linear(Tensor x, int handle, int size) -> Tensor")
_TORCH_LIBRARY.impl("prepacked_linear", _PREPACKED.linear, "CPU")
torch.library.register_fake(
    "draftsmith::prepacked_linear",
    lambda x, _handle, size: x.new_empty(*x.shape[:-1], size),
    lib=_TORCH_LIBRARY,
)
