"""Forwards of a few tokens as one graph of tensor operations, without the model's Python.

A draft is so small that what lies between its matrices costs more than its arithmetic, and on a CPU
the matrix library is slow for the handful of rows that a verification has. So there are three
engines behind `CachedModel`, with the same results but for rounding:

* "eager": the model's own forward;
* "captured": the forward is traced once with symbolic lengths (`make_fx`) and run as a graph; on a
  CPU in float32 its large matrices are kept a second time in oneDNN's blocked layout;
* "compiled": the captured graph through `torch.compile` (Inductor), which fuses what lies between
  the matrices. It needs a C++ compiler and takes seconds to a minute a model.

Batches and long prompts always run eagerly; a short prompt is never compiled for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import Cache, PreTrainedModel

from eval.runtime.kv_cache import Layer
from eval.runtime.model_checks import changing_rope
from eval.runtime.prepack import Prepacker, can_prepack
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden

Engine = Literal["eager", "captured", "compiled"]
ENGINES: tuple[str, ...] = get_args(Engine)

# Lengths to trace with: unlike each other, and chosen unlike every other size.
LENGTHS = (11, 13, 17, 19, 23, 131, 137, 139, 149, 151)
# A graph must reproduce the eager logits to this share of their largest; ropes are in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}

Graph = Callable[..., tuple[Tensor, Tensor]]

_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, CapturedModel]] = (
    weakref.WeakKeyDictionary()
)


def captured(model: PreTrainedModel, engine: Engine) -> CapturedModel:
    """The graphs of a model, shared by all decoders that use it while its weights stay the same.

    Changes are found by the version counters of the weights, which every in-place operation but
    those on `.data` advances.

    Raises:
        ConfigError: for an unknown engine, and for models whose forward cannot be one graph.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}")
    known = _KNOWN.setdefault(model, {})
    state = [(one.data_ptr(), one._version) for one in model.parameters()]
    if engine not in known or known[engine].state != state:
        known[engine] = CapturedModel(model, state, compiled=engine == "compiled")
    return known[engine]


class _Kind(NamedTuple):
    """What a graph is for: one token or several, with a mask, all logits or the last, how run."""

    single: bool
    masked: bool
    last: bool
    compiled: bool


class CapturedModel:
    """The graphs of one model, made when they are first needed.

    One each for one token or several, with or without a mask, and for all logits or the last.

    Args:
        model: the model, which is not kept alive.
        state: what identifies its weights.
        compiled: whether graphs go through `torch.compile`.

    Raises:
        ConfigError: if the model's forward depends on the length of the text, or is spread over
            devices.
    """

    def __init__(
        self, model: PreTrainedModel, state: list[tuple[int, int]], *, compiled: bool
    ) -> None:
        self.state = state
        self._model = weakref.ref(model)
        self._compiled = compiled
        self._packer = Prepacker()
        self._graphs: dict[_Kind, Graph] = {}
        if rope := changing_rope(model):
            # A graph would keep the frequencies of one length.
            raise ConfigError(
                f"{model.config.model_type} has a rope that depends on the length of the text "
                f"({rope}), so it cannot be captured: use engine 'eager'"
            )
        if len({one.device for one in model.parameters()}) > 1:
            raise ConfigError("a model spread over devices cannot be captured: use engine 'eager'")

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        states: Sequence[Tensor],
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Run one forward.

        Args:
            ids: (1, n) new tokens.
            positions: (1, n).
            mask: (1, 1, n, cells) additive, or None for one token that sees everything.
            states: keys and values of each layer, (1, heads, cells, size), the last n cells free.
            rows: logits are needed after the last `rows` tokens.

        Returns:
            Logits (1, rows or more, V') and the inputs of the output embedding (1, as many, H).
        """
        count = ids.shape[1]
        # Prompts would be compiled for themselves, because nothing comes before them.
        kind = _Kind(
            count == 1,
            mask is not None,
            rows == 1 < count,
            self._compiled and count < states[0].shape[2],
        )
        graph = self._graphs.get(kind)
        given = (ids, positions, *(() if mask is None else (mask,)), *states)
        if graph is None:
            graph = self._graphs[kind] = self._capture(given, kind)
        return graph(*given)

    def _trace(
        self, model: PreTrainedModel, step: Graph, examples: Sequence[Tensor], *, compiled: bool
    ) -> Graph:
        with torch.inference_mode(False), torch.no_grad():
            traced = make_fx(
                step, tracing_mode="symbolic", _allow_non_fake_inputs=True, pre_dispatch=True
            )(*examples)
            if can_prepack(model):
                self._packer.pack(traced)
            graph: Graph = torch.compile(traced, dynamic=True) if compiled else traced
        return graph

    def _capture(self, given: Sequence[Tensor], kind: _Kind) -> Graph:
        model = self._model()
        assert model is not None
        step = _step(model, kind.masked, kind.last)
        try:
            examples = _examples(given, kind.masked)
            graph = self._trace(model, step, examples, compiled=kind.compiled)
            # Neither order changes the result: both write the same cells.
            expected, found = step(*given)[0], graph(*given)[0]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the forward of {model.config.model_type} cannot be captured ({error}): use "
                "engine 'eager'"
            ) from error
        # Logits of a padding token may all be 0.
        scale = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        gap = float((expected - found).abs().max() / scale)
        if not gap < TOLERANCE[expected.dtype]:
            raise ConfigError(
                f"the captured forward of {model.config.model_type} differs from the eager one by "
                f"{gap:.1e} of the largest logit: use engine 'eager', and report it"
            )
        return graph


def _step(model: PreTrainedModel, masked: bool, last: bool) -> Graph:
    """The forward as a function of tensors only."""

    def step(ids: Tensor, positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        hidden: list[Tensor] = []
        with capturing_hidden(model, hidden.append):
            logits: Tensor = model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=rest[0] if masked else None,
                past_key_values=_Views(rest[1:] if masked else rest),
                use_cache=True,
                logits_to_keep=int(last),  # 0: all
            ).logits
        return logits, hidden[0]

    return step


def _examples(given: Sequence[Tensor], masked: bool) -> list[Tensor]:
    """Inputs to trace with: all lengths unlike each other and every other size.

    Sizes that are equal while tracing would be taken for one.
    """
    ids, states = given[0], given[3:] if masked else given[2:]
    taken = {size for state in states for size in state.shape}
    few, many = (
        next(size for size in sizes if size not in taken) for sizes in (LENGTHS[:5], LENGTHS[5:])
    )
    count = 1 if ids.shape[1] == 1 else few
    examples = [ids.new_zeros(1, count), ids.new_zeros(1, count)]
    if masked:
        examples.append(torch.zeros(1, 1, count, many, dtype=given[2].dtype, device=ids.device))
    return examples + [
        torch.zeros(1, state.shape[1], many, state.shape[3], dtype=state.dtype, device=state.device)
        for state in states
    ]


class _Views(Cache):  # type: ignore[misc]
    """A cache over views whose last cells are free for the new tokens."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        pairs = zip(states[::2], states[1::2], strict=True)
        super().__init__(layers=[_View(keys, values) for keys, values in pairs])


class _View(Layer):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.start = self.end = keys.shape[2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens at the end."""
        count = key_states.shape[2]
        self.keys[:, :, -count:].copy_(key_states)
        self.values[:, :, -count:].copy_(value_states)
        return self.keys, self.values
