"""The training loop of a head, and its evaluation, in one process, under DDP or DeepSpeed.

The loss of a batch is a sum over its drafted tokens divided by the mass of the whole batch, which
every process knows from the labels, so neither accumulation nor the number of processes changes it.

Drafts train in `transformers.Trainer` (package `distill`). A head does not, because of the
Trainer's checkpoints: they are pickles, and depend on the engine. A Trainer (transformers 5.23)
trains the same head, to the bit in one process. But a training that begins under ZeRO-2 and goes on
in one process finds no optimizer state there, starts Adam anew without a warning, and ends 1.2e-2
from the weights that it should have, where 1e-5 is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from heads.batches import LabelRows, micro_batch_count, micro_batches
from heads.checkpoint import Checkpoint, newest_file, save_checkpoint
from heads.config import HeadConfig
from heads.contexts import Context, Questions
from heads.engine import TrainingEngine, restore_moments, whole_moments, whole_weights
from heads.inputs import Moment
from heads.loss import HeadMetrics, head_metrics, weighted_bce
from specdata.errors import TrainingDivergedError
from specdata.interruption import Interrupted, asked_of_any, until_checkpoint
from specdata.storage.resume import Settings
from specdata.terminal import progress


def main_moment(moments: Sequence[Moment]) -> Moment:
    """The moment by which a head is judged if one must do: when the token is drawn, if it can."""
    return Moment.DRAWN if Moment.DRAWN in moments else moments[-1]


def learning_rates(steps: int, config: HeadConfig) -> list[float]:
    """The rate of each of `steps` updates, and the 0 after them: (steps + 1,).

    Linear from peak / warm-up steps to the peak, then a cosine down to 0. It is listed beforehand,
    because a resumed run then needs nothing but its step. transformers' cosine schedule would begin
    at 0 and so waste the first update.
    """
    assert config.learning_rate is not None
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    warmup = math.ceil(config.warmup_ratio * steps)
    schedules: list[LRScheduler] = [CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))]
    if warmup:
        rise = LinearLR(optimizer, start_factor=1.0 / warmup, total_iters=warmup - 1)
        schedules.insert(0, rise)
    schedule = SequentialLR(optimizer, schedules, milestones=[warmup] if warmup else [])
    rates = [float(schedule.get_last_lr()[0])]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rates.append(float(schedule.get_last_lr()[0]))
    return rates


@dataclass(frozen=True, slots=True)
class Training:
    """One training: what it trains, on what, and where it keeps checkpoints.

    Attributes:
        engine: the head, ready to train.
        context: turns label rows into questions for the head.
        config: settings of the head and of its training, with a learning rate.
        seed: of the order of rows.
        settings: all that the weights depend on, stored with each checkpoint; its remedy is what
            an error advises.
        folder: where checkpoints go.
    """

    engine: TrainingEngine
    context: Context
    config: HeadConfig
    seed: int
    settings: Settings
    folder: Path

    @property
    def learning_rate(self) -> float:
        """The largest."""
        assert self.config.learning_rate is not None
        return self.config.learning_rate

    def start(
        self, checkpoint: Checkpoint | None, dev: LabelRows
    ) -> tuple[HeadMetrics, list[float]]:
        """Measure the untrained head, or take up where the checkpoint left off."""
        if checkpoint is None:
            untrained = self.evaluate(dev)
            self.log_metrics(untrained, 0)
            return untrained[main_moment(self.engine.head.moments)], []
        restore_moments(self.engine, checkpoint, next(self._parts_of(dev)).arguments)
        return HeadMetrics(**checkpoint.notes["before"]), checkpoint.losses.tolist()

    def train(self, rows: LabelRows, before: HeadMetrics, losses: Sequence[float]) -> list[float]:
        """Do all steps that are not done yet; return the losses of all of them, float64.

        Raises:
            TrainingDivergedError: on every process, if a loss or what would be stored is not
                finite.
            Interrupted: on every process, if one was asked to stop, after a checkpoint.
        """
        config, losses = self.config, list(losses)
        per_epoch, epochs = math.ceil(len(rows) / config.batch_size), config.passes(len(rows))
        total = epochs * per_epoch
        rates = learning_rates(total, config)
        main = self.engine.accelerator.is_main_process
        with (
            until_checkpoint(),
            progress(total, "acceptance head", "step", done=len(losses), is_shown=main) as bar,
        ):
            for epoch in range(len(losses) // per_epoch, epochs):
                done = len(losses) - epoch * per_epoch
                for batch in islice(rows.epoch(self.seed, epoch, config.batch_size), done, None):
                    self.engine.set_learning_rate(rates[len(losses)])
                    loss = self.train_step([self.context.row(rows[i], i, epoch) for i in batch])
                    if not math.isfinite(loss):
                        raise self.diverged(f"the loss is {loss} in step {len(losses) + 1}")
                    self.log({"loss": loss, "learning_rate": rates[len(losses)]}, len(losses) + 1)
                    losses.append(loss)
                    bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
                    bar.update()
                    stop = asked_of_any()
                    if stop or len(losses) % config.save_steps == 0:
                        self.save(before, losses)
                    if stop:
                        self.engine.accelerator.wait_for_everyone()  # until it is written
                        raise Interrupted(stop)
        return losses

    def train_step(self, rows: Sequence[Any]) -> float:
        """Update the head once on a global batch; return the batch's loss."""
        accelerator, weight = self.engine.accelerator, self.engine.head.rejection_weight
        mass = sum(float(self.context.mass(row)) for row in rows)
        mass = mass or 1.0  # a batch without drafted tokens has loss 0
        # The engines average over processes and over micro-batches; this makes it a sum again.
        accumulation = accelerator.gradient_accumulation_steps
        scale = accelerator.num_processes * accumulation / mass
        total = torch.zeros((), device=accelerator.device)
        for part in self._parts(rows, accumulation):
            with accelerator.accumulate(self.engine.model):
                numerator = weighted_bce(self._logits(part), part.accept, part.mask, weight)
                self.engine.backward(numerator * scale, max_norm=self.config.max_grad_norm)
            total += numerator.detach()
        return float(accelerator.reduce(total, "sum")) / mass

    def evaluate(self, rows: LabelRows) -> dict[Moment, HeadMetrics]:
        """Judge the head on all rows at each of its moments, always in the same context."""
        head, accelerator = self.engine.head, self.engine.accelerator
        pairs: list[Tensor] = []  # (n, M, 2): logit, label
        for part in self._parts_of(rows):
            with torch.no_grad():
                logits = self._logits(part)
            chosen = part.mask[0]
            here = torch.stack([logits, part.accept], dim=-1)[:, chosen]
            pairs.append(here.transpose(0, 1))
        local = torch.cat(pairs)
        counts = accelerator.gather(torch.tensor([len(local)], device=local.device)).tolist()
        padded = accelerator.gather(accelerator.pad_across_processes(local))
        padded = padded.view(len(counts), -1, *local.shape[1:])
        seen = torch.cat([padded[i, :count] for i, count in enumerate(counts)])
        return {
            moment: head_metrics(seen[:, i, 0], seen[:, i, 1], head.rejection_weight)
            for i, moment in enumerate(head.moments)
        }

    def _parts_of(self, rows: LabelRows) -> Iterator[Questions]:
        """This process's micro-batches of all rows, which are always read in the same context."""
        held = [self.context.row(rows[index], index, None) for index in range(len(rows))]
        count = micro_batch_count(
            len(held),
            size=self.config.micro_batch_size,
            processes=self.engine.accelerator.num_processes,
        )
        return self._parts(held, count)

    def _parts(self, rows: Sequence[Any], count: int) -> Iterator[Questions]:
        accelerator = self.engine.accelerator
        for part in micro_batches(
            rows,
            size=self.config.micro_batch_size,
            count=count,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        ):
            yield self.context.questions(part)

    def _logits(self, part: Questions) -> Tensor:
        # The wrapped model, which gets tensors only: DDP and DeepSpeed look for them in arguments.
        logits: Tensor = self.engine.model(*part.arguments)
        return logits.view_as(part.accept)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Report to what `report_to` names, if it names anything."""
        if self.config.report_to != "none":
            self.engine.accelerator.log(dict(values), step=step)

    def log_metrics(self, metrics: Mapping[Moment, HeadMetrics], step: int) -> None:
        """Report what dev rows say of the head after so many steps."""
        for moment, judged in metrics.items():
            values = {name: value for name, value in asdict(judged).items() if value is not None}
            self.log({f"dev/{moment.name.lower()}/{k}": v for k, v in values.items()}, step)

    def whole_weights(self) -> dict[str, Tensor]:
        """The head's parameters by name; every process must call this.

        Raises:
            TrainingDivergedError: on every process, if one is not finite.
        """
        weights = whole_weights(self.engine)
        self._check_finite("weights", weights)
        return weights

    def diverged(self, what: str) -> TrainingDivergedError:
        """The error about a training that cannot go on; `what` is not finite, and when."""
        return TrainingDivergedError(
            f"acceptance head: {what}",
            kept=newest_file(self.folder),
            learning_rate=self.learning_rate,
            remedy=self.settings.remedy,
        )

    def _check_finite(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
            raise self.diverged(f"its {name} are not finite")

    def save(self, before: HeadMetrics, losses: Sequence[float]) -> None:
        """Write a checkpoint; every process takes part in gathering it, one writes."""
        weights, moments = self.whole_weights(), whole_moments(self.engine)
        for values in moments.values():
            self._check_finite("optimizer's moments", values)
        if self.engine.accelerator.is_main_process:
            checkpoint = Checkpoint(
                step=len(losses),
                settings=self.settings.values,
                notes={"before": asdict(before)},
                weights=weights,
                moments=moments,
                losses=torch.tensor(losses, dtype=torch.float64),
            )
            save_checkpoint(self.folder, checkpoint)
