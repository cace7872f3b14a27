"""Drafts that propose several tokens after one forward.

Behind the last token they read D - 1 masks, one token again and again, which stand for tokens that
are not known yet (PARD, An et al. 2025, arXiv:2504.18583; `pard_token` in a draft's config.json, as
vLLM and TensorRT-LLM read it), or they draft in blocks (`draft_models.dspark`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from specdata.config import MOST_TIMES
from specdata.draft_models.states_draft import states_input
from specdata.errors import ConfigError

MASK = "pard_token"
DEPTHS = "depths"


def depths_of(model: Any) -> int:
    """D: tokens that a draft proposes after one forward. Raises ConfigError without its mask."""
    if (reads := states_input(model)) is not None:
        return reads.blocks.size if reads.blocks else 1
    depths, mask = getattr(model.config, DEPTHS, 1), getattr(model.config, MASK, None)
    if depths == 1:
        return 1
    size = model.config.get_text_config().vocab_size
    is_id = isinstance(mask, int) and 0 <= mask < size
    if not (isinstance(depths, int) and 1 <= depths <= MOST_TIMES and is_id):
        raise ConfigError(
            f"a draft's config.json must have {DEPTHS} of 1 to {MOST_TIMES} and, above 1, {MASK}, "
            f"the id of its mask, below {size}; this one's are {depths!r} and {mask!r}: mend them, "
            f"or remove {DEPTHS}"
        )
    return depths


def most_tokens(model: Any) -> int:
    """The longest path that a draft was made for: its block's, where it drafts in blocks."""
    reads = states_input(model)
    return reads.blocks.size if reads is not None and reads.blocks else sys.maxsize


@torch.no_grad()
def add_masks(model: Any, depths: int, used: Iterable[int]) -> None:
    """Let a draft propose so many tokens after one forward, once it is trained to, in place.

    Its mask is the last token that no text holds (`used` are those that may), and begins as the
    mean of those that some do.
    """
    if states_input(model) is not None:
        raise ConfigError("draft.depths is for drafts that read tokens alone: leave it out")
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
            "the rollouts or special: leave draft.depths or draft.init.layout dspark out"
        )
    return int(free)
