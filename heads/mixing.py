"""Token mixing (SpecDec++): which tokens the draft reads while its head learns, and their labels.

The target's own response X and the draft's tokens Y (Y_i drawn after X_<i) become one sequence Z:
Z_i = X_i with probability r, which carries no label, else Z_i = Y_i with the label min(1, p/q).
The state of Z_i, after the draft consumed it, is what predicts its acceptance; nothing is shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from specdata.sampling import numpy_generator_for


class LabelRow(TypedDict):
    """The columns that training reads; those after prompt_ids are aligned token by token.

    The last ones are read for pure target context only: the others' sums, and more draws a
    position, S - 1 values for each, one position after the other.
    """

    example_id: str
    sample: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    draft_ids: Sequence[int]
    accept_prob: Sequence[float]
    overlap: NotRequired[Sequence[float]]
    more_draft_ids: NotRequired[Sequence[int]]
    more_accept_prob: NotRequired[Sequence[float]]


COLUMNS: tuple[str, ...] = (
    "example_id",
    "sample",
    "prompt_ids",
    "completion_ids",
    "draft_ids",
    "accept_prob",
)


@dataclass(frozen=True, slots=True)
class MixedRow:
    """One sequence for the draft: prompt + Z, cut at the maximum length.

    Attributes:
        input_ids: (T,) int64.
        accept: (T,) float32 labels; the value means nothing where the mask is False.
        mask: (T,) bool, True at drafted tokens.
    """

    input_ids: Tensor
    accept: Tensor
    mask: Tensor

    def blank(self) -> MixedRow:
        """The same tokens with no label."""
        return MixedRow(self.input_ids, self.accept, torch.zeros_like(self.mask))


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Rows padded on the right to the longest: every field is (B, T)."""

    input_ids: Tensor
    attention_mask: Tensor
    accept: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: Sequence[MixedRow]) -> MixedBatch:
        """Pad rows on the right. Padding is token 0, unattended and outside the mask."""
        pad = torch.nn.utils.rnn.pad_sequence
        attended = [torch.ones_like(row.input_ids) for row in rows]
        return cls(
            input_ids=pad([row.input_ids for row in rows], batch_first=True),
            attention_mask=pad(attended, batch_first=True),
            accept=pad([row.accept for row in rows], batch_first=True),
            mask=pad([row.mask for row in rows], batch_first=True),
        )

    def to(self, device: torch.device) -> MixedBatch:
        """Return the batch on another device."""
        return MixedBatch(
            self.input_ids.to(device),
            self.attention_mask.to(device),
            self.accept.to(device),
            self.mask.to(device),
        )


def check_labels(row: LabelRow) -> None:
    """Raise ValueError if the columns of a row do not fit each other."""
    target, draft = np.asarray(row["completion_ids"]), np.asarray(row["draft_ids"])
    accept = np.asarray(row["accept_prob"], dtype=np.float32)
    if not target.shape == draft.shape == accept.shape:
        raise ValueError(
            f"example {row['example_id']!r}, sample {row['sample']}: completion_ids, draft_ids and "
            f"accept_prob must be equally long, got {target.size}, {draft.size} and {accept.size}; "
            "label the rollouts again"
        )
    if accept.size and not (accept.min() >= 0.0 and accept.max() <= 1.0):
        raise ValueError(
            f"example {row['example_id']!r}, sample {row['sample']}: accept_prob must lie in "
            f"[0, 1], got values from {accept.min()} to {accept.max()}; label the rollouts again"
        )


def mix(row: LabelRow, *, rate: float, max_length: int, key: tuple[str | int, ...]) -> MixedRow:
    """Mix one row.

    Args:
        row: the labels of one completion.
        rate: r in [0, 1), the probability that a position keeps the target's token.
        max_length: tokens of prompt + completion kept; the rest is cut at the end.
        key: what the draw depends on beside example_id and sample, e.g. (seed, epoch). The same
            key gives the same mixing on any process, in any order and after a resume.

    Raises:
        ValueError: if the row's columns do not fit each other.
    """
    check_labels(row)
    target, draft = np.asarray(row["completion_ids"]), np.asarray(row["draft_ids"])
    accept = np.asarray(row["accept_prob"], dtype=np.float32)
    uniform = numpy_generator_for(*key, row["example_id"], row["sample"]).random(target.size)
    drafted = uniform >= rate
    prompt = np.asarray(row["prompt_ids"], dtype=np.int64)
    tokens = np.concatenate([prompt, np.where(drafted, draft, target).astype(np.int64)])
    return MixedRow(
        input_ids=torch.from_numpy(tokens[:max_length]),
        accept=torch.from_numpy(np.concatenate([np.zeros(prompt.size, np.float32), accept]))[
            :max_length
        ],
        mask=torch.from_numpy(np.concatenate([np.zeros(prompt.size, bool), drafted]))[:max_length],
    )
