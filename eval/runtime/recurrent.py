"""Layers with a recurrent state: state spaces, gated deltas, linear attention, short convolutions.

Their state is a function of the whole text, so tokens cannot be dropped from it. Each sequence
keeps a copy of that after its last committed token. A forward that reads committed tokens with a
draft behind them calls every mixer twice, on the one part and on the other, and copies its state in
between: everything else of the model, and all its large matrices but the mixers', runs once. When
part of a draft is rejected, the state goes back to the copy, and the accepted tokens are read again
with the next draft behind them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

State = dict[str, dict[int, Any]]
"""By the name that transformers has for it, and its number in the layer: tensors and flags."""
STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The recurrent states of one layer, of every slot, and copies of them to go back to.

    Attributes:
        used: numbers of the states that a mixer has read or written.
    """

    def __init__(self, count: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=count)
        self._empty = _copy(self._state())
        self.used: set[int] = set()
        self.free()

    def free(self) -> None:
        """Forget the states of every slot."""
        self._slot = 0
        self._others: dict[int, State] = {}  # of the slots that no forward is for
        self._kept: dict[int, State] = {}
        self._set(self._empty)

    def go_to(self, slot: int) -> None:
        """Have the states of a slot where models read and write them."""
        if slot != self._slot:
            self._others[self._slot] = self._state()
            self._slot = slot
            self._set(self._others.pop(slot, self._empty))

    def keep(self, numbers: Iterable[int]) -> None:
        """Copy the states of these numbers, to go back to."""
        kept = self._kept.setdefault(self._slot, _copy(self._empty))
        for name, values in _copy(self._state()).items():
            kept[name] |= {number: values[number] for number in numbers}

    def go_back(self, slot: int) -> None:
        """Have the states that were kept of a slot; none before any was."""
        self.go_to(slot)
        self._set(self._kept.get(slot, self._empty))

    def forget(self, slot: int) -> None:
        """Forget the states of a slot."""
        self._kept.pop(slot, None)
        self.go_back(slot)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        """Update a state as transformers does, and note its number."""
        self.used.add(state_idx)
        state: Tensor = super().update_conv_state(conv_states, state_idx, **options)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """Update a state as transformers does, and note its number."""
        self.used.add(state_idx)
        state: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **options)
        return state

    def _state(self) -> State:
        return {name: getattr(self, name) for name in STATE_FIELDS}

    def _set(self, state: State) -> None:
        """Have a copy of states, because models write into theirs."""
        for name, values in _copy(state).items():
            setattr(self, name, values)


def _copy(state: State) -> State:
    return {
        name: {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
        for name, values in state.items()
    }


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module of a model that reads and writes recurrent states of the cache.

    A `stepwise` one forgets its state over several tokens at once (Mamba), so that it reads each by
    itself.
    """

    module: Any
    stepwise: bool


def mixers_of(model: nn.Module) -> list[Mixer]:
    """The mixers of a model.

    Of transformers' own code, all and only these call the cache's methods for it, and those that
    begin several tokens at a state say so.
    """
    sources: dict[type[nn.Module], str] = {}
    found = []
    for module in model.modules():
        kind = type(module)
        code = sources[kind] = sources.get(kind) or inspect.getsource(kind)
        writes = ".update_recurrent_state(" in code
        if writes or ".update_conv_state(" in code:
            found.append(Mixer(module, writes and "initial_state" not in code))
    return found


@contextmanager
def keeping_states(
    mixers: Sequence[Mixer], layers: Sequence[Any], committed: int, count: int
) -> Iterator[None]:
    """Inside, a forward reads `count` tokens, and the states after the `committed` first are kept.

    The layers are those of the cache, in the sequence's slot; `committed` is 0 if the forward reads
    drafted tokens alone.
    """
    split = [mixer for mixer in mixers if mixer.stepwise or 0 < committed < count]
    before = [vars(mixer.module).get("forward") for mixer in split]
    for mixer in split:
        states = layers[mixer.module.layer_idx]
        parts = partial(_in_parts, mixer.module.forward, states, mixer.stepwise, committed, count)
        mixer.module.forward = parts
    try:
        yield
    finally:
        for mixer, forward in zip(split, before, strict=True):
            del mixer.module.forward
            if forward is not None:  # another's (accelerate's, of models on several devices)
                mixer.module.forward = forward
    if committed == count:
        for layer in layers:
            if isinstance(layer, StateLayer):
                layer.keep(range(layer.number_of_states))


def _in_parts(
    forward: Callable[..., Any],
    states: StateLayer,
    stepwise: bool,
    committed: int,
    count: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A mixer's forward over (B, count, ...), whose states after the committed part are kept."""
    ends = {committed, count} - {0}
    if stepwise:
        begun = any(states.has_previous_state.values())
        ends |= set(range(1 if begun else min(ends), count))
    states.used.clear()
    start, outputs = 0, []
    for end in sorted(ends):
        piece = slice(start, end)

        def cut(value: Any, piece: slice = piece) -> Any:
            has_tokens = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count
            return value[:, piece] if has_tokens else value

        outputs.append(
            forward(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        )
        if end == committed:
            states.keep(states.used)
        start = end
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    return tuple(
        torch.cat(each, dim=1) if isinstance(each[0], Tensor) else each[-1]
        for each in zip(*outputs, strict=True)
    )
