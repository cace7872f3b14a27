"""Forwards of a few tokens as one graph of tensor operations, without the model's Python.

A draft is so small that what lies between its matrices costs more than its arithmetic, and on a CPU
the matrix library is slow for the handful of rows that a verification has. `CachedModel` therefore
runs forwards by one of two engines, with the same results but for rounding:

* "eager": the model's own forward;
* "captured": the forward is traced once with symbolic lengths (`make_fx`) and run in C++, as one of
  fewer operators (`eval.runtime.prepack`), its large matrices kept a second time, `packed`. For
  CPUs: elsewhere it is "eager".

Long prompts always run eagerly. The tokens of a batch are packed in one row
(`eval.runtime.transformers_models`), for which there are graphs of their own.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import Cache, PreTrainedModel

from eval.runtime.engines import ENGINES, Engine
from eval.runtime.kv_cache import CacheLayer, LayerKind, Places, store
from eval.runtime.masks import Sight, seeing
from eval.runtime.prepack import Prepacker, interpreted, simplify
from eval.runtime.transformers_models import (
    WeightVersions,
    attending_packed,
    cached_layers,
    takes_graphs,
    weight_versions,
)
from specdata.cache import cache_argument
from specdata.drafts.draft_vocabulary import narrow_logits
from specdata.drafts.states_network import is_in_blocks
from specdata.drafts.taps import capturing_taps
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden
from specdata.prepack import multiplies

# Lengths to trace with: for the tokens and slots of a forward, and for the cache. All unlike each
# other, and candidates enough to be unlike every other size of a model.
TOKEN_LENGTHS = (11, 13, 17, 19, 23, 29, 31)
CACHE_LENGTHS = (131, 137, 139, 149, 151)
# A graph must reproduce the eager logits to this share of their largest; ropes are in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}

Graph = Callable[..., tuple[Tensor, ...]]
"""A forward of tensors: (token ids or what stands for them, positions, mask or `Sight` if there is
one, places if the tokens are packed, keys and values of each layer) to (logits, hidden states, taps
if any are asked for); see `ForwardGraphs.__call__` for the shapes."""

Map = Callable[[Tensor, Tensor], Tensor]
"""What a draft reads of (n,) token ids and (n, F) states: (n, H), by a method of its input."""

Key = tuple[str, tuple[int, ...]]
_CAPTURING = threading.Lock()  # tracing patches modules and torch, for all threads
_SHARED: weakref.WeakKeyDictionary[PreTrainedModel, dict[Key, ForwardGraphs]] = (
    weakref.WeakKeyDictionary()
)


def shared_graphs(
    model: PreTrainedModel, engine: Engine, taps: tuple[int, ...] = ()
) -> ForwardGraphs:
    """The graphs of a model, shared by all decoders that use it while its weights stay the same.

    With `taps` they give these states, too, by the same copies of the weights.

    Changed weights are found by `weight_versions`.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    by_key, key = _SHARED.setdefault(model, {}), (engine, taps)
    versions = weight_versions(model)
    if key not in by_key or by_key[key].versions != versions:
        same = (each.prepacker for each in by_key.values() if each.versions == versions)
        by_key[key] = ForwardGraphs(model, versions, next(same, None) or Prepacker(), taps)
    return by_key[key]


def engine_used(model: PreTrainedModel, engine: Engine) -> Engine:
    """The engine that ran a model: "eager" where no graph could be made in this process."""
    refused = any(each.fails for each in _SHARED.get(model, {}).values())
    return "eager" if refused or not takes_graphs(model) else engine


class EagerWarning(UserWarning):
    """A model whose forwards run eagerly, although another engine was asked for."""


class CaptureError(Exception):
    """A forward that is not one graph: of experts that depend on the tokens, for example."""


class _GraphKind(NamedTuple):
    """The kind of forwards that a graph serves."""

    single: bool
    masks: int  # tensors that say what is attended to: 0, 1 (a mask) or 3 (a `Sight`)
    keep: int  # logits after so many of the last tokens only; 0: after all
    places: int  # tensors that say where tokens of several slots go: 3, or 0 if there is one slot


