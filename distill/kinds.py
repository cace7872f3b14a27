"""How each kind of draft begins and learns: a module a kind (`specdata.draft_kinds` what it is)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset
from transformers import PreTrainedModel

from distill import (
    dspark,
    eagle,
    masks,
    plain,
    states,
)
from distill.places import Along
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
from specdata.draft_kinds import KINDS as DRAFT_KINDS
from specdata.errors import ConfigError


class Kind(Protocol):
    """What a kind's module has."""

    @property
    def along(self) -> Along:
        """What such a draft says along texts."""

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
