"""Drafts that propose several tokens after one forward, behind which they read masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdata.drafts import kind_of
from specdata.drafts.masks import DEPTHS, MASK
from specdata.errors import ConfigError


def depths_of(model: Any) -> int:
    """D: tokens that a draft proposes after one forward. Raises ConfigError without its mask."""
    return kind_of(model.config).depths(vars(model.config))


def most_tokens(model: Any) -> int:
    """The longest path that a draft was made for: its block's, where it drafts in blocks."""
    return kind_of(model.config).longest(vars(model.config))


@torch.no_grad()
def add_masks(model: Any, depths: int, used: Iterable[int]) -> None:
    """Let a draft propose so many tokens after one forward, once it is trained to, in place.

    Its mask is the last token that no text holds (`used` are those that may), and begins as the
    mean of those that some do.
    """
    setattr(model.config, DEPTHS, depths)
    if getattr(model.config, MASK, None) is not None:  # it has learnt one
        return
    weight = model.get_input_embeddings().weight
    ids = sorted({token for token in used if token < len(weight)})
    free = unused_token(ids, len(weight))
    weight[free] = weight[ids].mean(dim=0)
    setattr(model.config, MASK, free)


def unused_token(used: Iterable[int], vocabulary: int) -> int:
    """The last token that no text holds, for a mask. Raises ConfigError if there is none."""
    free = max({*range(vocabulary)} - {*used}, default=None)
    if free is None:
        raise ConfigError(
            f"a mask must be a token that no text holds, and all {vocabulary} of the model are in "
            "the rollouts or special: leave out draft.depths, or a draft.init.layout of blocks"
        )
    return int(free)
