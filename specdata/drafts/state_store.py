"""States of texts that are read again and again, kept in memory as far as a budget goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

STATES_BYTES = 1 << 30
"""States that a process keeps in memory; what does not fit is computed again at every pass."""


class StateStore:
    """One budget of what a training keeps of its target, on the CPU: what comes first is kept.

    States of the texts that it trains on, of held-out ones, and taps (`specdata.drafts.taps`).
    """

    def __init__(self, room: int = STATES_BYTES) -> None:
        """Take so many bytes."""
        self.room = room
        self._states: dict[Hashable, Tensor] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._states

    def read(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """The states of a key, on the CPU if they were kept; computed if they are not."""
        if (states := self._states.get(key)) is None:
            states = compute()
            if states.nbytes <= self.room:
                self.room -= states.nbytes
                self._states[key] = states.cpu()
        return states

    def part(self, room: int) -> StateStore:
        """A store of its own with so many of the bytes."""
        self.room -= room
        return StateStore(room)
