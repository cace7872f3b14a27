"""A captured graph with fewer and faster operators.

Between its matrices a short forward takes as long as its operators take to be called. So those that
do nothing go, the others are called from C++, and linear layers that read the same input (queries,
keys and values; gate and up) become one product.

Large matrices are `packed`, which for the few rows of a verification is faster than the matrix
library's own. Both are copies of the weights, so this is done on a CPU only, in float32, and in
bfloat16 where the processor multiplies it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.subgraph_rewriter import replace_pattern

from specdata.prepack import has_avx512, packed

# With fewer weights than this the copy gains less than calling its library costs.
SMALLEST_PREPACKED = 1 << 17
ATEN: Any = torch.ops.aten
LINEAR = ATEN.linear.default
COMPUTED_ONCE = (
    ATEN.unsqueeze.default,
    ATEN.repeat.default,
    ATEN.sym_size.int,
    ATEN.neg.default,
    ATEN.slice.Tensor,
    ATEN.cat.default,
)

LinearWeights = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,) of a linear layer."""


class Prepacker:
    """Rewrites the linear layers of the graphs of one model, which share the copied weights."""

    def __init__(self) -> None:
        # By the addresses of the weights and biases that were joined.
        self._joined: dict[tuple[int, ...], tuple[Any, tuple[Any, ...]]] = {}

    def rewrite(self, traced: fx.GraphModule) -> None:
        """Rewrite the `aten.linear` nodes of a graph in place."""
        by_input: dict[fx.Node, list[Any]] = {}
        for node in traced.graph.nodes:
            if node.target is LINEAR and node.args[1].op == "get_attr":
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

    def _insert(
        self, traced: fx.GraphModule, first: Any, layers: Sequence[LinearWeights], *, large: bool
    ) -> fx.Node:
        """Add the node that applies all layers at once to the input of the first."""
        key = tuple(part.data_ptr() for layer in layers for part in layer if part is not None)
        if key not in self._joined:
            joined = _join(layers)
            self._joined[key] = packed(*joined, few_rows=True) if large else (LINEAR, joined)
        linear, behind = self._joined[key]
        arguments = [first.args[0]]
        for index, value in enumerate(behind):
            if isinstance(value, Tensor | torch.ScriptObject):
                name = f"joined_{index}_{first.name}"
                setattr(traced, name, value)
                value = traced.graph.create_node("get_attr", name)
            arguments.append(value)
        call = traced.graph.call_function
        if not _reads_four_rows_faster(first.args[0].meta["val"], behind[0]):
            return call(linear, tuple(arguments))
        arguments[0] = call(ATEN.cat.default, ([arguments[0]] * 4, -2))
        return call(ATEN.slice.Tensor, (call(linear, tuple(arguments)), -2, 0, 1))


def _reads_four_rows_faster(x: Any, weight: Any) -> bool:
    """True if oneDNN's kernel for four rows reads such a matrix from memory faster than for one.

    By 10 to 25 % with AVX-512; without it, or from a cache, it is slower.
    """
    if not (isinstance(weight, Tensor) and has_avx512()):
        return False
    return x.dim() > 1 and x.shape[-2] == 1 and weight.numel() >= 1 << 20


