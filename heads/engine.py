"""Where training runs: one process, DDP or DeepSpeed, all through accelerate."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    get_int_from_env,
    parse_flag_from_env,
)
from torch import Tensor, nn

from heads.checkpoint import MOMENTS, Checkpoint
from heads.model import AcceptanceHead

logger = logging.getLogger(__name__)


def start_accelerator() -> Accelerator:
    """Join the processes that the launcher started.

    Raises:
        RuntimeError: if the launcher asked for DeepSpeed or for several processes and accelerate
            silently settled for less.
    """
    wanted = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    ranked = get_int_from_env(["LOCAL_RANK"], -1) >= 0
    gloo = ranked and not torch.cuda.is_available()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    if on_cpu and not ranked and get_int_from_env(["MASTER_PORT"], 0):
        logger.warning(
            "accelerate was asked for several CPU processes and started one, as it does without "
            "mpirun; the result is the same, and launch/cpu-2.yaml starts two"
        )
    accelerator = Accelerator(
        # Without a GPU accelerate must be told both, or each process trains alone: the backend
        # under DeepSpeed, and that the processes are on the CPU otherwise.
        cpu=gloo and not wanted,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo else None,
        # The head is float32 and leaves autocast by itself; an accelerator that the process already
        # has, from a trainer that ran before, cannot be changed and need not be.
        mixed_precision=None if is_initialized() else "no",
    )
    if wanted and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise RuntimeError(
            "the launcher asked for DeepSpeed but accelerate runs without it; without a GPU, unset "
            "ACCELERATE_USE_CPU, do not pass --cpu, and set DS_ACCELERATOR=cpu"
        )
    asked = get_int_from_env(["WORLD_SIZE"], 1)
    if accelerator.num_processes != asked:
        raise RuntimeError(
            f"the launcher started {asked} processes but they formed a group of "
            f"{accelerator.num_processes}; check MASTER_ADDR and MASTER_PORT"
        )
    return accelerator


@dataclass(slots=True)
class Engine:
    """A head ready to train.

    Attributes:
        accelerator: the group of processes.
        head: the head itself, to reach its parameters.
        model: the head as accelerate wrapped it; call this one.
        optimizer: accelerate's optimizer.
        zero_stage: DeepSpeed's ZeRO stage; None without DeepSpeed.
    """

    accelerator: Accelerator
    head: AcceptanceHead
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

    def update(self, loss: Tensor, *, max_norm: float) -> None:
        """Back-propagate one micro-batch; step the optimizer on the last one of a batch."""
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
    head: AcceptanceHead,
    *,
    micro_batch_size: int,
    accumulation: int,
    max_norm: float,
) -> Engine:
    """Wrap a head and a new Adam for the accelerator; batch sizes are ours, not the launcher's.

    Args:
        accelerator: from `start_accelerator`.
        head: weights to start from.
        micro_batch_size: rows a micro-batch, per process.
        accumulation: micro-batches a step.
        max_norm: gradients are clipped to this norm.
    """
    accelerator.gradient_accumulation_steps = accumulation
    optimizer = torch.optim.Adam(head.parameters())
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        model, optimizer = accelerator.prepare(head.to(accelerator.device), optimizer)
        return Engine(accelerator, head, model, optimizer, None)
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
    return Engine(accelerator, head, model, optimizer, model.zero_optimization_stage())


def _whole(engine: Engine, parameter: Any, moment: str | None) -> Tensor:
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


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """The head's parameters by name; every process must call this."""
    return {name: _whole(engine, value, None) for name, value in engine.head.named_parameters()}


def whole_moments(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Adam's moments by kind and name; every process must call this, after the first step."""
    named = dict(engine.head.named_parameters())
    return {
        moment: {name: _whole(engine, value, moment) for name, value in named.items()}
        for moment in MOMENTS
    }


def restore_moments(engine: Engine, checkpoint: Checkpoint) -> None:
    """Put Adam back where it was; the weights go into the head before `prepare`.

    Optimizers create their state in the first step, so one step at rate 0 is taken to have it.
    """
    engine.set_learning_rate(0.0)
    nothing = torch.zeros(1, engine.head.hidden_size, device=engine.accelerator.device)
    for _ in range(engine.accelerator.gradient_accumulation_steps):
        with engine.accelerator.accumulate(engine.model):
            engine.update(0.0 * engine.model(nothing).sum(), max_norm=1.0)
    for state in engine.optimizer.state.values():
        state["step"].fill_(checkpoint.step)
    for moment in MOMENTS:
        for name, parameter in engine.head.named_parameters():
            _set_moment(engine, parameter, moment, checkpoint.moments[moment][name])


def _set_moment(engine: Engine, parameter: Any, moment: str, value: Tensor) -> None:
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