class ForwardGraphs:
    """The graphs of one model, one for each `_GraphKind`, made when they are first needed.

    They are valid for these `versions` of its weights only; the model is not kept alive. `taps` are
    states inside the model that they give (`specdata.drafts.taps`). Raises ConfigError if the
    model is spread over devices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        versions: WeightVersions,
        prepacker: Prepacker,
        taps: tuple[int, ...] = (),
    ) -> None:
        weights = list(model.parameters())
        if len({weight.device for weight in weights}) > 1 or isinstance(weights[0], DTensor):
            raise ConfigError(
                "a model spread over devices or processes cannot be captured: use engine 'eager'"
            )
        self.versions = versions
        self.fails = False  # the forward cannot be captured
        self._model = weakref.ref(model)
        self._taps = taps
        self._in_blocks = is_in_blocks(model)
        self.prepacker = prepacker
        self._graphs: dict[_GraphKind | str, Graph] = {}

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | Sight | None,
        cache: Sequence[Tensor],
        logits_to_keep: int,
        places: Places = (),
    ) -> tuple[Tensor, ...]:
        """Run one forward, which writes keys and values of the new tokens into the cache.

        Args:
            ids: (1, n) new tokens, or (1, n, H) inputs of a draft that reads its target's states.
            positions: (1, n).
            mask: (1, 1, n, length) additive, or None for one token that attends to everything; a
                sight, if layers make masks of their own of it.
            cache: keys and values of each layer, (1, heads, length, size); the new tokens take the
                last n positions.
            logits_to_keep: logits are needed after this many of the last tokens.
            places: of tokens packed from B slots; the mask is then (B, 1, m, length) and the cache
                (B, heads, length, size).

        Returns:
            Logits (1, logits_to_keep or more, V'), what the lm_head read (1, as many, H), and taps
            (1, n, F) if there are any.
        """
        count = ids.shape[1]
        kind = _GraphKind(
            single=count == 1,
            masks=0 if mask is None else 3 if isinstance(mask, Sight) else 1,
            keep=logits_to_keep if self._in_blocks or logits_to_keep == 1 < count else 0,
            places=len(places),
        )
        graph = self._graphs.get(kind)
        masks = mask if isinstance(mask, Sight) else () if mask is None else (mask,)
        inputs = (ids, positions, *masks, *places, *cache)
        if graph is None:
            model = self._model()
            assert model is not None
            forward = eager_forward(model, kind.masks, kind.keep, self._taps, kind.places)
            graph = self._graphs[kind] = self._capture(forward, inputs, _examples(inputs, kind))
        return graph(*inputs)

    def mapped(self, way: Map, ids: Tensor, states: Tensor) -> Tensor:
        """Apply one of the maps by which a draft reads states; its method's name tells which."""
        graph = self._graphs.get(way.__name__)
        if graph is None:
            count = next(n for n in TOKEN_LENGTHS if n != states.shape[1])
            examples = [ids.new_zeros(count), states.new_zeros(count, states.shape[1])]
            graph = self._capture(lambda *both: (way(*both),), (ids, states), examples)
            self._graphs[way.__name__] = graph
        return graph(ids, states)[0]

    def _capture(
        self, forward: Graph, inputs: Sequence[Tensor], examples: Sequence[Tensor]
    ) -> Graph:
        """Trace a function with examples, and compare graph and function on the given inputs."""
        model = self._model()
        assert model is not None
        try:
            with _CAPTURING, torch.inference_mode(False), torch.no_grad():
                make = make_fx(
                    forward, tracing_mode="symbolic", _allow_non_fake_inputs=True, pre_dispatch=True
                )
                with _sharing_keys(model):  # not in the forward that the graph is compared with
                    traced = make(*examples)
                if multiplies(model.device, model.dtype):
                    self.prepacker.rewrite(traced)
                simplify(traced)
                graph = interpreted(traced)
            # Either may run first: both write the same keys and values to the same positions.
            expected, actual = forward(*inputs)[0], graph(*inputs)[0]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            self.fails = True
            reason = str(error).strip().split("\n")[0]  # a graph's code may follow
            raise CaptureError(
                f"the forward of {model.config.model_type} cannot be captured ({reason})"
            ) from error
        check_same_logits(model, expected, actual)
        return graph


@contextmanager
def _sharing_keys(model: PreTrainedModel) -> Iterator[None]:
    """Inside, heads that share keys read them where they are on a CPU, with a mask as without one.

    transformers copies a sequence's keys and values for each head where there is a mask, lest a GPU
    fall back to a slow kernel; a CPU's takes both, with the same results.
    """
    if model.device.type != "cpu":
        yield
        return
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def check_same_logits(model: PreTrainedModel, expected: Tensor, actual: Tensor) -> None:
    """Raise ConfigError if a graph's logits differ from the eager ones by more than rounding."""
    # A draft with a reduced vocabulary has logits of -inf, which both must have alike.
    outside = expected.isneginf()
    same = torch.equal(outside, actual.isneginf())
    expected, actual = (logits.masked_fill(outside, 0.0) for logits in (expected, actual))
    # Logits of a padding token may all be 0.
    scale = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    gap = float((expected - actual).abs().max() / scale) if same else math.inf
    if not gap < TOLERANCE[expected.dtype]:
        raise ConfigError(
            f"the captured forward of {model.config.model_type} differs from the eager one by "
            f"{gap:.1e} of the largest logit: use engine 'eager', and report it"
        )


def run_model(
    model: PreTrainedModel,
    inputs: Tensor,
    mask: Tensor | Sight | None,
    logits_to_keep: int,
    taps: Sequence[int],
    capture_hidden: bool = True,
    **options: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run the model's own forward over ids, or vectors in their place.

    Logits, and lists of what the lm_head read and of taps, empty where nothing is captured.
    """
    hidden, tapped = list[Tensor](), list[Tensor]()
    # Hooked only while it runs: decoders that share a model must not slow each other down.
    with (
        seeing(model, mask) if isinstance(mask, Sight) else nullcontext(),
        narrow_logits(model),
        capturing_hidden(model, hidden.append) if capture_hidden else nullcontext(),
        capturing_taps(model, taps, tapped.append),
    ):
        logits: Tensor = model(
            **{"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs},
            attention_mask=None if isinstance(mask, Sight) else mask,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **options,
        ).logits
    return logits, hidden, tapped


def eager_forward(
    model: PreTrainedModel, masks: int, keep: int, taps: Sequence[int] = (), placed: int = 0
) -> Graph:
    """The model's forward as a function of tensors only, which gives `taps`, too.

    `masks`, `keep` and `placed`, the places, are as of `_GraphKind`. What a draft in blocks keeps
    is its block.
    """
    in_blocks = is_in_blocks(model)
    kinds, cached = cached_layers(model.config), cache_argument(model)

    def forward(ids: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        places, buffers = rest[masks : masks + placed], rest[masks + placed :]
        options: dict[str, Any] = {cached: _CacheView(kinds, buffers, places)}
        if in_blocks:
            options["contexts"] = ids.shape[1] - keep
        mask = Sight(*rest[:masks]) if masks > 1 else rest[0] if masks else None
        with attending_packed(model, *places[:2]) if places else nullcontext():
            logits, hidden, tapped = run_model(
                model, ids, mask, keep, taps, position_ids=positions, **options
            )
        return logits, hidden[0], *tapped

    return forward


def _examples(inputs: Sequence[Tensor], kind: _GraphKind) -> list[Tensor]:
    """Inputs to trace with, whose lengths are unlike each other and every other size.

    Sizes that are equal while tracing would be taken for one.
    """
    ids, masks, placed = inputs[0], kind.masks, kind.places
    cache = inputs[2 + masks + placed :]
    sizes = {size for buffer in cache for size in buffer.shape[1:]}
    block = kind.keep if kind.keep > 1 else 0  # behind the contexts
    lengths = (block + n for n in TOKEN_LENGTHS if block + n not in sizes)
    count = 1 if kind.single else next(lengths)
    slots, width = (next(lengths), next(lengths)) if placed else (1, count)
    length = next(n for n in CACHE_LENGTHS if n not in sizes)
    shapes = [(1, count, *ids.shape[2:]), (1, count)]
    shapes += [(slots, 1, width, length), (slots, width), (slots, length)][:masks]
    shapes += [(count,)] * placed
    shapes += [(slots, buffer.shape[1], length, buffer.shape[3]) for buffer in cache]
    return [like.new_zeros(shape) for like, shape in zip(inputs, shapes, strict=True)]


class _CacheView(Cache):  # type: ignore[misc]
    """A cache over given keys and values, whose last positions are free for the new tokens."""

    def __init__(
        self, kinds: Sequence[LayerKind], buffers: Sequence[Tensor], places: Places
    ) -> None:
        pairs = iter(zip(buffers[::2], buffers[1::2], strict=True))
        layers = [
            _LayerView(*next(pairs), places) if kind.attends else kind.layer() for kind in kinds
        ]
        super().__init__(layers=layers)


class _LayerView(CacheLayer):
    def __init__(self, keys: Tensor, values: Tensor, places: Places) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.start = self.end = keys.shape[2]
        self.places = places

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens at the end, or at their places."""
        store(self.keys, key_states, self.places)
        store(self.values, value_states, self.places)
        return self.keys, self.values
