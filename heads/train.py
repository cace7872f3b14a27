"""Train an acceptance head on a frozen draft: as a script, under accelerate or under DeepSpeed.

The draft runs at every step, or once if what it says is stored (`heads.questions.FeatureCache`),
outside DDP and DeepSpeed, and gets no gradient. All randomness derives from (seed, epoch, example),
and the learning rate from the step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor

from heads.config import TRAINING, HeadConfig
from heads.engine import (
    MOMENTS,
    Checkpoint,
    Engine,
    deprecations_of_deepspeed_hidden,
    start_accelerator,
)
from heads.loss import HeadMetrics, head_metrics, loss_mass, weighted_bce
from heads.model import AcceptanceHead, BaseHead, ImmediateHead
from heads.probe import probe_of
from heads.questions import DrawnQuestions, MixedQuestions, Questions, cached, feature_scales
from heads.rows import Batch, LabelRows, Row, micro_batch_count, micro_batches
from specdata.errors import TrainingDivergedError
from specdata.interruption import Interrupted, asked_of_any, until_checkpoint
from specdata.lm_head import check_hidden_states
from specdata.models import positions
from specdata.processes import is_main
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import checkpoint_to_resume, newest_complete
from specdata.storage.files import write_json
from specdata.storage.resume import Settings, read_record
from specdata.terminal import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.json"
CHECKPOINTS_NAME = "checkpoints"
STATES_NAME = "states"
LOGS_NAME = "logs"
RUN_ALONE = ("micro_batch_size", "save_steps")


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The measurements of a training run; written to `metrics.json` beside the head.

    Attributes:
        before: the untrained head on the dev rows.
        after: the trained head on the same tokens.
        losses: training loss of every step.
        steps: updates done.
        train_rows: rows trained on.
        skipped_rows: train and dev rows whose prompt alone fills the draft's context.
        processes: how many trained.
        engine: "single", "ddp" or "deepspeed-zeroN", as observed.
        labels: positions with a label, in train and dev rows.
        cut_labels: those of them beyond the draft's context.
        epochs: passes over the training rows.
        learning_rate: the largest.
    """

    before: HeadMetrics
    after: HeadMetrics
    losses: tuple[float, ...]
    steps: int
    train_rows: int
    skipped_rows: int
    processes: int
    engine: str
    labels: int
    cut_labels: int
    epochs: int
    learning_rate: float


def train_head(
    *,
    draft: PreTrainedModel,
    train: datasets.Dataset,
    dev: datasets.Dataset,
    out: Path,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None = None,
) -> HeadResult:
    """Train a head, save it to `out`, and measure it on held-out rows.

    Runs as a plain script, under `accelerate launch`, and under DeepSpeed ZeRO 1 to 3. A killed
    run continues from its last checkpoint in `out/checkpoints` when called again with the same
    arguments; a finished one returns its result at once. With several nodes, `out` must be on a
    file system that they share.

    Args:
        draft: the frozen draft; its weights and its precision are left alone.
        train: labelled rows, the columns of `heads.rows.LabelRow`.
        dev: held-out labelled rows.
        out: folder for the head and `metrics.json` (written last), of checkpoints until then.
        config: settings.
        seed: of initial weights, order and mixing. How dev rows are read never changes.
        sampling: the distribution under which the labels were made; recorded with the head.

    Returns:
        What was measured.

    Raises:
        ValueError: if rows or draft cannot be used.
        ManifestError: if `out` holds a head of other settings, rows or draft, or its checkpoints
            are damaged.
        TrainingDivergedError: on every process, if a loss, weight or metric is not finite, or the
            trained head predicts worse than the untrained one and than chance.
        Interrupted: on every process, if one was asked to stop, after a checkpoint.
        RuntimeError: if the launcher's DeepSpeed or processes were silently lost.
    """
    longest, is_ours = positions(draft.config), config.kind == "immediate"
    train_rows = LabelRows.read("train", train, longest, with_draws=is_ours)
    dev_rows = LabelRows.read("dev", dev, longest, with_draws=is_ours)
    settings = Settings(
        {
            # How it is run does not decide what is learned.
            "config": {k: v for k, v in config.decisive().items() if k not in RUN_ALONE},
            "seed": seed,
            "draft": weights_fingerprint(draft),
            "train": train_rows.fingerprint,
            "dev": dev_rows.fingerprint,
        },
        f"delete {out} or choose another output folder",
    )
    if (finished := finished_head(out, settings)) is not None:
        if is_main():
            _remove_leftovers(out)  # of a run killed right before its end
        return finished
    if (cut := train_rows.cut + dev_rows.cut) and is_main():
        labels = train_rows.labels + dev_rows.labels
        logger.warning(
            "the draft's context of %d tokens cuts off %d of %d labels", longest, cut, labels
        )
    was_training = draft.training
    try:
        with deprecations_of_deepspeed_hidden():
            return _train(draft.eval(), train_rows, dev_rows, out, config, seed, sampling, settings)
    finally:
        draft.train(was_training)


