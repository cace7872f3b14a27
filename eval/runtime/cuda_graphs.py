"""Forwards of a few tokens as CUDA graphs over a KV cache that stays where it is.

A small draft's forward is a hundred kernels of a few microseconds each, and asking a GPU for one of
them takes as long. A CUDA graph is asked for at once. It repeats its kernels on the addresses with
which they were recorded, so everything that changes from one forward to the next stands in buffers
of its own: tokens, their positions, where keys and values are written, which of them a node of a
tree attends to. The cache is of a fixed capacity; a graph reads the first 256, 512, 1024, ... of
its positions, so that a short sequence does not pay for a long one, and masks those that are not in
use. There is a graph for each number of tokens and each of these lengths, made when it is needed.

`Recorder` is the one place that needs a GPU; tests put one in its place that records the tensor
operations and repeats them on the same tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.runtime.graphs import (
    WeightVersions,
    check_capturable,
    check_same_logits,
    eager_forward,
    refusing_capture,
    weight_versions,
)
from eval.runtime.kv_cache import CacheLayer
from eval.runtime.layout import Layout, lay_out
from eval.runtime.model_checks import takes_masks
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden

# So many tokens have a graph of their own; more are padded to a multiple, and still more run
# eagerly, as prompts do: their kernels take longer than asking for them.
EXACT_COUNTS, COUNT_STEP, MOST_TOKENS = 16, 16, 128
# Cache positions that the smallest graphs read; twice as many for each further size.
SMALLEST_BUCKET = 256
# A cache is made for at least so many tokens, since graphs must be made again when it is outgrown.
SMALLEST_CAPACITY = 2048
# Kernels choose their algorithms and libraries get their workspaces in the first runs.
WARM_UPS = 3

Outputs = tuple[Tensor, Tensor]
"""Logits (1, n, V') and what the lm_head read (1, n, H)."""


NO_NODES = torch.zeros(0, 0, dtype=torch.bool)


class ForwardSizes(NamedTuple):
    """How many tokens the forwards of a decoder have that follow a prompt.

    Args:
        chains: those of consecutive tokens.
        trees: those with nodes of a tree.
    """

    chains: Sequence[int] = ()
    trees: Sequence[int] = ()


class Recorder(Protocol):
    """What makes graphs."""

    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Record the work that `run` asks of the device.

        Args:
            run: reads and writes tensors that stay where they are. It is called a few times, and
                asks the same of the device each time.

        Returns:
            What repeats that work, on the same addresses, and returns the outputs. They stand in
            the same place each time, and any other graph of this recorder may write over them.
        """


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, since no two of them run at a time.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The warm-up and the capture share a stream: libraries keep workspaces for each.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See `Recorder.record`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = run()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What records graphs on a device; None where forwards are traced instead."""
    return CudaRecorder(device) if device.type == "cuda" else None


_SHARED: weakref.WeakKeyDictionary[PreTrainedModel, GraphPool] = weakref.WeakKeyDictionary()


def shared_pool(model: PreTrainedModel, recorder: Recorder) -> GraphPool:
    """The caches and graphs of a model, shared by its decoders while its weights stay the same.

    Raises:
        ConfigError: for models whose forward cannot be a graph.
    """
    versions = weight_versions(model)
    if model not in _SHARED or _SHARED[model].versions != versions:
        _SHARED[model] = GraphPool(model, recorder, versions)
    return _SHARED[model]


class GraphPool:
    """Static caches of one model, each with its graphs, lent to one decoder at a time.

    A cache stays in memory when it is given back, because its graphs hold its address.

    Args:
        model: the model, which is not kept alive.
        recorder: what makes graphs.
        versions: of the model's weights; graphs are valid for these only.

    Raises:
        ConfigError: if the model's forward depends on the length of the sequence, takes no mask, or
            is spread over devices.
    """

    def __init__(self, model: PreTrainedModel, recorder: Recorder, versions: WeightVersions):
        check_capturable(model)
        if not takes_masks(model) or "local" in getattr(model.config, "attention_layers", ()):
            raise ConfigError(
                f"{model.config.model_type} with {model.config._attn_implementation} attention "
                "does not attend by a given mask alone, which CUDA graphs need: load it with "
                "attn_implementation='sdpa', or use engine 'eager'"
            )
        self.versions = versions
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._free: list[StaticGraphs] = []

    def lend(
        self, length: int, templates: Sequence[tuple[Tensor, Tensor]] | None
    ) -> StaticGraphs | None:
        """A cache of at least so many positions, until it is given back.

        Args:
            length: cache positions.
            templates: empty keys and values of each layer, if they are known.

        Returns:
            None if there is no cache yet and none can be made.
        """
        free = self._free.pop() if self._free else None
        if free is not None and free.capacity >= length:
            return free
        model = self._model()
        assert model is not None
        templates = free.templates if free is not None else templates
        if templates is None:
            return None
        # One that is outgrown is dropped, with its graphs: the larger one serves short sequences.
        return StaticGraphs(model, self._recorder, templates, _power(length, SMALLEST_CAPACITY))

    def give_back(self, graphs: StaticGraphs) -> None:
        """Let another decoder use a cache; what it holds may be written over."""
        self._free.append(graphs)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph and what it reads.

    Args:
        numbers: (3, n) token ids, positions, and the cache positions that are written.
        visible: (n, bucket) the cache positions that each token attends to; None if those are all
            up to its own.
        replay: see `Recorder.record`.
    """

    numbers: Tensor
    visible: Tensor | None
    replay: Callable[[], Outputs]


class StaticGraphs:
    """A KV cache of one sequence that stays where it is, and the graphs of forwards over it.

    Args:
        model: the model, which is not kept alive.
        recorder: what makes graphs.
        templates: empty keys and values of each layer.
        capacity: cache positions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recorder: Recorder,
        templates: Sequence[tuple[Tensor, Tensor]],
        capacity: int,
    ) -> None:
        self.capacity = capacity
        self.templates = list(templates)
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._graphs: dict[tuple[int, int, bool], _Recorded] = {}
        # Not inference tensors, which nothing outside of inference mode could write to.
        with torch.inference_mode(False):
            self.buffers = [
                (_empty_cache(keys, capacity), _empty_cache(values, capacity))
                for keys, values in templates
            ]
            self._columns = torch.arange(capacity, device=model.device)

    def loaded(self, tokens: Sequence[int], layout: Layout) -> Callable[[], Outputs]:
        """The graph of one forward with its inputs in place: `run`, as often as it is called."""
        width, tree = _padded(len(tokens)), layout.visible is not None
        key = width, _power(layout.start + width, SMALLEST_BUCKET), tree
        recorded = self._graphs.get(key)
        if recorded is None:
            recorded = self._graphs[key] = self._record(*key, tokens, layout)
        _fill(recorded.numbers, recorded.visible, tokens, layout)
        return recorded.replay

    def run(self, tokens: Sequence[int], layout: Layout) -> Outputs:
        """Run one forward, which writes keys and values of the new tokens into the cache.

        Args:
            tokens: n ids that the model has.
            layout: where they go.

        Returns:
            Logits (n, V') and what the lm_head read (n, H), which later forwards leave alone.

        Raises:
            ConfigError: if the forward cannot be captured, or its graph gives other logits.
        """
        logits, hidden = self.loaded(tokens, layout)()
        count = len(tokens)
        return logits[0, :count].clone(), hidden[0, :count].clone()

    def prepare(self, sizes: ForwardSizes, length: int, tokens: Sequence[int]) -> None:
        """Make the graphs of forwards of some sizes, in sequences of up to a length.

        What the cache holds is written over.

        Args:
            sizes: of the forwards; those that run eagerly are passed over.
            length: tokens of the longest sequence.
            tokens: what to compare with the eager forward on; `MOST_TOKENS` of them.
        """
        # A tree's nodes come on top of the sequence.
        length += max(sizes.trees, default=0)
        end, last = SMALLEST_BUCKET, min(_power(length, SMALLEST_BUCKET), self.capacity)
        while end <= last:
            for nodes, counts in ((False, sizes.chains), (True, sizes.trees)):
                for count in {_padded(count) for count in counts if 0 < count <= MOST_TOKENS}:
                    parents = [0] * count if nodes else []
                    layout = lay_out(end - count, NO_NODES, count, parents)
                    self.run(tokens[:count], layout)
            end *= 2

    def _record(
        self, width: int, bucket: int, tree: bool, tokens: Sequence[int], layout: Layout
    ) -> _Recorded:
        """Make a graph, and compare it with the eager forward on the given inputs."""
        model = self._model()
        assert model is not None
        device, dtype = model.device, model.dtype
        with torch.inference_mode(False), torch.no_grad(), refusing_capture(model):
            numbers = torch.zeros(3, width, dtype=torch.long, device=device)
            visible = torch.zeros(width, bucket, dtype=torch.bool, device=device) if tree else None
            columns = self._columns[:bucket]
            views = [(keys[:, :, :bucket], values[:, :, :bucket]) for keys, values in self.buffers]
            cache = Cache(layers=[_IndexedLayer(*view, numbers[2]) for view in views])

            def run() -> Outputs:
                hidden: list[Tensor] = []
                seen = columns <= numbers[2].unsqueeze(1) if visible is None else visible
                mask = torch.zeros(width, bucket, dtype=dtype, device=device)
                mask.masked_fill_(~seen, torch.finfo(dtype).min)
                with capturing_hidden(model, hidden.append):
                    logits: Tensor = model(
                        input_ids=numbers[0:1],
                        position_ids=numbers[1:2],
                        attention_mask=mask[None, None],
                        past_key_values=cache,
                        use_cache=True,
                    ).logits
                return logits, hidden[0]

            _fill(numbers, visible, tokens, layout)
            recorded = _Recorded(numbers, visible, self._recorder.record(run))
            count = len(tokens)
            actual = recorded.replay()[0][:, :count].clone()
            expected = self._eagerly(model, tokens, layout)
        check_same_logits(model, expected, actual)
        return recorded

    def _eagerly(self, model: PreTrainedModel, tokens: Sequence[int], layout: Layout) -> Tensor:
        """The logits (1, n, V') of the model's own forward, with a cache just as long as needed."""
        count, end = len(tokens), layout.start + len(tokens)
        visible = layout.visible
        if visible is None:
            visible = torch.ones(count, end, dtype=torch.bool).tril(layout.start)
        mask = torch.zeros(visible.shape, dtype=model.dtype)
        mask.masked_fill_(~visible, torch.finfo(model.dtype).min)
        views = [buffer[:, :, :end] for pair in self.buffers for buffer in pair]
        ids, positions = torch.tensor([[tokens], [layout.positions]], device=model.device)
        forward = eager_forward(model, masked=True, last=False)
        return forward(ids, positions, mask[None, None].to(model.device), *views)[0]


