"""Drafts as others publish them: what config.json asks, and the draft that a folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from distill import published
from distill.drafts import dspark, eagle3
from specdata.drafts import DRAFT_KINDS
from specdata.errors import ConfigError
from specdata.sources import config_of

__all__ = ["LAYOUTS", "config_of", "not_computed", "read_published", "with_layout"]

LAYOUTS: Mapping[str, published.Layout] = {"eagle3": eagle3.LAYOUT, "dspark": dspark.LAYOUT}
"""Of the kinds that have an `architecture`, by their names in `DRAFT_KINDS`."""


def with_layout(settings: Mapping[str, Any]) -> tuple[dict[str, Any], published.Layout]:
    """The config.json of a published draft, with what its sections say beside the rest.

    And the layout that it describes: the first, if it names no architecture.
    """
    architectures = str(settings.get("architectures"))
    named = (name for name in LAYOUTS if DRAFT_KINDS[name].architecture in architectures)
    layout = LAYOUTS[next(named, next(iter(LAYOUTS)))]
    if isinstance(section := settings.get(layout.section), dict):
        settings = {**section, **settings}
    if isinstance(section := settings.get(published.LAYERS), dict):
        beside = {key: each for key, each in section.items() if key not in published.METADATA}
        settings = {**beside, **settings}
    return dict(settings), layout


def not_computed(settings: Mapping[str, Any]) -> list[str]:
    """List what a config.json asks that is not computed or known here, or contradicts itself."""
    return published.not_computed(*with_layout(settings))


def read_published(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft, in float32 and eval mode, of a published folder; it reads the given target."""
    name, (settings, layout) = str(folder), with_layout(config_of(folder))
    if found := published.not_computed(settings, layout):
        raise ConfigError(
            f"config.json of {name} cannot be followed: {'; '.join(found)}. Give another draft, or "
            "take out what does not matter to it"
        )
    tensors = published.tensors_of(published.stored(folder), name, layout)
    if (
        settings.get("tie_word_embeddings")
        and published.TOKEN_ROWS in tensors
        and "lm_head.weight" not in tensors
    ):
        raise ConfigError(
            f"tie_word_embeddings in config.json of {name} ties its own embed_tokens to an lm_head "
            "that it does not hold, and engines take the target's: store lm_head, or say false"
        )
    taps, flags = layout.taps_of(settings, target)
    ids = published.ids_of(tensors, target, name)
    return layout.build(published.Published(settings, tensors, ids, target, name), taps, flags)
