"""Drafts that read their target's states (states, eagle3, mtp): a token after a state."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from eval.runtime.feeding.plain import CachedSequence, Forward
from eval.runtime.layout import TokenLayout
from eval.runtime.model import CachedModel, Outputs
from specdata.drafts.states_network import states_input
from specdata.probability import SamplingConfig


class StatesSequence(CachedSequence):
    """A sequence of a draft that reads its target's states (`specdata.drafts.states_network`).

    A token is read with the target's states at the token before it, or, where the target has not
    read that one yet, with the draft's own; without a target, as in a warm-up, its states count as
    0.
    """

    drops_drafted = True

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        embedding = states_input(model.model)
        assert embedding is not None
        self._embedding = embedding
        super().__init__(model, slot, sampling)

    @property
    def reads_first(self) -> bool:
        """Whether later tokens attend to the first one; in some layouts of engines none does."""
        return self._embedding.reads_first

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._draft_states: dict[int, Tensor] = {}  # by cache position, of the draft in progress

    def pieces(self, tokens: list[int]) -> list[list[int]]:
        """Tokens to append: each after its predecessor's own state in a forward of its own."""
        count = max(0, self._read_by_target() + 1 - self.length)
        return [piece for piece in (tokens[:count], *([each] for each in tokens[count:])) if piece]

    def inputs(self, forward: Forward, ids: Tensor) -> Tensor:
        """(n, H) what the draft reads of a forward's tokens, (n,) ids of its own vocabulary."""
        embedding = self._embedding
        before, read = self._before(forward), self._read_by_target()
        after_target = [place for place in before if place < read]  # they come first
        parts: list[Tensor] = []
        ids = embedding.from_start(ids, before[0] + 1)
        if after_target:
            states = embedding.weight.new_zeros(len(after_target), embedding.read_width)
            if self._target is not None and self._target.taps is not None:
                begin = after_target[0] < 0  # nothing stands before the first token
                states[begin:] = self._target.taps[after_target[begin:]]
            parts.append(self.model.mapped(embedding.after_target, ids[: len(states)], states))
        if rest := before[len(after_target) :]:
            states = torch.stack([self._draft_states[at] for at in rest])
            parts.append(self.model.mapped(embedding.after_own, ids[-len(rest) :], states))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_by_target(self) -> int:
        """Tokens of the sequence whose target states are known, and may be read."""
        if self._residual_persists:
            return self._lasting - 1
        return sys.maxsize if self._target is None else self._target.length

    def commit(self, forward: Forward, layout: TokenLayout, outputs: Outputs) -> Tensor:
        """Take account of a forward that has run, and keep the draft's states."""
        if (states := outputs.hidden) is not None:
            end = layout.start + len(forward.tokens)
            self._draft_states |= dict(zip(range(end - len(states), end), states, strict=True))
        return super().commit(forward, layout, outputs)

    def _lasting_after(self, forward: Forward) -> int:
        if self._lasting < self.length:
            return self._lasting
        known = self._read_by_target()  # those that are read with the target's states come first
        return self.length + sum(at < known for at in self._before(forward)[: forward.committed])

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, of those read with the target's states."""
        super().crop(length)
        if not self._residual_persists:
            self._draft_states = {}
