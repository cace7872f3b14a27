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
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

if TYPE_CHECKING:
    from eval.runtime.kv_cache import KVCache

State = dict[str, dict[int, Any]]
"""By the name that transformers has for it, and its number in the layer: tensors and flags."""
NAMES = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The recurrent states of one layer, of every slot, and copies of them to go back to.

    Args:
        count: how many states the layer has.

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
        """As transformers', of a number that is noted."""
        self.used.add(state_idx)
        state: Tensor = super().update_conv_state(conv_states, state_idx, **options)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """As transformers', of a number that is noted."""
        self.used.add(state_idx)
        state: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **options)
        return state

    def _state(self) -> State:
        return {name: getattr(self, name) for name in NAMES}

    def _set(self, state: State) -> None:
        """Have a copy of states, because models write into theirs."""
        for name, values in _copy(state).items():
            setattr(self, name, values)


def _copy(state: State) -> State:
    return {
        name: {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
        for name, values in state.items()
    }


@contextmanager
def keeping_states(
    mixers: Sequence[Any], kv_cache: KVCache, committed: int, count: int
) -> Iterator[None]:
    """Inside, a forward reads `count` tokens, and the states after the `committed` first are kept.

    Args:
        mixers: the model's.
        kv_cache: its cache, whose recurrent layers are in the sequence's slot.
        committed: 0 if the forward reads drafted tokens alone.
        count: tokens of the forward.
    """
    split = mixers if 0 < committed < count else []
    before = [vars(mixer).get("forward") for mixer in split]
    for mixer in split:
        states = kv_cache.layers[mixer.layer_idx]
        mixer.forward = partial(_in_two, mixer.forward, states, committed, count)
    try:
        yield
    finally:
        for mixer, forward in zip(split, before, strict=True):
            del mixer.forward
            if forward is not None:  # another's (accelerate's, of models on several devices)
                mixer.forward = forward
    if committed == count:
        for states in kv_cache.recurrent:
            states.keep(range(states.number_of_states))


def mixers_of(model: nn.Module) -> list[Any]:
    """The modules of a model that read and write recurrent states of the cache.

    Of transformers' own code, all and only these call the cache's methods for it.
    """

    @cache
    def calls(kind: type[nn.Module]) -> bool:
        source = inspect.getsource(kind)
        return ".update_conv_state(" in source or ".update_recurrent_state(" in source

    return [module for module in model.modules() if calls(type(module))]


def _in_two(
    forward: Callable[..., Any],
    states: StateLayer,
    committed: int,
    count: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A mixer's forward over (B, count, ...), in two parts, whose states between them are kept."""

    def part(piece: slice) -> Any:
        def cut(value: Any) -> Any:
            along = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count
            return value[:, piece] if along else value

        return forward(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})

    states.used.clear()
    first = part(slice(0, committed))
    states.keep(states.used)
    second = part(slice(committed, count))
    if isinstance(first, Tensor):
        return torch.cat([first, second], dim=1)
    return tuple(
        torch.cat(pair, dim=1) if isinstance(pair[0], Tensor) else pair[1]
        for pair in zip(first, second, strict=True)
    )
