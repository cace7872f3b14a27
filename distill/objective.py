"""From a batch to its loss: the module that the Trainer, DDP and ZeRO wrap."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.adapters import base_of
from distill.chunked import ENTRY_BYTES, ChunkedLoss, Columns
from distill.config import DistilConfig
from distill.losses import LESS_BYTES, LOSSES
from distill.rounds import along_rounds, of_round, weights_of
from distill.teacher import Teacher
from specdata.draft_models.depths import depths_of
from specdata.draft_models.states_draft import states_input
from specdata.lm_head import find_lm_head
from specdata.texts import IGNORED


class Objective(nn.Module):
    """A draft, which is trained, and its loss.

    Its forward gives the sum of the loss over the learnt tokens of a batch, which a gradient
    reaches, and their number. The `step` decides what may differ from step to step.

    Attributes:
        head: makes the draft's logits.
        chunked: sums the loss of the draft's states.
        config: the draft's, which engines and reports ask for.
    """

    chunked: ChunkedLoss

    def __init__(self, draft: PreTrainedModel) -> None:
        super().__init__()
        self.draft = draft.eval()
        self.head = find_lm_head(base_of(draft))
        self.config = draft.config

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """See the class; the batch has (B, T) `input_ids` and `labels`."""
        raise NotImplementedError


class Distillation(Objective):
    """The divergence of a draft from its teacher at completion tokens, at each place of a round.

    Of batches of `distill.batches.collate`. The teacher is no part of the module: no engine divides
    it. The `step` decides which rounds lose their masks.
    """

    def __init__(self, draft: PreTrainedModel, teacher: Teacher, config: DistilConfig) -> None:
        super().__init__(draft)
        self.teacher, self.settings = teacher, config
        self.chunked = ChunkedLoss(
            self.head,
            self.divergence,
            entry_bytes=LESS_BYTES.get(config.objective, ENTRY_BYTES),
            is_narrow=teacher.is_narrow,
        )
        places = depths_of(self.head.model)
        is_read_again = states_input(self.head.model) is not None and places == 1
        self.weights = weights_of(config.readings if is_read_again else places)

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        ids, is_learnt = batch["input_ids"], batch["labels"][:, 1:] != IGNORED  # (B, T - 1)
        taught = self.teacher.columns(batch)  # of the N positions that are learnt
        taps = self.teacher.taps(self.head.model, batch)  # (B, T, F)
        total = torch.zeros((), device=ids.device)
        is_half = self.settings.precision == "bfloat16"
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_half):
            along = along_rounds(
                self.head,
                ids,
                len(self.weights),
                attention=batch["attention_mask"],
                taps=taps,
                begins=nn.functional.pad(is_learnt, (0, 1)),
                dropping=step,
            )
            for number, (weight, place) in enumerate(zip(self.weights, along, strict=True)):
                # Learnt positions whose round began at one that is learnt.
                is_read = of_round(is_learnt, number) & place.kept[:, :-1]
                of_place = taught
                if number or place.share < 1:
                    of_place = {key: rows[is_read[is_learnt]] for key, rows in taught.items()}
                states = place.states[:, :-1][is_read]  # (n, H)
                total = total + weight / place.share * self.chunked(states, of_place)
        return total, is_learnt.sum()

    def divergence(self, q_logits: Tensor, columns: Columns) -> Tensor:
        """The sum over n positions, of the draft's logits (n, V') and the teacher's columns."""
        # The target is as in serving, whatever the precision that the draft trains in.
        with torch.autocast(q_logits.device.type, enabled=False):
            q_logits, p_logits, counted = self.teacher.compared(q_logits, columns)
            return LOSSES[self.settings.objective](q_logits, p_logits, counted) * counted.sum()
