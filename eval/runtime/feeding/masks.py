"""Drafts with masks: several tokens after one forward, and none of them is read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eval.runtime.feeding.plain import CachedSequence, Forward
from eval.runtime.layout import lay_out
from eval.runtime.model import CachedModel, Outputs
from specdata.drafts.masks import MASK
from specdata.probability import SamplingConfig


class MaskedSequence(CachedSequence):
    """A sequence of a draft that proposes several tokens after one forward.

    It reads committed tokens, and masks behind them. Drafted ones are not read, in chains and in
    trees: their cache positions hold nothing. Deeper than the masks, the last one is repeated.
    """

    drops_drafted = True

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self.masks = model.traits.depths - 1
        # Of each mask: logits, and what the lm_head read if it is captured.
        self._ahead: tuple[Tensor, Tensor | None]
        self._depths: dict[int, int] = {}  # by cache position, of tokens from the last read one on

    def _is_drafted(self, forward: Forward) -> bool:
        """Whether a forward's tokens are drafted ones; `crop` and `pieces` keep the kinds apart."""
        return self._residual_persists or forward.committed == forward.drafted

    @property
    def mask(self) -> int:
        """The token that it reads for those that are not known yet."""
        mask: int = getattr(self.model.model.config, MASK)
        return mask

    def read(self, forward: Forward) -> Tensor:
        """Read committed tokens and masks, or give what was read there for drafted tokens."""
        tokens, keep = forward.tokens, forward.logits_to_keep
        if self._is_drafted(forward):
            layout = lay_out(self.length, self.ancestors, len(tokens), forward.parents)
            places = range(self.in_use, self.in_use + len(tokens))
            for place, parent in zip(places, self._before(forward), strict=True):
                self._depths[place] = self._depths[parent] + 1
            masks = [min(self._depths[place], self.masks) - 1 for place in places]
            logits, states = self._ahead
            logits = torch.stack([logits[mask] for mask in masks])  # faster than logits[masks]
            states = None if states is None else states[masks]
            self.forwards -= 1  # it reads no token
        else:
            assert forward.drafted + len(forward.parents) == 0
            part = Forward(self, tokens + [self.mask] * self.masks, keep + self.masks).part()
            # Masks may stand beyond the last position.
            last = self.model.traits.positions - 1
            positions = [min(each, last) for each in part.layout.positions]
            layout = lay_out(self.length, self.ancestors, len(tokens), ())
            logits, states, _ = self.model.read(
                replace(part, layout=replace(part.layout, positions=positions))
            )
            self._depths = {self.length + len(tokens) - 1: 0}
            self._ahead = logits[keep:], None if states is None else states[keep:]
            logits, states = logits[:keep], None if states is None else states[:keep]
        outputs = self.after(tokens[-len(logits) :], logits, states)
        return self.commit(forward, layout, outputs)

    def after(self, _tokens: list[int], logits: Tensor, states: Tensor | None) -> Outputs:
        """Logits and states behind these tokens, of what was read there."""
        return Outputs(logits, states)

    def _lasting_after(self, forward: Forward) -> int:
        if self._lasting < self.length or self._is_drafted(forward):
            return self._lasting
        return self.length + len(forward.tokens)
