"""The Trainer of a draft that learns from its target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from distill.adapters import base_of
from distill.batches import IGNORED, collate
from distill.config import DistilConfig, Objective
from distill.losses import LOSSES
from distill.on_policy import DraftTexts, whole_model
from distill.training import Schedule, training_arguments, whole_batches
from specdata.models import end_ids, known_ids, positions
from specdata.probability import probabilities, to_vocabulary
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig


class DistilTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with three methods changed.

    The loss compares the draft with its teacher, a batch is one over all processes, and some of its
    rows may carry text that the draft has just written.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        teacher: PreTrainedModel,
        objective: Objective,
        sampling: SamplingConfig,
        texts: DraftTexts | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.student = base_of(rest["model"])  # `model` may be wrapped by an engine
        self.teacher = teacher.eval().requires_grad_(False)
        self.objective = LOSSES[objective]
        self.sampling = sampling
        self.batch_size = batch_size
        self.texts = texts

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Whole batches, the same on every process; the collator takes this process's rows."""
        return whole_batches(self, self.batch_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """The batches of one step, the draft's text in its rows, and their labels counted."""
        if self.texts is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batches = list(islice(epoch_iterator, num_batches))
        with whole_model(self.model_wrapped, self.accelerator) as draft:
            batches = self.texts.into(batches, draft, self.state.global_step)
        return super().get_batch_samples(iter(batches), len(batches), device)  # type: ignore[no-any-return]

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Mean divergence over the completion positions of the whole (accumulated, global) batch.

        Weighting by positions makes the result independent of how a batch is split.
        """
        labels = inputs["labels"]
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        chosen = labels[:, 1:] != IGNORED
        outputs = model(**{**tokens, "input_ids": known_ids(tokens["input_ids"], self.student)})
        with torch.no_grad():
            p_logits = self.teacher(**tokens).logits[:, :-1][chosen]
            p = probabilities(p_logits, self.sampling)
        q_logits = to_vocabulary(outputs.logits[:, :-1][chosen], p.shape[-1])
        # Truncation applies to p alone: a token cut from q would get no gradient to come back.
        loss = self.objective(
            q_logits / (self.sampling.temperature or 1.0), p.log(), torch.ones_like(p[:, 0])
        )
        if num_items_in_batch is not None:
            # Gradients are averaged over processes, positions are counted over all of them.
            share = chosen.sum() * self.accelerator.num_processes / num_items_in_batch
            loss = loss * share
        return (loss, outputs) if return_outputs else loss


def draft_trainer(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    train: Dataset,
    work: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Trainer:
    """The trainer of a draft: `config.batch_size` rollouts a batch, checkpoints in `work`."""
    state = join_processes()
    schedule = Schedule(
        steps=math.ceil(config.epochs * len(train) / (config.batch_size * config.accumulation)),
        batch_size=math.ceil(config.batch_size / state.num_processes),
        accumulation=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_ratio=config.warmup_ratio,
        save_steps=config.save_steps,
    )
    pad_id = teacher.generation_config.pad_token_id
    # Padding is masked everywhere, so any id will do where a model names none.
    pad_id = 0 if pad_id is None else pad_id
    return DistilTrainer(
        batch_size=config.batch_size,
        teacher=teacher,
        objective=config.objective,
        sampling=sampling,
        texts=_draft_texts(teacher, student, config, sampling, seed, pad_id),
        model=student,
        args=training_arguments(work, schedule, seed=seed),
        train_dataset=train,
        data_collator=collate(
            pad_id,
            process=state.process_index,
            processes=state.num_processes,
        ),
    )


def _draft_texts(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    pad_id: int,
) -> DraftTexts | None:
    """What the draft writes while it trains; None if it writes nothing."""
    if config.on_policy.share == 0.0:
        return None
    longest = min(positions(teacher.config), positions(student.config))
    return DraftTexts(
        config.on_policy,
        sampling,
        seed,
        ends=end_ids(teacher),
        vocabulary=teacher.config.get_text_config().vocab_size,
        longest=longest if config.max_length is None else min(longest, config.max_length),
        batch_size=config.batch_size,
        pad_id=pad_id,
    )
