"""The Trainer of a draft that learns from its target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from distill.adapters import base_of
from distill.batches import Numbered, collate
from distill.config import DistilConfig
from distill.kinds import along_rounds
from distill.losses import LESS_BYTES, LOSSES
from distill.objective import ENTRY_BYTES, ChunkedLoss, Columns, Objective
from distill.on_policy import DraftTexts, copy_to_write, whole_draft
from distill.rounds import of_round, weights_of
from distill.teacher import Teacher, teacher_of
from distill.training import DraftTrainer, Schedule, training_arguments
from specdata.draft_models.depths import depths_of
from specdata.draft_models.state_store import StateStore
from specdata.draft_models.states_draft import states_input
from specdata.draft_models.taps import decoder_layers
from specdata.errors import ConfigError
from specdata.models import end_ids, positions
from specdata.prepack import multiplies
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.texts import IGNORED
from specdata.top_logits import TopLogitDistributions


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


class DistilTrainer(DraftTrainer):
    """A draft is compared with its teacher, and rows may carry text that it has just written."""

    def __init__(self, *, texts: DraftTexts | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.texts = texts
        self.duplicate = texts and copy_to_write(self.objective.draft, self.accelerator)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """The batches of one step, the draft's text in its rows, and their labels counted."""
        if self.texts is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batches = list(islice(epoch_iterator, num_batches))
        draft = whole_draft(self.objective.draft, self.duplicate)
        batches = self.texts.into(batches, base_of(draft), self.state.global_step)
        return super().get_batch_samples(iter(batches), len(batches), device)  # type: ignore[no-any-return]


def draft_trainer(
    teacher: PreTrainedModel | TopLogitDistributions,
    student: torch.nn.Module,
    train: Dataset,
    work: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    store: StateStore | None = None,
) -> Trainer:
    """The trainer of a draft: `config.batch_size` rollouts a batch, checkpoints in `work`.

    The teacher is the target, whose states a store has room for, or what is made of the logits that
    `train` keeps of it.
    """
    state = join_processes()
    schedule = Schedule.of(config, len(train), config.save_steps)
    freeze(student, config)
    objective = Distillation(
        student, teacher_of(student, teacher, config, sampling, train, store), config
    )
    pad_id, texts = 0, None
    if isinstance(teacher, PreTrainedModel):
        # Padding is masked everywhere, so any id will do where a model names none.
        pad_id = teacher.generation_config.pad_token_id or 0
        if config.on_policy > 0:
            room = positions(teacher.config), positions(student.config)
            texts = DraftTexts(
                config.on_policy,
                sampling,
                seed,
                ends=end_ids(teacher.generation_config),
                vocabulary=teacher.config.get_text_config().vocab_size,
                longest=min(*room, config.max_length or sys.maxsize),
                batch_size=config.batch_size,
                pad_id=pad_id,
            )
    return DistilTrainer(
        objective=objective,
        batch_size=config.batch_size,
        texts=texts,
        args=(arguments := training_arguments(work, schedule, seed=seed)),
        optimizers=(_optimizer(student, config, arguments), None),
        train_dataset=Numbered(train),
        data_collator=collate(
            pad_id,
            process=state.process_index,
            processes=state.num_processes,
        ),
    )


def freeze(student: nn.Module, config: DistilConfig) -> None:
    """Freeze the matrices of a draft that are not trained."""
    draft = base_of(student)
    embedding, output = draft.get_input_embeddings(), draft.get_output_embeddings()
    if config.freeze_embeddings or states_input(draft) is not None:
        if output is not None and embedding.weight is output.weight:
            raise ConfigError(
                "draft.freeze_embeddings would freeze the draft's output matrix, which is its "
                "input embedding: leave it out, or reduce the vocabulary (draft.init.vocabulary)"
            )
        embedding.weight.requires_grad_(False)
    if getattr(output, "is_targets", False) and len(output.vocabulary_ids) == output.vocabulary:
        output.weight.requires_grad = False  # engines take the target's own


def _optimizer(
    student: PreTrainedModel, config: DistilConfig, arguments: TrainingArguments
) -> MuonWithAdamW | None:
    """The optimizer that `config.optimizer` names; None: the Trainer makes it (AdamW)."""
    if config.optimizer == "adamw":
        return None
    if join_processes().distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError(
            "draft.optimizer muon needs whole matrices, and DeepSpeed divides them: launch without "
            "it, or set draft.optimizer to adamw"
        )
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return muon_optimizer(student, lr=config.learning_rate, betas=betas)


class Float32Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz iteration is in bfloat16, in float32.

    For processors that do not multiply bfloat16, where its step takes some twenty times as long.
    With Nesterov's momentum and no weight decay, as `MuonWithAdamW` asks.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("momentum_buffer", weight.new_zeros(()))
                buffer = torch.lerp(buffer, weight.grad, 1 - group["momentum"])
                self.state[weight]["momentum_buffer"] = buffer
                update = torch.lerp(weight.grad, buffer, group["momentum"])
                is_tall = update.shape[0] > update.shape[1]
                update = update.T if is_tall else update
                update = update / update.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):
                    gram = update @ update.T
                    update = a * update + (b * gram + c * gram @ gram) @ update
                rate = group["lr"] * 0.2 * max(weight.shape) ** 0.5  # match_rms_adamw
                weight.sub_(update.T if is_tall else update, alpha=rate)


class MuonWithAdamW(torch.optim.Optimizer):
    """Both optimizers behind the interface of one, for schedulers, accelerate and checkpoints.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    arXiv:2502.16982) makes the momentum of a matrix orthogonal before it is subtracted. Its steps
    are scaled to the size of AdamW's, as in the second paper, so that both take the same rate.
    Muon updates the `matrices`, AdamW the `others`, at least one weight each.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
    ) -> None:
        matrices = list(matrices)
        device = matrices[0].device
        is_quick = device.type != "cpu" or multiplies(device, torch.bfloat16)
        muon = torch.optim.Muon if is_quick else Float32Muon
        self.parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = (
            muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(list(others), lr=lr, betas=betas, weight_decay=0.0),
        )
        super().__init__(self._groups(), {"lr": lr})

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of both, the same objects: who sets a rate here sets it there."""
        return [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        if closure is not None:
            raise ValueError("closures are not supported: call backward first")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the state of both."""
        for part, stored in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(stored)
        self.param_groups = self._groups()


def muon_optimizer(
    student: PreTrainedModel, *, lr: float, betas: tuple[float, float]
) -> MuonWithAdamW:
    """Muon for the trained matrices of layers and maps of states, AdamW for all else."""
    inner: list[nn.Module] = [decoder_layers(student)[1]]
    reads = states_input(base_of(student))
    if reads is not None:
        inner += [each for each in reads.children() if isinstance(each, nn.Linear)]
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    hidden = {id(weight) for each in inner for weight in each.parameters() if weight.ndim == 2}
    for weight in student.parameters():
        if weight.requires_grad:
            (matrices if id(weight) in hidden else others).append(weight)
    return MuonWithAdamW(matrices, others, lr=lr, betas=betas)
