"""The Trainer of a draft that learns from its target."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, Trainer

from distill.batches import IGNORED, collate
from distill.chunked import chunked_loss
from distill.config import DistilConfig
from distill.losses import LOSSES
from distill.training import Schedule, training_arguments
from specdata.lm_head import find_lm_head
from specdata.probability import probabilities, to_vocabulary
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig

T = TypeVar("T")


class DistilTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with two methods changed.

    The loss compares the draft with its teacher, and a batch is one over all processes.
    """

    def __init__(
        self,
        *,
        teacher: PreTrainedModel,
        config: DistilConfig,
        sampling: SamplingConfig,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.student: torch.nn.Module = rest["model"]  # `model` may be wrapped by an engine
        self.teacher = teacher.eval().requires_grad_(False)
        self.teacher_head = find_lm_head(teacher)
        self.student_head = find_lm_head(_language_model(self.student.eval()))
        self.objective = LOSSES[config.objective]
        self.warp = config.warp
        self.in_bfloat16 = config.precision == "bfloat16"
        self.sampling = sampling
        self.batch_size = config.batch_size
        self.model_accepts_loss_kwargs = True  # whatever the model: it is our loss that counts

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Whole batches, the same on every process; the collator takes this process's rows.

        accelerate would divide them, and fill up the last batch of an epoch with rows of its
        beginning. Told of one process, it orders rows as it does for one.
        """
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.batch_size,
            sampler=RandomSampler(self.train_dataset),
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[dict[str, Tensor]] = prepare_data_loader(
            loader,
            self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed,
        )
        return prepared

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Mean divergence over the completion positions of the whole (accumulated, global) batch.

        Weighting by positions makes the result independent of how a batch is split. Positions do
        not depend on each other, so the loss is computed in chunks of them (`distill.chunked`).
        """
        ids, attention = inputs["input_ids"], inputs["attention_mask"]
        chosen = inputs["labels"][:, 1:] != IGNORED
        with torch.inference_mode():
            taught = self.teacher_head.trained_states(ids, attention)[:, :-1][chosen]

        def loss(q_logits: Tensor, chunk: slice) -> Tensor:
            # The teacher is as in serving, whatever the precision that the draft trains in.
            with torch.autocast(ids.device.type, enabled=False):
                with torch.no_grad():
                    p_logits = self.teacher_head.logits(taught[chunk])
                return self._divergence(q_logits, p_logits)

        def total() -> Tensor:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.in_bfloat16):
                learnt = self.student_head.trained_states(ids, attention)[:, :-1][chosen]
                return chunked_loss(learnt, self.student_head, loss)

        value = inside_forward(model, self.student, total)
        counted = chosen.sum() if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, positions are counted over all of them.
        value = value * self.accelerator.num_processes / counted
        return (value, {}) if return_outputs else value

    def _divergence(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """The sum of the loss over positions: (n, V') and (n, V) logits -> scalar."""
        ones = torch.ones_like(p_logits[:, 0], dtype=torch.float32)
        q_logits = to_vocabulary(q_logits, p_logits.shape[-1])
        if self.warp == "sampler":
            # Truncation applies to p alone: a token cut from q would get no gradient to come back.
            q_logits = q_logits / (self.sampling.temperature or 1.0)
            p_logits = probabilities(p_logits, self.sampling).log()
        return self.objective(q_logits, p_logits, ones) * len(ones)


def inside_forward(model: torch.nn.Module, inner: torch.nn.Module, work: Callable[[], T]) -> T:
    """Do some work as the forward of a module, so that an engine around it prepares for it.

    DDP and ZeRO-3 act in the forward of what they wrap, and the loss calls parts of the model
    alone. TRL's trainers do the same.

    Args:
        model: `inner`, or what an engine made of it.
        inner: whose forward the work stands for.
        work: is done once.
    """
    own = vars(inner).get("forward")  # an engine may have given it one

    def forward(*_: object, **__: object) -> T:
        restore()  # the work may call the model
        return work()

    def restore() -> None:
        vars(inner).pop("forward", None)
        if own is not None:
            vars(inner)["forward"] = own

    vars(inner)["forward"] = forward
    try:
        result: T = model()
    finally:
        restore()
    return result


def _language_model(student: torch.nn.Module) -> PreTrainedModel:
    """The model itself, or that around which there are adapters."""
    return next(each for each in student.modules() if isinstance(each, PreTrainedModel))


def draft_trainer(
    teacher: PreTrainedModel,
    student: torch.nn.Module,
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
    return DistilTrainer(
        teacher=teacher,
        config=config,
        sampling=sampling,
        model=student,
        args=training_arguments(work, schedule, seed=seed),
        train_dataset=train,
        data_collator=collate(
            # Padding is masked everywhere, so any id will do where a model names none.
            0 if pad_id is None else pad_id,
            process=state.process_index,
            processes=state.num_processes,
        ),
    )
