"""The training loop of a head, and where it runs: in one process, under DDP or DeepSpeed.

The loss of a batch is a sum over its drafted tokens divided by the mass of the whole batch, which
every process knows from the labels, so neither accumulation nor the number of processes changes it.
All randomness derives from (seed, epoch, example), and the learning rate from the step. So weights,
Adam's moments and the step are all that a checkpoint holds, as whole tensors: a run may go on with
another number of processes or another engine.

Drafts train in `transformers.Trainer` (package `distill`). A head does not, because of the
Trainer's checkpoints: they are pickles, and depend on the engine. A Trainer (transformers 5.23)
trains the same head, to the bit in one process. But a training that begins under ZeRO-2 and goes on
in one process finds no optimizer state there, starts Adam anew without a warning, and ends 1.2e-2
from the weights that it should have, where 1e-5 is allowed.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    is_tensorboard_available,
    is_wandb_available,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from heads.batches import LabelRows, micro_batch_count, micro_batches
from heads.config import HeadConfig, Tracker
from heads.contexts import Context, Questions
from heads.inputs import DecisionPoint
from heads.loss import HeadMetrics, head_metrics, weighted_bce
from heads.model import BaseHead
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.interruption import Interrupted, asked_of_any, until_checkpoint
from specdata.processes import join_processes, refuse_fsdp
from specdata.storage.checkpoints import checkpoint_folder, complete, newest_complete, step_of
from specdata.storage.resume import Settings
from specdata.terminal import progress

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
AVAILABLE: dict[Tracker, Callable[[], bool]] = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
}


def start_accelerator(report_to: Tracker = "none", logs: Path | None = None) -> Accelerator:
    """Join the processes that the launcher started.

    Args:
        report_to: which tracker `Accelerator.log` reports to.
        logs: the folder for what it writes.

    Raises:
        ConfigError: if the tracker is not installed, or the launcher asked for FSDP.
        RuntimeError: if the launcher's DeepSpeed or processes were silently lost.
    """
    if report_to != "none" and not AVAILABLE[report_to]():
        # accelerate would leave it out without a word.
        raise ConfigError(
            f"head.report_to is {report_to}, which is not installed here: pip install {report_to}, "
            "or set it to none"
        )
    refuse_fsdp("training a head")
    join_processes()
    # The head is float32 and leaves autocast by itself; an accelerator that the process already
    # has, from a trainer that ran before, cannot be changed and need not be.
    precision = None if is_initialized() else "no"
    # Heads are trained without a dataloader. One that a trainer before left at its end (an error in
    # its last step) would otherwise make every micro-batch a step of its own.
    alone = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    if report_to == "none":
        return Accelerator(mixed_precision=precision, gradient_accumulation_plugin=alone)
    return Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=alone,
        log_with=report_to,
        project_dir=logs,
    )


@dataclass(slots=True)
class TrainingEngine:
    """A head ready to train.

    Attributes:
        accelerator: the group of processes.
        head: the head itself, to reach its parameters.
        model: the head as accelerate wrapped it; call this one.
        optimizer: accelerate's optimizer.
        zero_stage: DeepSpeed's ZeRO stage; None without DeepSpeed.
    """

    accelerator: Accelerator
    head: BaseHead
    model: Any
    optimizer: Any
    zero_stage: int | None

    @property
    def name(self) -> str:
        """The kind that runs, read off the wrapped model: "single", "ddp", "deepspeed-zeroN"."""
        if self.zero_stage is not None:
            return f"deepspeed-zero{self.zero_stage}"
        ddp = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return "ddp" if ddp else "single"

    def backward(self, loss: Tensor, *, max_norm: float) -> None:
        """Back-propagate one micro-batch; step the optimizer on the last one of a batch.

        Args:
            loss: () of this micro-batch.
            max_norm: gradients are clipped to this norm.
        """
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            # DeepSpeed clips and steps inside backward, and these calls do nothing there.
            self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def close(self, *, leave: bool) -> None:
        """Free the engine, which cannot be used again; `leave` the group of processes, too."""
        self.accelerator.wait_for_everyone()
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if leave:
            self.accelerator.end_training()


@contextmanager
def deprecations_of_deepspeed_hidden() -> Iterator[None]:
    """Hide warnings about collectives that torch renamed and DeepSpeed calls by their old names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        yield