def _fill(numbers: Tensor, visible: Tensor | None, tokens: Sequence[int], layout: Layout) -> None:
    """Write a forward's inputs where its graph reads them, without waiting for the device."""
    count, width = len(tokens), numbers.shape[1]
    # Padding is written behind the tokens, where it is masked until it is written over.
    padding = [0] * (width - count)
    rows = [
        [*tokens, *padding],
        [*layout.positions, *padding],
        list(range(layout.start, layout.start + width)),
    ]
    numbers.copy_(torch.tensor(rows), non_blocking=True)
    if visible is not None:
        assert layout.visible is not None
        attended = torch.zeros(visible.shape, dtype=torch.bool)
        attended[:count, : layout.visible.shape[1]] = layout.visible
        visible.copy_(attended, non_blocking=True)


class _IndexedLayer(CacheLayer):
    """Keys and values (1, heads, bucket, size), written where an index (n,) on the device says."""

    def __init__(self, keys: Tensor, values: Tensor, index: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.start = self.end = keys.shape[2]
        self._index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens."""
        self.keys.index_copy_(2, self._index, key_states)
        self.values.index_copy_(2, self._index, value_states)
        return self.keys, self.values


def _empty_cache(template: Tensor, capacity: int) -> Tensor:
    """Zeros, not garbage: masked values are still multiplied by 0, and 0 * nan is nan."""
    return template.new_zeros(1, template.shape[1], capacity, template.shape[3])


def room_for(start: int, count: int) -> int:
    """Cache positions that so many tokens behind others need."""
    return start + (_padded(count) if count <= MOST_TOKENS else count)


def _padded(count: int) -> int:
    """Tokens of the graph that runs so many."""
    return count if count <= EXACT_COUNTS else -(-count // COUNT_STEP) * COUNT_STEP


def _power(length: int, smallest: int) -> int:
    """`smallest` times the power of two that is enough."""
    while smallest < length:
        smallest *= 2
    return smallest
