"""How each kind of draft begins and learns: a module a kind (`specdata.draft_kinds` what it is)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill import (
    dspark,
    eagle,
    masks,
    plain,
    states,
)
from distill.plain import Source
from distill.published import (
    TOKENS,
    Layout,
    Published,
    config_of,
    ids_of,
    not_computed,
    stored,
    tensors_of,
)
from distill.rounds import Place
from specdata.draft_kinds import KINDS as DRAFT_KINDS
from specdata.draft_kinds import kind_of
from specdata.errors import ConfigError
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
LAYOUTS: Mapping[str, Layout] = {"eagle3": eagle.LAYOUT, "dspark": dspark.LAYOUT}
"""Of the kinds that engines load."""


def along_rounds(draft: LMHead, ids: Tensor, count: int, **named: Any) -> Iterator[Place]:
    """The states of a draft along texts at each place of a round; see `Kind.along`."""
    return KINDS[kind_of(draft.model.config).name].along(draft, ids, count, **named)


def layout_in(folder: Path) -> tuple[dict[str, Any], Layout]:
    """The config.json of a published draft, with its method's section beside the rest.

    And the layout that it describes: the first, if it names no architecture. Raises ConfigError.
    """
    settings = config_of(folder)
    architectures = str(settings.get("architectures"))
    names = [name for name in LAYOUTS if DRAFT_KINDS[name].architecture in architectures]
    layout = LAYOUTS[(names or [*LAYOUTS])[0]]
    if isinstance(said := settings.get(layout.section), dict):
        settings = {**said, **settings}
    return settings, layout


def read_published(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft, in float32 and eval mode, of a published folder; it reads the given target."""
    name, (settings, layout) = str(folder), layout_in(folder)
    if found := not_computed(settings, layout):
        raise ConfigError(
            f"config.json of {name} cannot be followed: {'; '.join(found)}. Give another draft, or "
            "take out what does not matter to it"
        )
    tensors = tensors_of(stored(folder), name, layout)
    if (
        settings.get("tie_word_embeddings")
        and TOKENS in tensors
        and "lm_head.weight" not in tensors
    ):
        raise ConfigError(
            f"tie_word_embeddings in config.json of {name} ties its own embed_tokens to an lm_head "
            "that it does not hold, and engines take the target's: store lm_head, or say false"
        )
    taps, flags = layout.taps_of(settings, target)
    ids = ids_of(tensors, target, name)
    return layout.build(Published(settings, tensors, ids, target, name), taps, flags)