def simplify(traced: fx.GraphModule) -> None:
    """Make the same of fewer operators."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and _gives_its_input(node):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    for node in traced.graph.nodes:
        if node.target is ATEN.rsqrt.default:
            _norm(traced, node)
        elif node.target is ATEN.scaled_dot_product_attention.default:
            _group(traced.graph, node)
    replace_pattern(traced, _rotated, _rolled)
    _share(traced.graph)
    traced.graph.eliminate_dead_code()  # which knows of operators only what they change


def interpreted(traced: fx.GraphModule) -> Callable[..., tuple[Tensor, ...]]:
    """Run a graph by the interpreter of TorchScript, in C++, with the same results.

    In Python the operators of a small model take as long to be called as its products take: between
    two of them the weights push Python's code out of the processor's caches. Raises RuntimeError
    for an operator that TorchScript does not know.
    """
    weights: list[Any] = []
    inputs: list[str] = []
    classes: dict[str, Any] = {}  # of packed matrices
    for node in traced.graph.nodes:
        kind = "torch.Tensor"
        if node.op == "get_attr":  # given behind the inputs
            weights.append(getattr(traced, node.target))
            if isinstance(weights[-1], torch.ScriptObject):
                *_, library, kind = weights[-1]._type().qualified_name().split(".")
                classes[kind] = getattr(getattr(torch.classes, library), kind)
            node.op, node.target = "placeholder", node.name
        if node.op == "placeholder":
            inputs.append(f"{node.name}: {kind}")
        if isinstance(node.target, torch._ops.OpOverload):
            packet = node.target.overloadpacket
            is_size = packet.__name__.startswith("sym_")  # aten.sym_size: aten.size there
            node.target = getattr(ATEN, packet.__name__[4:], packet) if is_size else packet
    code = traced.graph.python_code("self")
    _, *lines = code.src.strip().split("\n")
    body = "\n".join(line.split(";  ")[0] for line in lines)  # without the deletion of variables
    unit = torch.jit.CompilationUnit()  # unlike torch.jit.script's, freed with the graph
    unit.define(f"def forward({', '.join(inputs)}):\n{body}\n", (code.globals | classes).get)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        # Optimising would take time for each new shape.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            outputs: tuple[Tensor, ...] = unit.forward(*tensors, *weights)
        return outputs

    return run


def _gives_its_input(node: Any) -> bool:
    """True of a conversion to the type that a tensor has, a slice of all of it, or an alias."""
    source, *rest = node.args
    if node.target in (ATEN.to.dtype, ATEN.to.device):
        before, after = source.meta["val"], node.meta["val"]
        same = (before.dtype, before.device) == (after.dtype, after.device)
        return same and not node.kwargs
    if node.target is ATEN.slice.Tensor:
        return bool(rest[1:] == [0, sys.maxsize])
    if node.target is ATEN.mul.Tensor:
        return rest == [1.0] and bool(source.meta["val"].is_floating_point())
    return bool(node.target is ATEN.alias.default)


def _norm(traced: fx.GraphModule, rsqrt: Any) -> None:
    """Divide by the length of a vector instead of by the root of its mean square.

    x / sqrt(mean(x^2) + e) * g  =  x / hypot(|x|, sqrt(H e)) * sqrt(H) g  for x of size H
    """
    graph, match = traced.graph, [rsqrt]
    for target in (ATEN.add.Tensor, ATEN.mean.dim, ATEN.pow.Tensor_Scalar):
        match.append(match[-1].args[0])
        if match[-1].target is not target:
            return
    (_, add, mean, power), (scaled, *others) = match, rsqrt.users
    x = power.args[0]
    if others or mean.args[1:] != ([-1], True) or power.args[1] != 2:
        return
    if not isinstance(add.args[1], float) or scaled.target is not ATEN.mul.Tensor:
        return
    (weighed, *others) = scaled.users
    if others or scaled.args != (x, rsqrt) or weighed.target is not ATEN.mul.Tensor:
        return
    weight = weighed.args[0]
    if weight.op != "get_attr" or weighed.args[1] is not scaled:
        return
    g = getattr(traced, weight.target)
    size = g.shape[-1]  # a number, where that of x may be a symbol
    with graph.inserting_before(weighed):
        constants = g.detach() * size**0.5, g.new_tensor((size * add.args[1]) ** 0.5)
        for name, value in zip(("scale", "least"), constants, strict=True):
            traced.register_buffer(f"{name}_{rsqrt.name}", value, persistent=False)
        scale, least = (graph.get_attr(f"{name}_{rsqrt.name}") for name in ("scale", "least"))
        length = graph.call_function(ATEN.linalg_vector_norm.default, (x, 2, [-1], True))
        length = graph.call_function(ATEN.hypot.default, (length, least))
        unit = graph.call_function(ATEN.div.Tensor, (x, length))
        node = graph.call_function(ATEN.mul.Tensor, (unit, scale))
    weighed.replace_all_uses_with(node)


def _group(graph: fx.Graph, attention: Any) -> None:
    """Attend with the query heads that share a key head as so many more tokens of one head."""
    q, k, v, *mask = attention.args
    if not mask or not attention.kwargs.get("enable_gqa") or mask[0].meta["val"].dim() != 4:
        return
    (rows, heads, _, size), shared = q.meta["val"].shape, int(k.meta["val"].shape[1])
    heads, size = int(heads), int(size)
    if rows != 1 or mask[0].meta["val"].shape[1] != 1:
        return
    kwargs = {name: value for name, value in attention.kwargs.items() if name != "enable_gqa"}
    with graph.inserting_before(attention):
        q = graph.call_function(ATEN.reshape.default, (q, [1, shared, -1, size]))
        each = graph.call_function(ATEN.repeat.default, (mask[0], [1, 1, heads // shared, 1]))
        out = graph.call_function(attention.target, (q, k, v, each, *mask[1:]), kwargs)
        out = graph.call_function(ATEN.reshape.default, (out, [1, heads, -1, size]))
    attention.replace_all_uses_with(out)
    graph.erase_node(attention)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    """A rotary embedding as transformers writes it."""
    ahead = ATEN.neg.default(ATEN.slice.Tensor(x, 3, half, sys.maxsize))
    turned = ATEN.cat.default([ahead, ATEN.slice.Tensor(x, 3, 0, half)], -1)
    return ATEN.add.Tensor(ATEN.mul.Tensor(x, cos), ATEN.mul.Tensor(turned, sin))


def _rolled(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Any:
    """The same; the sines with their signs are made once for all layers."""
    ahead = ATEN.neg.default(ATEN.slice.Tensor(sin, -1, 0, half))
    signed = ATEN.cat.default([ahead, ATEN.slice.Tensor(sin, -1, half, sys.maxsize)], -1)
    turned = ATEN.roll.default(x, [half], [-1])
    return ATEN.addcmul.default(ATEN.mul.Tensor(x, cos), turned, signed)


def _share(graph: fx.Graph) -> None:
    """Make once what is made of the same tensors several times."""
    made: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target in COMPUTED_ONCE:
            first = made.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)


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
    parts = graph.call_function(ATEN.split_with_sizes.default, (joined, sizes, -1))
    return [graph.call_function(operator.getitem, (parts, index)) for index in range(len(sizes))]
