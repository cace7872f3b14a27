"""Stage 2: distil a draft on completions that its target wrote earlier.

The target runs beside the draft as a frozen teacher; the loss is taken at completion positions
only, between the very distributions that serving will compare.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from distill.adapters import averaged, base_of, load_student, merged, set_weights
from distill.batches import DraftTexts, Numbered, check_context, collate, fitted
from distill.config import DistilConfig
from distill.drafts import round_places
from distill.drafts.masks import with_masks
from distill.losses import LESS_BYTES, LOSSES
from distill.muon import MuonWithAdamW, muon_optimizer
from distill.objective import ENTRY_BYTES, ChunkedLoss, Columns, Objective
from distill.rounds import of_round, weights_of
from distill.teacher import Teacher, teacher_of
from distill.training import (
    HISTORY_FILE,
    RESULT_FILE,
    DraftTrainer,
    ModelFolder,
    draft_arguments,
    logged_steps,
    train_resumably,
)
from distill.watch import (
    HeldOut,
    Measurement,
    Watch,
    best_step,
    load_best,
    measurements,
)
from specdata.drafts.depths import depths_of
from specdata.drafts.state_store import StateStore
from specdata.drafts.states_network import reads_states, states_input
from specdata.drafts.taps import attach
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import (
    check_shared_vocabulary,
    end_ids,
    load_configs,
    load_model,
    load_tokenizer,
    positions,
)
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import newest_complete
from specdata.texts import IGNORED
from specdata.top_logits import TopLogitDistributions, TopLogits, check_decided

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilResult:
    """The changes by distillation, on rollouts that were not trained on.

    `acceptance_before` and `acceptance_after` are means of sum_x min(p, q) over `positions`
    completion positions: the probability that a drafted token is accepted there. `before` and
    `after` have more, for each prompt set, too. The draft's weights are those after `best_step` of
    `steps` optimizer steps; 0 are those it started from. Of the training rollouts, `cut` were
    longer than `max_length`, and `left_out` had no completion, or none that was not cut.

    `is_bound`: p is known from top logits in which all other tokens count as one. Then acceptances
    are upper bounds and KL lower ones; expected tokens are exact where the logits of the text's own
    tokens are kept (stage logits), else so where a token is among the N. `undecided` positions of
    training and held-out rollouts are left out, because top logits do not decide p there.
    """

    acceptance_before: float | None
    acceptance_after: float | None
    positions: int
    steps: int
    best_step: int
    before: Measurement
    after: Measurement
    cut: int
    left_out: int
    is_bound: bool
    undecided: int


def distil(  # noqa: PLR0913 - what is trained, on what, how
    *,
    target: str | Path,
    draft: str | Path,
    train: Dataset,
    dev: Dataset,
    out: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    teacher_load: Loading = ONE_DEVICE,
    top_logits: TopLogits | None = None,
) -> DistilResult:
    """Train a copy of the draft on rollouts of the target and save it as a model folder.

    A killed run goes on from its last checkpoint when called again; a finished one returns its
    stored result. Works in one process, under `accelerate launch` and under DeepSpeed. Each
    step is taken on the same rollouts however many processes there are, so a run may go on in
    another number of them, but for DeepSpeed's. Models are folders or Hub ids; `out`, of this
    training alone, appears once it is complete.

    Acceptance is measured on `dev`. `sampling` is the warp of serving, applied to both models, and
    `teacher_load` has the precision in which the target is served. `top_logits` say what `train`
    and `dev` keep of the target's logits (columns of `TOP_LOGITS`), if the draft learns from them;
    then the weights of the target are not read. The seed decides the order of the rollouts.
    """
    for name, rollouts in (("train", train), ("dev", dev)):
        if len(rollouts) == 0:
            raise ValueError(f"{name} must hold at least one rollout, it is empty")
    folder = ModelFolder(out)
    if stored := folder.result():
        return TypeAdapter(DistilResult).validate_python(stored)
    config.check_engine()
    state = join_processes()
    tokenizer = load_tokenizer(str(target))
    check_shared_vocabulary(tokenizer, load_tokenizer(str(draft)))
    fit, dev = fitted(train, config.max_length), fitted(dev, config.max_length).rollouts
    configs = {"target": load_configs(str(target))[0], "draft": load_configs(str(draft))[0]}
    check_context(configs, fit.rollouts, dev)
    # Before any training arguments exist, or ZeRO-3 would split the frozen teacher too.
    undecided = 0
    teacher: PreTrainedModel | TopLogitDistributions
    measured: PreTrainedModel | TopLogitDistributions
    if top_logits:
        compared = sampling if config.warp == "sampler" else SamplingConfig()
        teacher = top_logits.distributions(compared, bound=True)
        measured = top_logits.distributions(sampling, bound=True)  # always of serving
        for rollouts in (fit.rollouts, dev):
            undecided += check_decided(rollouts, teacher, measured)[1]
    else:
        teacher = measured = load_model(str(target), load=teacher_load)
    student = load_student(str(draft), config.lora, seed=seed)
    language_model = base_of(student)
    with_masks(language_model, config.depths, tokenizer.all_special_ids, fit.rollouts, dev)
    store = StateStore()  # what all that is kept of the target's states goes to
    if reads_states(language_model.config) and not isinstance(teacher, TopLogitDistributions):
        attach(language_model, teacher, store)
    plain = copy.deepcopy(student).eval()  # to measure and save: no engine ever wraps this one
    held_out = HeldOut(measured, dev, sampling, watched=config.eval_rollouts, store=store)
    before = held_out.measured_by_main(base_of(plain))
    if state.is_main_process:
        for what in before.undecided:
            logger.warning("%s: top logits decide it nowhere, it is stored as null", what)

    kept_step, label = 0, "distilling the draft"
    steps: list[dict[str, float]] = []
    watched: list[Measurement] = []
    if config.epochs > 0:
        trainer = draft_trainer(
            teacher, student, fit.rollouts, folder.work, config, sampling, seed, store
        )
        trainer.add_callback(Watch(trainer, held_out, plain, config, label))
        begun = copy.deepcopy(plain.state_dict()) if config.start_share else {}
        train_resumably(trainer, folder.work, label=label)
        steps, watched = logged_steps(trainer), measurements(trainer.state)
        kept_step = best_step(watched)
        if state.is_main_process:
            best = load_best(folder.work, kept_step)
            share = config.start_share
            set_weights(plain, averaged(best, begun, share) if share else best)
    plain = merged(plain)
    after = held_out.measured_by_main(base_of(plain), step=kept_step)
    if (accepted := after.overall.acceptance) is not None and not math.isfinite(accepted):
        raise TrainingDivergedError(
            f"{label}: its acceptance is {accepted} after the last step",
            last_good=newest_complete(folder.work),
            learning_rate=config.learning_rate,
        )
    result = DistilResult(
        acceptance_before=before.overall.acceptance,
        acceptance_after=after.overall.acceptance,
        positions=after.overall.positions,
        steps=watched[-1].step if watched else 0,
        best_step=kept_step,
        before=before,
        after=after,
        cut=fit.cut,
        left_out=fit.left_out,
        is_bound=isinstance(measured, TopLogitDistributions) and not measured.is_exact,
        undecided=undecided,
    )
    if state.is_main_process:
        stored = asdict(result)
        history = {name: stored[name] for name in ("before", "after", "best_step")}
        history |= {"steps": steps, "measurements": [asdict(each) for each in watched]}
        folder.write(plain, target, {RESULT_FILE: stored, HISTORY_FILE: history})
    return result


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
            once=teacher.once,
            entry_bytes=LESS_BYTES.get(config.objective, ENTRY_BYTES),
            is_narrow=teacher.is_narrow,
        )
        place_count = depths_of(self.head.model)
        is_read_again = states_input(self.head.model) is not None and place_count == 1
        self.weights = weights_of(config.readings if is_read_again else place_count)

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """Sum the divergence at the learnt positions of a batch; see `Objective`."""
        ids, is_learnt = batch["input_ids"], batch["labels"][:, 1:] != IGNORED  # (B, T - 1)
        taught = self.teacher.columns(batch)  # of the N positions that are learnt
        taps = self.teacher.taps(self.head.model, batch)  # (B, T, F)
        index = is_learnt.flatten().cumsum(0).view(is_learnt.shape) - 1  # which of the N
        states, rows = [], []
        is_half = self.settings.precision == "bfloat16"
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_half):
            round_states = round_places(
                self.head,
                ids,
                len(self.weights),
                attention=batch["attention_mask"],
                taps=taps,
                begins=nn.functional.pad(is_learnt, (0, 1)),
                dropping=step,
            )
            for number, (weight, place) in enumerate(zip(self.weights, round_states, strict=True)):
                # Learnt positions whose round began at one that is learnt.
                is_read = of_round(is_learnt, number) & place.kept[:, :-1]
                states.append(place.states[:, :-1][is_read])  # (n, H)
                at = index[is_read]
                of_place = torch.full(at.shape, weight / place.share, device=at.device)
                rows.append({"position": at, "weight": of_place})
            # What is read at one position stands together: the teacher's p there is made once.
            order = torch.cat([each["position"] for each in rows]).argsort(stable=True)
            together = {key: torch.cat([each[key] for each in rows])[order] for key in rows[0]}
            total = self.chunked(torch.cat(states)[order], taught, together)
        return total, is_learnt.sum()

    def divergence(self, q_logits: Tensor, columns: Columns) -> Tensor:
        """The weighted sum over n states, of (n, V') logits of the draft and the columns there."""
        # The target is as in serving, whatever the precision that the draft trains in.
        with torch.autocast(q_logits.device.type, enabled=False):
            q_logits, p_logits, counted = self.teacher.compared(q_logits, columns)
            weights = counted * columns["weight"]
            return LOSSES[self.settings.objective](q_logits, p_logits, weights) * weights.sum()


class DistilTrainer(DraftTrainer):
    """A draft is compared with its teacher, and rows may carry text that it has just written."""

    def __init__(self, *, texts: DraftTexts | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.texts = texts

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """The batches of one step, the draft's text in its rows, and their labels counted."""
        if self.texts is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batches = list(islice(epoch_iterator, num_batches))
        batches = self.texts.into(batches, base_of(self.objective.draft), self.state.global_step)
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
    arguments = draft_arguments(work, config, len(train), save_steps=config.save_steps, seed=seed)
    arguments.report_to = config.report_to or []
    # By default TensorBoard's files would lie among the checkpoints, and go with them.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(work.with_suffix(".logs")))
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
        args=arguments,
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
    if getattr(output, "is_frozen", False):
        output.weight.requires_grad = False


def _optimizer(
    student: PreTrainedModel, config: DistilConfig, arguments: TrainingArguments
) -> MuonWithAdamW | None:
    """The optimizer that `config.optimizer` names; None: the Trainer makes it (AdamW)."""
    if config.optimizer == "adamw":
        return None
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return muon_optimizer(student, lr=config.learning_rate, betas=betas)
