"""Drafts in blocks: an anchor and masks after contexts, and a bias for each drafted token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eval.runtime.feeding.masks import MaskedSequence
from eval.runtime.feeding.plain import Forward
from eval.runtime.model import CachedModel, Outputs
from specdata.drafts.states_network import states_input
from specdata.probability import SamplingConfig


class BlockSequence(MaskedSequence):
    """A sequence of a draft that drafts in blocks.

    Of committed tokens it reads the target's states, but of the last one, the anchor, which is read
    again as long as the target has not read it. What a drafted token adds is a bias of the logits.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self._embedding: Any = states_input(model.model)
        self._output = model.model.get_output_embeddings()

    @property
    def mask(self) -> int:
        """The target's token that the draft was trained with."""
        mask: int = self._embedding.blocks.mask
        return mask

    def inputs(self, forward: Forward, ids: Tensor) -> Tensor:
        """(n, F + H) what the draft reads of contexts and a block, (n,) ids."""
        contexts = len(forward.tokens) - self.masks - 1
        if self._target is not None and self._target.taps is not None:
            taps = self._target.taps[self.length : self.length + contexts]
        else:
            taps = self._embedding.scale.new_zeros(contexts, len(self._embedding.scale))
        x: Tensor = self._embedding.unread(taps, ids[contexts:])
        return x

    def after(self, tokens: list[int], logits: Tensor, states: Tensor | None) -> Outputs:
        """Logits and states of slots behind these tokens, of which the bias alone is computed."""
        markov = self._embedding.markov.weight[tokens]
        if states is not None:
            states = torch.cat([states, markov], dim=-1)
        return Outputs(logits + self._output.bias_by(markov), states)

    def _lasting_after(self, forward: Forward) -> int:
        return super()._lasting_after(forward) - (not self._is_drafted(forward))  # the anchor