def _train(
    draft: PreTrainedModel,
    train_rows: LabelRows,
    dev_rows: LabelRows,
    out: Path,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    settings: Settings,
) -> HeadResult:
    joined = torch.distributed.is_initialized()  # then leaving is up to whoever joined
    training = _begun(draft, train_rows, dev_rows, out, config, seed, sampling, settings)
    engine, losses, rows_a_step = training.engine, training.losses, config.batch_size
    is_main_process = engine.accelerator.is_main_process
    per_epoch, epochs = math.ceil(len(train_rows) / rows_a_step), config.passes(len(train_rows))
    steps, warmup_ratio = epochs * per_epoch, TRAINING[config.kind].warmup_ratio

    # The order of rows and their mixing follow from (seed, epoch) and the rate from the step, so a
    # resumed run does what an uninterrupted one does.
    with (
        until_checkpoint(),
        progress(
            steps, "acceptance head", "step", done=len(losses), is_shown=is_main_process
        ) as bar,
    ):
        for epoch in range(len(losses) // per_epoch, epochs):
            order = train_rows.order(seed, epoch)
            done = (len(losses) - epoch * per_epoch) * rows_a_step
            for start in range(done, len(order), rows_a_step):
                rate = learning_rate(len(losses), steps, training.peak, warmup_ratio)
                engine.set_learning_rate(rate)
                batch = order[start : start + rows_a_step]
                loss = training.step(
                    [training.questions.row(train_rows[i], i, epoch) for i in batch]
                )
                if not math.isfinite(loss):
                    raise training.diverged(f"the loss is {loss} in step {len(losses) + 1}")
                losses.append(loss)
                training.log({"loss": loss, "learning_rate": rate})
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update()
                stop = asked_of_any()
                if stop or len(losses) % config.save_steps == 0:
                    training.save()
                if stop:
                    engine.accelerator.wait_for_everyone()  # until it is written
                    raise Interrupted(stop)

    after, weights = training.evaluate(dev_rows), training.finite_weights()
    training.log_metrics(after)
    training.check(after, rows=len(train_rows), epochs=epochs)
    result = HeadResult(
        before=training.before,
        after=after,
        losses=tuple(losses),
        steps=len(losses),
        train_rows=len(train_rows),
        skipped_rows=train_rows.skipped + dev_rows.skipped,
        processes=engine.accelerator.num_processes,
        engine=engine.name,
        labels=train_rows.labels + dev_rows.labels,
        cut_labels=train_rows.cut + dev_rows.cut,
        epochs=epochs,
        learning_rate=training.peak,
    )
    if is_main_process:
        final = new_head(draft, config, seed, sampling, getattr(engine.head, "scales", None))
        final.load_state_dict(weights)
        final.save_pretrained(out)
        write_json(out / METRICS_NAME, {"settings": settings.values, **asdict(result)})
        _remove_leftovers(out)
    engine.close(leave=not joined)
    return result


def _begun(
    draft: PreTrainedModel,
    train_rows: LabelRows,
    dev_rows: LabelRows,
    out: Path,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    settings: Settings,
) -> Training:
    """Join the other processes and wrap the head, as new or with what the last checkpoint holds."""
    accelerator = start_accelerator(config.report_to, out / LOGS_NAME)
    folder, size = out / CHECKPOINTS_NAME, config.micro_batch_size
    newest = checkpoint_to_resume(folder, settings)
    checkpoint = None if newest is None else Checkpoint.read(newest)
    accelerator.wait_for_everyone()  # no process writes before all have looked
    if draft.device != accelerator.device:  # which packed weights refuse even where they are there
        draft.to(accelerator.device)
    check_hidden_states(draft)
    head, longest = new_head(draft, config, seed, sampling), positions(draft.config)
    questions: MixedQuestions | DrawnQuestions
    if isinstance(head, ImmediateHead):
        questions = DrawnQuestions(draft, head.reads, head.sampling_config, config.draws, longest)
        scales = feature_scales(questions, train_rows, size)
        head = new_head(draft, config, seed, sampling, scales)
        if config.cache == "disk":
            cache = cached(accelerator, questions, train_rows, size, out / STATES_NAME)
            questions = replace(questions, cache=cache)
    else:
        questions = MixedQuestions(draft, config.mixing, longest, seed)
    if checkpoint is not None:
        head.load_state_dict(checkpoint.weights)
    if config.report_to != "none":
        shown = {name: str(value) for name, value in settings.values["config"].items()}
        accelerator.init_trackers("acceptance-head", config=shown)
    engine = Engine.of(
        accelerator,
        head,
        micro_batch_size=size,
        accumulation=micro_batch_count(
            config.batch_size, size=size, processes=accelerator.num_processes
        ),
        weight_decay=TRAINING[config.kind].weight_decay,
    )
    peak = config.peak_rate(head.hidden_size)
    training = Training(engine, questions, size, peak, settings, folder)
    if checkpoint is None:
        training.before = training.evaluate(dev_rows)
        training.log_metrics(training.before)
    else:
        some = Batch.of([questions.row(dev_rows[0], 0, None)], accelerator.device)
        engine.restore_moments(checkpoint, questions.arguments(some))
        training.before, training.losses = checkpoint.before, checkpoint.losses
    return training


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """The rate of an update, from 0: linear from peak / warm-up to the peak, then a cosine to 0."""
    if step < (warmup := math.ceil(warmup_ratio * steps)):
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@dataclass(slots=True)
class Training:
    """One training at work.

    Attributes:
        engine: the head, ready to train.
        questions: turns label rows into arguments of the head.
        micro_batch_size: rows a micro-batch, per process.
        peak: the largest learning rate.
        settings: all that the weights depend on; its remedy is what an error advises.
        folder: where checkpoints go.
        before: what the untrained head was worth.
        losses: of the steps done.
    """

    engine: Engine
    questions: Questions
    micro_batch_size: int
    peak: float
    settings: Settings
    folder: Path
    before: HeadMetrics = field(init=False)
    losses: list[float] = field(default_factory=list)

    def step(self, rows: Sequence[Row]) -> float:
        """Update the head once on a global batch; return the batch's loss.

        The loss is a sum over drafted tokens divided by the mass of the whole batch, which every
        process knows from the labels, so neither accumulation nor the number of processes changes
        it.
        """
        engine, accelerator = self.engine, self.engine.accelerator
        weight, count = engine.head.rejection_weight, accelerator.gradient_accumulation_steps
        mass = sum(float(loss_mass(row.accept, weight)) for row in rows)
        mass = mass or 1.0  # a batch without drafted tokens has loss 0
        # The engines average over processes and over micro-batches; this makes it a sum again.
        scale = accelerator.num_processes * count / mass
        total = torch.zeros((), device=accelerator.device)
        for batch in self.parts(rows, count):
            with accelerator.accumulate(engine.model):
                # Tensors only: DDP and DeepSpeed look for them in arguments.
                logits = engine.model(*self.questions.arguments(batch))
                numerator = weighted_bce(logits, batch.accept, batch.mask, weight)
                engine.backward(numerator * scale)
            total += numerator.detach()
        return float(accelerator.reduce(total, "sum")) / mass

    def parts(self, rows: Sequence[Row], count: int) -> list[Batch]:
        """This process's part of a global batch, in so many micro-batches."""
        accelerator = self.engine.accelerator
        parts = micro_batches(
            rows,
            size=self.micro_batch_size,
            count=count,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        return [Batch.of(part, accelerator.device) for part in parts]

    @torch.no_grad()
    def evaluate(self, rows: LabelRows) -> HeadMetrics:
        """Judge the head on all rows, which are always read the same."""
        accelerator = self.engine.accelerator
        read = [self.questions.row(rows[index], index, None) for index in range(len(rows))]
        count = micro_batch_count(
            len(read), size=self.micro_batch_size, processes=accelerator.num_processes
        )
        pairs = []  # (n, 2): logit, label
        for batch in self.parts(read, count):
            logits = self.engine.model(*self.questions.arguments(batch))
            pairs.append(torch.stack([logits, batch.accept], dim=-1)[batch.mask])
        local = torch.cat(pairs)
        counts = accelerator.gather(torch.tensor([len(local)], device=local.device)).tolist()
        padded = accelerator.gather(accelerator.pad_across_processes(local))
        padded = padded.view(len(counts), -1, 2)
        seen = torch.cat([padded[i, :count] for i, count in enumerate(counts)])
        return head_metrics(seen[:, 0], seen[:, 1], self.engine.head.rejection_weight)

    def log(self, values: Mapping[str, float]) -> None:
        """Report to the tracker, if there is one."""
        if self.engine.accelerator.trackers:
            self.engine.accelerator.log(dict(values), step=len(self.losses))

    def log_metrics(self, metrics: HeadMetrics) -> None:
        """Report what dev rows say of the head."""
        self.log({f"dev/{name}": v for name, v in asdict(metrics).items() if v is not None})

    def finite_weights(self) -> dict[str, Tensor]:
        """The head's parameters by name; every process must call this.

        Raises:
            TrainingDivergedError: on every process, if one is not finite.
        """
        weights = self.engine.whole()
        self._check_finite("weights", weights)
        return weights

    def save(self) -> None:
        """Write a checkpoint; every process takes part in gathering it, one writes."""
        weights = self.finite_weights()
        moments = {moment: self.engine.whole(moment) for moment in MOMENTS}
        for values in moments.values():
            self._check_finite("optimizer's moments", values)
        if self.engine.accelerator.is_main_process:
            Checkpoint(self.before, weights, moments, self.losses).write(self.folder)

    def _check_finite(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
            raise self.diverged(f"its {name} are not finite")

    def check(self, after: HeadMetrics, *, rows: int, epochs: int) -> None:
        """Raise TrainingDivergedError if the trained head is not finite, or worse than chance."""
        if not all(math.isfinite(value) for value in asdict(after).values() if value is not None):
            raise self.diverged("what it predicts after the last step is not finite")
        # Chance, which predicts one half, has a KL of at most ln 2.
        if after.kl <= max(math.log(2.0), self.before.kl):
            return
        error = self.diverged(
            "its predictions are worse than chance after the last step (KL "
            f"{after.kl:.3g} on held-out tokens, {self.before.kl:.3g} untrained)"
        )
        last = fmean(self.losses[-max(1, len(self.losses) // 10) :])
        if epochs > 1 and last < min(self.losses[0], after.kl / 2):
            error.by_heart = f"give it more than {rows:,} rows, or a head.epochs below {epochs}"
        raise error

    def diverged(self, what: str) -> TrainingDivergedError:
        """The error about a training that cannot go on; `what` is not finite, and when."""
        return TrainingDivergedError(
            f"acceptance head: {what}",
            last_good=newest_complete(self.folder),
            learning_rate=self.peak,
            remedy=self.settings.remedy,
        )


def new_head(
    draft: PreTrainedModel,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    scales: Mapping[str, tuple[float, float]] | None = None,
) -> BaseHead:
    """An untrained head of the kind that is asked for, the same one for the same seed."""
    hidden_size = int(draft.get_output_embeddings().weight.shape[-1])
    provenance: dict[str, Any] = {
        "draft": draft.name_or_path or None,
        "sampling": None if sampling is None else asdict(sampling),
        "probe": probe_of(draft),
    }
    with torch.random.fork_rng(devices=[]):  # layers initialise from the global generator
        torch.manual_seed(seed)
        if config.kind == "specdec++":
            return AcceptanceHead(
                hidden_size=hidden_size,
                depth=config.depth,
                rejection_weight=config.rejection_weight,
                **provenance,
            )
        return ImmediateHead(
            hidden_size=hidden_size,
            embedding_size=int(draft.get_input_embeddings().weight.shape[-1]),
            reads=config.features,
            width=config.width,
            depth=config.depth,
            scales=scales,
            **provenance,
        )


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest of a sample of every parameter: changes whenever the model was trained further."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def finished_head(out: Path, settings: Settings) -> HeadResult | None:
    """The measurements of the head in a folder; None if it is not done there.

    Raises:
        ManifestError: if it is a head of other settings.
    """
    path = out / METRICS_NAME
    if not path.is_file():
        return None
    stored = read_record(path, ("settings",), settings.remedy)
    settings.check(stored.pop("settings"), out)
    stored["before"], stored["after"] = (HeadMetrics(**stored[k]) for k in ("before", "after"))
    stored["losses"] = tuple(stored["losses"])
    return HeadResult(**stored)


def _remove_leftovers(out: Path) -> None:
    for name in (CHECKPOINTS_NAME, STATES_NAME):
        shutil.rmtree(out / name, ignore_errors=True)
