"""How each kind of draft begins and learns: a module a kind (`specdata.draft_kinds` what it is)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill import (
    dspark,
    eagle,
    masks,
    plain,
    published,
    states,
)
from distill.plain import Source
from distill.rounds import Place
from specdata.draft_kinds import kind_of
from specdata.lm_head import LMHead


class Kind(Protocol):
    """What a kind's module has."""

    def along(
        self,
        draft: LMHead,
        ids: Tensor,
        count: int,
        /,
        *,
        attention: Tensor | None = None,
        taps: Tensor | None = None,
        begins: Tensor | None = None,
        dropping: int | None = None,
    ) -> Iterator[Place]:
        """The states of a draft along texts at each place of a round, of whole texts at a time.

        Args:
            draft: a gradient reaches it.
            ids: (B, T); padding is on the right, where no token sees it.
            count: how many places; a plain draft, of which all are alike, gives one.
            attention: (B, T), 1 at tokens, for a plain draft.
            taps: (B, T, states) the target's, if the draft reads any.
            begins: (B, T) bool where rounds begin that are asked for, by default anywhere; prompts,
                which nobody drafts, are most of a batch. Places after the first have no meaning
                elsewhere, and at t < s.
            dropping: a number, other in each step, that decides which rounds lose their masks;
                None: none does.
        """

    def begin(
        self, target: PreTrainedModel, source: Source, rollouts: Dataset, seed: int, /
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """A draft of a target, not trained yet, and what of the source is otherwise, if any is."""

    def of_shapes(self, target: PreTrainedModel, source: Source, /) -> PreTrainedModel:
        """The draft that `begin` makes, with the same shapes, of a target on no device."""


KINDS: Mapping[str, Kind] = {
    "plain": plain,
    "masks": masks,
    "states": states,
    "eagle3": eagle,
    "dspark": dspark,
}
LAYOUTS: Mapping[str, published.Layout] = {"eagle3": eagle.LAYOUT, "dspark": dspark.LAYOUT}
"""Of the kinds that engines load."""


def along_rounds(draft: LMHead, ids: Tensor, count: int, **named: Any) -> Iterator[Place]:
    """The states of a draft along texts at each place of a round; see `Kind.along`."""
    return KINDS[kind_of(draft.model.config).name].along(draft, ids, count, **named)
