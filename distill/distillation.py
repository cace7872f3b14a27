"""Stage 2: distil a draft on completions that its target wrote earlier.

The target runs beside the draft as a frozen teacher; the loss is taken at completion positions
only, between the very distributions that serving will compare.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.adapters import averaged, base_of, load_student, merged, set_weights
from distill.batches import check_context, fitted
from distill.config import DistilConfig
from distill.drafts.masks import with_masks
from distill.lesson import Lesson, lesson_of
from distill.losses import LESS_BYTES, LOSSES
from distill.objective import ENTRY_BYTES, ChunkedLoss, Columns, Objective
from distill.rounds import Texts, of_round
from distill.training import (
    HISTORY_FILE,
    RESULT_FILE,
    DraftTrainer,
    ModelFolder,
    logged_steps,
    round_as_stored,
    train_resumably,
)
from distill.watch import HeldOut, Measurement, Watch, best_step, load_best, measurements
from specdata.drafts.state_store import StateStore
from specdata.drafts.states_network import reads_states
from specdata.drafts.taps import attach
from specdata.errors import TrainingDivergedError
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import check_shared_vocabulary, load_configs, load_model, load_tokenizer
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
    `steps` optimizer steps; 0 are those it started from. Trained ones are rounded as the target's
    are stored. Of the training rollouts, `cut` were longer than `max_length`, and `left_out` had no
    completion, or none that was not cut.

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
        share = config.start_share
        begun = copy.deepcopy(plain.state_dict()) if share and state.is_main_process else {}
        train_resumably(trainer, folder.work, label=label)
        steps, watched = logged_steps(trainer), measurements(trainer.state)
        kept_step = best_step(watched)
        if state.is_main_process:
            best = load_best(folder.work, kept_step)
            set_weights(plain, averaged(best, begun, share) if share else best)
    plain = merged(plain)
    if config.epochs > 0:
        round_as_stored(plain, target)  # now, so that what is measured is what is stored
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

    def __init__(self, draft: PreTrainedModel, lesson: Lesson) -> None:
        super().__init__(draft)
        self.lesson, self.teacher, self.settings = lesson, lesson.teacher, lesson.config
        self.chunked = ChunkedLoss(
            self.head,
            self.divergence,
            once=self.teacher.once,
            entry_bytes=LESS_BYTES.get(self.settings.objective, ENTRY_BYTES),
            is_narrow=self.teacher.is_narrow,
        )

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """Sum the divergence at the learnt positions of a batch; see `Objective`."""
        ids, is_learnt = batch["input_ids"], batch["labels"][:, 1:] != IGNORED  # (B, T - 1)
        taught = self.teacher.columns(batch)  # of the N positions that are learnt
        taps = self.teacher.taps(self.head.model, batch)  # (B, T, F)
        index = is_learnt.flatten().cumsum(0).view(is_learnt.shape) - 1  # which of the N
        states, rows = [], []
        is_half = self.settings.precision == "bfloat16"
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_half):
            texts = Texts(
                ids,
                len(self.lesson.weights),
                attention=batch["attention_mask"],
                taps=taps,
                begins=nn.functional.pad(is_learnt, (0, 1)),
                dropping=step,
            )
            places = zip(
                self.lesson.weights, self.lesson.states_by_place(self.head, texts), strict=True
            )
            for number, (weight, place) in enumerate(places):
                # Learnt positions whose round began at one that is learnt.
                is_read = of_round(is_learnt, number) & place.kept[:, :-1]
                states.append(place.states[:, :-1][is_read])  # (n, H)
                read_at = index[is_read]
                of_place = torch.full(read_at.shape, weight / place.share, device=read_at.device)
                rows.append({"position": read_at, "weight": of_place})
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

    def __init__(self, student: PreTrainedModel, lesson: Lesson) -> None:
        super().__init__(
            objective=Distillation(student, lesson),
            batch_size=lesson.config.batch_size,
            args=lesson.arguments,
            optimizers=(lesson.optimizer, None),
            train_dataset=lesson.rollouts,
            data_collator=lesson.collator,
        )
        self.texts = lesson.texts

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
    target: PreTrainedModel | TopLogitDistributions, student: PreTrainedModel, *decided: Any
) -> DistilTrainer:
    """The trainer of a draft; arguments as of `lesson_of`."""
    return DistilTrainer(student, lesson_of(target, student, *decided))
