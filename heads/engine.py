"""Where training runs: one process, DDP or DeepSpeed, all through accelerate; and its checkpoints.

A checkpoint is one safetensors file with whole tensors, whatever the engine: it is written
atomically, holds no pickle, and a run may resume on another number of processes or another engine.
All randomness derives from (seed, epoch, example), and the learning rate from the step, so weights,
Adam's moments and the step are all there is to save.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    get_int_from_env,
    parse_flag_from_env,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.model import AcceptanceHead
from specdata.errors import ManifestError
from specdata.shards import atomic_write

CHECKPOINTS_KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


def start_accelerator() -> Accelerator:
    """Join the processes that the launcher started.

    Raises:
        RuntimeError: if the launcher asked for DeepSpeed or for several processes and accelerate
            silently settled for less.
    """
    wanted = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    gloo = get_int_from_env(["LOCAL_RANK"], -1) >= 0 and not torch.cuda.is_available()
    accelerator = Accelerator(
        # Without a GPU accelerate must be told both, or each process trains alone: the backend
        # under DeepSpeed, and that the processes are on the CPU otherwise.
        cpu=gloo and not wanted,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo else None,
        mixed_precision="no",  # the head is float32; the draft keeps the precision it came in
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
    )
    model, optimizer = accelerator.prepare(head, optimizer)
    if not isinstance(model, DeepSpeedEngine):
        raise RuntimeError(f"accelerate wrapped the head in {type(model).__name__}, not DeepSpeed")
    return Engine(accelerator, head, model, optimizer, model.zero_optimization_stage())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` updates; every tensor is whole, float32, on the CPU.

    Attributes:
        step: updates done.
        run: digest of configuration, seed, data and draft.
        notes: JSON values to carry along.
        weights: head parameters by name.
        moments: Adam's moments, `moments["exp_avg"]` and `moments["exp_avg_sq"]` by name.
        losses: (step,) training losses, float64.
    """

    step: int
    run: str
    notes: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    losses: Tensor


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


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"step-(\d+)\.safetensors", p.name), p) for p in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically and drop all but the last two; main process only."""
    tensors = {f"weight.{name}": value for name, value in checkpoint.weights.items()}
    for moment, values in checkpoint.moments.items():
        tensors |= {f"{moment}.{name}": value for name, value in values.items()}
    tensors["losses"] = checkpoint.losses
    metadata = {
        "step": str(checkpoint.step),
        "run": checkpoint.run,
        "notes": json.dumps(checkpoint.notes),
    }
    with atomic_write(folder / f"step-{checkpoint.step:08d}.safetensors") as temporary:
        save_file(tensors, temporary, metadata=metadata)
    for _, path in _steps(folder)[:-CHECKPOINTS_KEPT]:
        path.unlink()
    for path in folder.glob(".*.tmp"):  # what a killed run was writing
        path.unlink()


def latest_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    """Read the newest checkpoint, or None if there is none.

    Raises:
        ManifestError: if it belongs to a run with another configuration, seed, data or draft.
    """
    found = _steps(folder)
    if not found:
        return None
    path = found[-1][1]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    if metadata["run"] != run:
        raise ManifestError(
            f"{path} belongs to a run with another configuration, seed, data or draft; "
            f"delete {folder.parent} or choose another output folder"
        )

    def group(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return Checkpoint(
        step=int(metadata["step"]),
        run=run,
        notes=json.loads(metadata["notes"]),
        weights=group("weight."),
        moments={moment: group(f"{moment}.") for moment in MOMENTS},
        losses=tensors["losses"],
    )