def prepare(
    accelerator: Accelerator,
    head: BaseHead,
    *,
    micro_batch_size: int,
    accumulation: int,
    max_norm: float,
    weight_decay: float = 0.0,
) -> TrainingEngine:
    """Wrap a head and a new AdamW for the accelerator; batch sizes are ours, not the launcher's.

    Args:
        accelerator: from `start_accelerator`.
        head: weights to start from.
        micro_batch_size: rows a micro-batch, per process.
        accumulation: micro-batches a step.
        max_norm: gradients are clipped to this norm.
        weight_decay: share of the learning rate by which weights shrink in a step; 0 is Adam.

    Raises:
        RuntimeError: under DeepSpeed, if accelerate wrapped the head in something else.
    """
    accelerator.gradient_accumulation_steps = accumulation
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=weight_decay)
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        model, optimizer = accelerator.prepare(head.to(accelerator.device), optimizer)
        return TrainingEngine(accelerator, head, model, optimizer, None)
    from deepspeed import DeepSpeedEngine  # here, because it is heavy and rarely needed

    plugin = accelerator.state.deepspeed_plugin
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        train_batch_size=micro_batch_size * accumulation * accelerator.num_processes,
        gradient_clipping=max_norm,
        bf16={"enabled": False},
        fp16={"enabled": False},
    )
    model, optimizer = accelerator.prepare(head, optimizer)
    if not isinstance(model, DeepSpeedEngine):
        raise RuntimeError(f"accelerate wrapped the head in {type(model).__name__}, not DeepSpeed")
    return TrainingEngine(accelerator, head, model, optimizer, model.zero_optimization_stage())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` updates; every tensor is whole, float32, on the CPU.

    Attributes:
        step: updates done.
        before: what the untrained head was worth.
        weights: head parameters by name.
        moments: Adam's moments, `moments["exp_avg"]` and `moments["exp_avg_sq"]` by name.
        losses: of all steps.
    """

    step: int
    before: HeadMetrics
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    losses: list[float]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read what `Training.save` wrote."""
        with safe_open(folder / STATE, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
            before = HeadMetrics(**json.loads(file.metadata()["before"]))
        losses = tensors.pop("losses").tolist()
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        return cls(step_of(folder), before, groups.pop("weight"), groups, losses)


def _whole(engine: TrainingEngine, parameter: Any, moment: str | None) -> Tensor:
    """A parameter (moment None) or one of its moments, gathered from all processes."""
    if engine.zero_stage:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        value: Tensor = (
            safe_get_full_fp32_param(parameter)
            if moment is None
            else safe_get_full_optimizer_state(parameter, moment)
        )
    else:
        value = parameter if moment is None else engine.optimizer.state[parameter][moment]
    return value.detach().cpu().clone().contiguous()


def whole_weights(engine: TrainingEngine) -> dict[str, Tensor]:
    """The head's parameters by name; every process must call this."""
    return {name: _whole(engine, value, None) for name, value in engine.head.named_parameters()}


def whole_moments(engine: TrainingEngine) -> dict[str, dict[str, Tensor]]:
    """Adam's moments by kind and name; every process must call this, after the first step."""
    named = dict(engine.head.named_parameters())
    return {
        moment: {name: _whole(engine, value, moment) for name, value in named.items()}
        for moment in MOMENTS
    }


def restore_moments(
    engine: TrainingEngine, checkpoint: Checkpoint, arguments: Sequence[Tensor | None]
) -> None:
    """Put Adam back where it was; the weights go into the head before `prepare`.

    Args:
        engine: with the weights of the checkpoint.
        checkpoint: holds the moments and the number of updates.
        arguments: any arguments of the head. Optimizers create their state in the first step, so
            one step at rate 0 is taken to have it.
    """
    engine.set_learning_rate(0.0)
    for _ in range(engine.accelerator.gradient_accumulation_steps):
        with engine.accelerator.accumulate(engine.model):
            engine.backward(0.0 * engine.model(*arguments).sum(), max_norm=1.0)
    for state in engine.optimizer.state.values():
        state["step"].fill_(checkpoint.step)
    for moment in MOMENTS:
        for name, parameter in engine.head.named_parameters():
            _set_moment(engine, parameter, moment, checkpoint.moments[moment][name])


def _set_moment(engine: TrainingEngine, parameter: Any, moment: str, value: Tensor) -> None:
    value = value.to(engine.accelerator.device)
    if not engine.zero_stage:
        engine.optimizer.state[parameter][moment].copy_(value)
    elif engine.zero_stage < 3:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, value, moment)
    else:
        from deepspeed.utils import safe_set_local_optimizer_state

        # DeepSpeed's setter for whole tensors runs over the end where the last part is padded.
        size = parameter.ds_tensor.numel()
        padded = value.new_zeros(size * engine.accelerator.num_processes)
        padded[: value.numel()] = value.flatten()
        part = padded.narrow(0, size * engine.accelerator.process_index, size)
        safe_set_local_optimizer_state(parameter, part, moment)


def main_point(points: Sequence[DecisionPoint]) -> DecisionPoint:
    """The point by which a head is judged if one must do: when the token is drawn, if it can."""
    return DecisionPoint.DRAWN if DecisionPoint.DRAWN in points else points[-1]


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
        settings: all that the weights depend on; its remedy is what an error advises.
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
            return untrained[main_point(self.engine.head.decision_points)], []
        restore_moments(self.engine, checkpoint, next(self._parts_of(dev)).arguments)
        return checkpoint.before, checkpoint.losses

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

    def evaluate(self, rows: LabelRows) -> dict[DecisionPoint, HeadMetrics]:
        """Judge the head on all rows at each of its points, always in the same context."""
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
            point: head_metrics(seen[:, i, 0], seen[:, i, 1], head.rejection_weight)
            for i, point in enumerate(head.decision_points)
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

    def log_metrics(self, metrics: Mapping[DecisionPoint, HeadMetrics], step: int) -> None:
        """Report what dev rows say of the head after so many steps."""
        for point, judged in metrics.items():
            values = {name: value for name, value in asdict(judged).items() if value is not None}
            self.log({f"dev/{point.name.lower()}/{k}": v for k, v in values.items()}, step)

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
            last_good=newest_complete(self.folder),
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
            tensors = {f"weight.{name}": value for name, value in weights.items()}
            for moment, values in moments.items():
                tensors |= {f"{moment}.{name}": value for name, value in values.items()}
            tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
            folder = checkpoint_folder(self.folder, len(losses))
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / STATE, metadata={"before": json.dumps(asdict(before))})
            complete(folder)
