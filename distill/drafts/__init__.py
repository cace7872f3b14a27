"""How each kind of draft begins and learns: a module a kind (`specdata.drafts` what it is)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill.drafts import (  # a line each: docs/extending-drafts.md adds one
    dspark,
    eagle3,
    masks,
    mtp,
    plain,
    states,
)
from distill.drafts.plain import Source
from distill.rounds import Place, Texts
from specdata.drafts import kind_of
from specdata.lm_head import LMHead


class DraftTraining(Protocol):
    """The functions of a kind's module."""

    def states_by_place(self, draft: LMHead, texts: Texts, /) -> Iterator[Place]:
        """The states of a draft, which a gradient reaches, at each place of a round along texts."""

    def begin(
        self, target: PreTrainedModel, source: Source, rollouts: Dataset, seed: int, /
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        """A draft of a target, not trained yet, and what of the source is otherwise, if any is."""

    def of_shapes(self, target: PreTrainedModel, source: Source, /) -> PreTrainedModel:
        """The draft that `begin` makes, with the same shapes, of a target on no device."""


TRAININGS: Mapping[str, DraftTraining] = {
    "plain": plain,
    "masks": masks,
    "states": states,
    "eagle3": eagle3,
    "dspark": dspark,
    "mtp": mtp,
}
"""By the names in `DRAFT_KINDS`."""


def round_places(draft: LMHead, ids: Tensor, count: int, **named: Any) -> Iterator[Place]:
    """The states of a draft along texts at each place of a round; arguments as of `Texts`."""
    training = TRAININGS[kind_of(draft.model.config).name]
    return training.states_by_place(draft, Texts(ids, count, **named))
