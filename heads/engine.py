"""Where head training runs: one process, DDP or DeepSpeed, all through accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from torch import Tensor, nn

from heads.base import BaseHead
from heads.checkpoint import MOMENTS, Checkpoint
from heads.config import Tracker
from specdata.errors import ConfigError
from specdata.processes import join_processes, refuse_fsdp

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
        """What really runs, read off the wrapped model: "single", "ddp" or "deepspeed-zeroN"."""
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
