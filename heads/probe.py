"""A check that a head belongs to a draft and sampler: what it records (`specdata.drafts.taps`)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from heads.config import check_depths
from specdata.drafts.depths import depths_of
from specdata.drafts.taps import BOUND, probe_error, probe_ids, probe_values
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states, width_of_states
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heads.model import BaseHead

N_STATES, N_VALUES = 4, 16
"""States of the last positions, where attention has something to read, and values of each."""


class OtherSamplingWarning(UserWarning):
    """A head is used under another sampling than its labels were made with."""


def probe_of(draft: PreTrainedModel) -> list[float]:
    """The record in a head of its draft: values of its last hidden states after fixed tokens.

    One forward, in evaluation mode.
    """
    ids = probe_ids(draft)
    # A mask, because transformers warns of padding if an id happens to be that of padding.
    return probe_values(hidden_states(draft, ids, torch.ones_like(ids))[0, -N_STATES:], N_VALUES)


def check_head(draft: PreTrainedModel, head: BaseHead) -> None:
    """Refuse a head that was not trained for a draft.

    A head without a probe is judged by its width and its kind alone.
    """
    check_depths(head.kind, depths_of(draft))
    size = width_of_states(draft)
    if head.hidden_size != size:
        raise ConfigError(
            f"the head reads states of width {head.hidden_size}, and this draft has {size}: give "
            "the head that was trained for this draft"
        )
    if head.probe is None:
        return
    if len(head.probe) != len(values := probe_of(draft)):
        raise ConfigError(
            f"the head's config.json must hold a probe of {len(values)} numbers, it holds "
            f"{len(head.probe)}: restore it"
        )
    error = probe_error(values, head.probe)
    if not error <= BOUND:
        raise ConfigError(
            f"the head was trained for another draft ({head.draft or 'its name is not recorded'}): "
            f"hidden states of {draft.name_or_path or 'this draft'} differ from those that the "
            f"head was trained on by {error:.0%} (rounding to half precision: 1 to 3 %); give the "
            "head that was trained for this draft, or train one"
        )


def warn_of_other_sampling(head: BaseHead, sampling: SamplingConfig) -> None:
    """Warn if a head is used under another sampler than the one its labels were made with.

    Its probabilities are then of other distributions. Decoding stays lossless, so it is no error.
    Nothing is known of one that records none.
    """
    if head.sampling is None or (trained := SamplingConfig(**head.sampling)) == sampling:
        return
    warnings.warn(
        f"the acceptance head was trained for {trained} and is used with {sampling}, "
        "where acceptance is another: its probabilities are off, and its threshold with them; "
        "label and train with the sampler of decoding",
        OtherSamplingWarning,
        stacklevel=3,
    )
