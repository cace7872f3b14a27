"""What the draft has read when a token is judged: how label rows become questions for a head.

In a mixed context (SpecDec++, `heads.mixing`) it has read some of its own tokens instead of the
target's; in the target's own (`heads.target_context`) only what would have been kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from heads.batches import Row
from heads.inputs import HeadInputs
from heads.loss import loss_mass
from heads.mixing import LabelRow, MixedBatch, MixedRow, collate, mix
from heads.model import AcceptanceHead
from specdata.lm_head import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Questions:
    """What a head is asked of one micro-batch, and the answers.

    Attributes:
        arguments: of the head's `forward`, which gives logits (M, ...).
        accept: (M, ...) labels, for each of M moments.
        mask: (M, ...) bool, which of them count.
    """

    arguments: tuple[Tensor, ...]
    accept: Tensor
    mask: Tensor


class Context(Protocol):
    """How label rows are read."""

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Any:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Raises:
            ValueError: if the columns do not fit each other.
        """

    def mass(self, rows: Sequence[Any]) -> float:
        """What the summed loss of a global batch is divided by."""

    def questions(self, rows: Sequence[Any]) -> Questions:
        """What the head is asked of a micro-batch; runs the draft."""


@dataclass(frozen=True, slots=True)
class MixedContext:
    """Token mixing; every moment that the head can be asked at has its label from the same forward.

    Attributes:
        head: reads the features.
        draft: the frozen draft.
        draft_logits: gives its logits of its last hidden states.
        rate: share of positions that keep the target's token.
        max_length: tokens kept of a row.
        seed: of the mixing.
    """

    head: AcceptanceHead
    draft: PreTrainedModel
    draft_logits: Callable[[Tensor], Tensor]
    rate: float
    max_length: int
    seed: int

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> MixedRow:
        """Mix a row anew for each pass."""
        key = ("dev",) if epoch is None else ("train", self.seed, epoch)
        return mix(labels, rate=self.rate, max_length=self.max_length, key=key)
