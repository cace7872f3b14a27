"""Train an acceptance head on a frozen draft: as a script, under accelerate or under DeepSpeed.

The draft runs outside DDP and DeepSpeed and gets no gradient; along the target's own text it runs
once, as far as memory is set aside for what it says (`TrainingInputs.keep`). All randomness derives
from (seed, epoch, example), and the learning rate from the step.
"""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor

from heads.config import HeadConfig
from heads.loss import HeadMetrics, head_metrics, loss_mass, weighted_bce
from heads.model import BaseHead
from heads.prepared import MOMENTS, Checkpoint, PreparedHead, start_accelerator
from heads.probe import probe_of
from heads.rows import HeadRow, LabelRows, TrainingInputs, feature_scales, labels_of, micro_batches
from specdata.errors import TrainingDivergedError
from specdata.interruption import Interrupted, stop_signal_of_any, until_checkpoint
from specdata.lm_head import check_hidden_states, width_of_states
from specdata.models import positions
from specdata.processes import is_main
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import checkpoint_to_resume, newest_complete
from specdata.storage.files import write_json
from specdata.storage.resume import read_record
from specdata.terminal import progress
from specdata.threads import threads_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.json"
CHECKPOINTS_NAME = "checkpoints"
LOGS_NAME = "logs"


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The measurements of a training run; written to `metrics.json` beside the head.

    `skipped_rows` are train and dev rows whose prompt alone fills the draft's context. `engine` is
    "single", "ddp" or "deepspeed-zeroN", as observed; the learning rate is the largest.
    """

    before: HeadMetrics
    after: HeadMetrics
    losses: tuple[float, ...]
    steps: int
    train_rows: int
    skipped_rows: int
    processes: int
    engine: str
    epochs: int
    learning_rate: float

    @classmethod
    def read(cls, out: Path) -> HeadResult:
        """Read those in the folder of a finished head."""
        keys = ("before", "after", "losses")
        stored = read_record(out / METRICS_NAME, keys, f"remove {out} to train it again")
        before, after = (HeadMetrics(**stored[each]) for each in keys[:2])
        stored |= {"before": before, "after": after, "losses": tuple(stored["losses"])}
        return cls(**stored)


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
    file system that they share; it is of this training alone.

    The draft is frozen: its weights and its precision are left alone. Labelled rows have
    `heads.rows.COLUMNS` and, of several draws, `MORE_DRAWS`; the seed is of initial weights, order
    and mixing of the train rows. `sampling`, under which they were made, is recorded with the head.
    """
    longest, is_late = positions(draft.config), config.kind_facts.lag > 0
    train_rows = LabelRows.read("train", train, longest, with_draws=not is_late)
    dev_rows = LabelRows.read("dev", dev, longest, with_draws=not is_late)
    if (out / METRICS_NAME).is_file():
        if is_main():
            # Those of a run that was killed right before its end.
            shutil.rmtree(out / CHECKPOINTS_NAME, ignore_errors=True)
        return HeadResult.read(out)
    if (cut := train_rows.cut + dev_rows.cut) and is_main():
        labels = train_rows.labels + dev_rows.labels
        logger.warning(
            "the draft's context of %d tokens cuts off %d of %d labels", longest, cut, labels
        )
    was_training = draft.training
    training = Training(draft.eval(), train_rows, dev_rows, out, config, seed, sampling)
    try:
        with warnings.catch_warnings():  # of collectives that DeepSpeed calls by their old names
            of_old_names = r"`torch\.distributed\.\w+` is deprecated"
            warnings.filterwarnings("ignore", of_old_names, FutureWarning)
            return training.run()
    finally:
        draft.train(was_training)


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """The rate of an update, from 0: linear from peak / warm-up to the peak, then a cosine to 0."""
    if step < (warmup := math.ceil(warmup_ratio * steps)):
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@dataclass(slots=True)
class Training:
    """One training at work.

    `before` is what the untrained head was worth, `losses` are of the steps done.
    """

    draft: PreTrainedModel
    train_rows: LabelRows
    dev_rows: LabelRows
    out: Path
    config: HeadConfig
    seed: int
    sampling: SamplingConfig | None
    prepared: PreparedHead = field(init=False)
    inputs: TrainingInputs = field(init=False)
    before: HeadMetrics = field(init=False)
    losses: list[float] = field(default_factory=list)

    def run(self) -> HeadResult:
        """Train the head from where it stands, save it, and measure it."""
        joined = torch.distributed.is_initialized()  # then leaving is up to whoever joined
        self._begin()
        prepared, losses, config = self.prepared, self.losses, self.config
        per_epoch = math.ceil(len(self.train_rows) / config.batch_size)
        epochs = config.passes(len(self.train_rows))
        steps, warmup_ratio = epochs * per_epoch, config.kind_facts.warmup_ratio
        threads = threads_of("acceptance head", prepared.accelerator.device)

        # The order of rows and their mixing follow from (seed, epoch) and the rate from the step,
        # so a resumed run does what an uninterrupted one does.
        with (
            until_checkpoint(),
            progress(steps, "acceptance head", "step", done=len(losses), is_shown=is_main()) as bar,
        ):
            for epoch in range(len(losses) // per_epoch, epochs):
                order = self.train_rows.order(self.seed, epoch)
                done = (len(losses) - epoch * per_epoch) * config.batch_size
                for start in range(done, len(order), config.batch_size):
                    rate = learning_rate(len(losses), steps, self.peak, warmup_ratio)
                    prepared.set_learning_rate(rate)
                    batch = order[start : start + config.batch_size]
                    if not prepared.head.lag:
                        self.inputs.keep(self.train_rows, batch)
                    threads.begin(len(losses) + 1)
                    loss = self.step([self.inputs.row(self.train_rows[i], i, epoch) for i in batch])
                    threads.end()
                    if not math.isfinite(loss):
                        raise self.diverged(f"the loss is {loss} in step {len(losses) + 1}")
                    losses.append(loss)
                    self.log({"loss": loss, "learning_rate": rate})
                    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                    bar.update()
                    stop = stop_signal_of_any()
                    if stop or len(losses) % config.save_steps == 0:
                        self.save()
                    if stop:
                        prepared.accelerator.wait_for_everyone()  # until it is written
                        raise Interrupted(stop)

        after, weights = self.evaluate(), self.finite("weights", prepared.whole())
        self.check(after, epochs)
        train_rows, dev_rows = self.train_rows, self.dev_rows
        result = HeadResult(
            before=self.before,
            after=after,
            losses=tuple(losses),
            steps=len(losses),
            train_rows=len(train_rows),
            skipped_rows=train_rows.skipped + dev_rows.skipped,
            processes=prepared.accelerator.num_processes,
            engine=prepared.name,
            epochs=epochs,
            learning_rate=self.peak,
        )
        if prepared.accelerator.is_main_process:
            final = self._new_head(getattr(prepared.head, "scales", None))
            final.load_state_dict(weights)
            final.save_pretrained(self.out)
            write_json(self.out / METRICS_NAME, asdict(result))
            shutil.rmtree(self.folder, ignore_errors=True)
        prepared.close(leave=not joined)
        return result

    def _begin(self) -> None:
        """Join the other processes and wrap the head, as new or as the last checkpoint holds it."""
        draft, config = self.draft, self.config
        accelerator = start_accelerator(config.report_to, self.out / LOGS_NAME)
        newest = checkpoint_to_resume(self.folder)
        checkpoint = None if newest is None else Checkpoint.read(newest)
        accelerator.wait_for_everyone()  # no process writes before all have looked
        if draft.device != accelerator.device:  # packed weights refuse even to stay where they are
            draft.to(accelerator.device)
        check_hidden_states(draft)
        head = self._new_head()
        longest = positions(draft.config)
        sampling = self.sampling or SamplingConfig()
        self.inputs = TrainingInputs(draft, head.reads, sampling, config, longest, self.seed)
        if not head.lag:
            self.inputs.plan(self.train_rows)
        if "scales" in head.settings():
            head = self._new_head(feature_scales(self.inputs, self.train_rows))
        if checkpoint is not None:
            head.load_state_dict(checkpoint.weights)
        if config.report_to != "none":
            shown = {name: str(value) for name, value in config.stored_settings().items()}
            accelerator.init_trackers("acceptance-head", config=shown)
        self.prepared = PreparedHead.of(accelerator, head, config)
        if checkpoint is None:
            self.before = self.evaluate()
        else:
            row = self.inputs.row(self.dev_rows[0], 0, None)
            self.prepared.restore_moments(checkpoint, self.inputs.arguments([row]))
            self.before, self.losses = checkpoint.before, checkpoint.losses

    def _new_head(self, scales: Mapping[str, tuple[float, float]] | None = None) -> BaseHead:
        """An untrained head of the kind that is asked for, the same one for the same seed."""
        draft, config = self.draft, self.config
        settings: dict[str, Any] = {
            **config.model_dump(),
            "hidden_size": width_of_states(draft),
            "embedding_size": int(draft.get_input_embeddings().weight.shape[-1]),
            "reads": config.features,
            "scales": scales,
            "draft": draft.name_or_path or None,
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "probe": probe_of(draft),
        }
        kind = config.kind_facts.load()
        with torch.random.fork_rng(devices=[]):  # layers initialise from the global generator
            torch.manual_seed(self.seed)
            return kind(**{name: v for name, v in settings.items() if name in kind.settings()})

    @property
    def peak(self) -> float:
        """The largest learning rate."""
        return self.config.peak_rate(self.prepared.head.hidden_size)

    @property
    def folder(self) -> Path:
        """The folder of checkpoints."""
        return self.out / CHECKPOINTS_NAME

    def step(self, rows: Sequence[HeadRow]) -> float:
        """Update the head once on a global batch; return the batch's loss.

        The loss is a sum over drafted tokens divided by the mass of the whole batch, which every
        process knows from the labels, so neither accumulation nor the number of processes changes
        it.
        """
        prepared, accelerator = self.prepared, self.prepared.accelerator
        weight, count = prepared.head.rejection_weight, accelerator.gradient_accumulation_steps
        mass = sum(float(loss_mass(row.accept, weight)) for row in rows)
        mass = mass or 1.0  # a batch without drafted tokens has loss 0
        # The engines average over processes and over micro-batches; this makes it a sum again.
        scale = accelerator.num_processes * count / mass
        total = torch.zeros((), device=accelerator.device)
        for part in self._parts(rows, count):
            accept, counts = (each.to(accelerator.device) for each in labels_of(part))
            with accelerator.accumulate(prepared.model):
                # Tensors only: DDP and DeepSpeed look for them in arguments.
                logits = prepared.model(*self.inputs.arguments(part))
                numerator = weighted_bce(logits, accept, counts, weight)
                prepared.backward(numerator * scale)
            total += numerator.detach()
        return float(accelerator.reduce(total, "sum")) / mass

    def _parts(self, rows: Sequence[HeadRow], count: int | None = None) -> Iterator[list[HeadRow]]:
        """This process's part of a global batch, in so many micro-batches."""
        accelerator = self.prepared.accelerator
        return micro_batches(
            rows,
            size=self.config.micro_batch_size,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
            count=count,
        )

    @torch.no_grad()
    def evaluate(self) -> HeadMetrics:
        """Judge the head on all dev rows, which are always read the same, and report it."""
        accelerator, rows = self.prepared.accelerator, self.dev_rows
        read = [self.inputs.row(rows[index], index, None) for index in range(len(rows))]
        pairs = []  # (n, 2): logit, label
        for part in self._parts(read):
            accept, counts = (each.to(accelerator.device) for each in labels_of(part))
            logits = self.prepared.model(*self.inputs.arguments(part))
            pairs.append(torch.stack([logits, accept], dim=-1)[counts])
        local = torch.cat(pairs)
        sizes = accelerator.gather(torch.tensor([len(local)], device=local.device)).tolist()
        padded = accelerator.gather(accelerator.pad_across_processes(local))
        padded = padded.view(len(sizes), -1, 2)
        logits, accept = torch.cat([padded[i, :n] for i, n in enumerate(sizes)]).unbind(-1)
        metrics = head_metrics(logits, accept, self.prepared.head.rejection_weight)
        self.log({f"dev/{name}": v for name, v in asdict(metrics).items() if v is not None})
        return metrics

    def log(self, values: Mapping[str, float]) -> None:
        """Report to the tracker, if there is one."""
        if self.prepared.accelerator.trackers:
            self.prepared.accelerator.log(dict(values), step=len(self.losses))

    def save(self) -> None:
        """Write a checkpoint; every process takes part in gathering it, one writes."""
        prepared = self.prepared
        weights = self.finite("weights", prepared.whole())
        moments = {
            name: self.finite("optimizer's moments", prepared.whole(name)) for name in MOMENTS
        }
        if prepared.accelerator.is_main_process:
            Checkpoint(self.before, weights, moments, self.losses).write(self.folder)

    def finite(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, or TrainingDivergedError on every process if one is not finite."""
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
            raise self.diverged(f"its {name} are not finite")
        return tensors

    def check(self, after: HeadMetrics, epochs: int) -> None:
        """Raise TrainingDivergedError if the trained head is not finite, or worse than chance."""
        if not all(math.isfinite(value) for value in asdict(after).values() if value is not None):
            raise self.diverged("what it predicts after the last step is not finite")
        # Chance, which predicts one half, has a KL of at most ln 2.
        if after.kl <= max(math.log(2.0), self.before.kl):
            return
        raise self.diverged(
            "its predictions are worse than chance after the last step (KL "
            f"{after.kl:.3g} on held-out tokens, {self.before.kl:.3g} untrained; it may know its "
            f"{len(self.train_rows):,} rows by heart: then give it more, or fewer epochs than "
            f"{epochs})"
        )

    def diverged(self, what: str) -> TrainingDivergedError:
        """The error about a training that cannot go on; `what` is not finite, and when."""
        return TrainingDivergedError(
            f"acceptance head: {what}",
            last_good=newest_complete(self.folder),
            learning_rate=self.peak,
        )
