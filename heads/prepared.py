"""Where a head trains, in one process, under DDP or DeepSpeed, and its checkpoints.

A checkpoint holds weights, Adam's moments and the losses, as whole tensors, so a run may go on with
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from heads.config import HeadConfig, Tracker
from heads.loss import HeadMetrics
from heads.model import BaseHead
from specdata.errors import ConfigError
from specdata.processes import AUTO, begin_training
from specdata.storage.checkpoints import checkpoint_folder, complete

STATE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_GRAD_NORM = 1.0


def start_accelerator(report_to: Tracker = "none", logs: Path | None = None) -> Accelerator:
    """Join the processes that the launcher started; `Accelerator.log` reports to a tracker.

    Raises RuntimeError if the launcher's DeepSpeed or processes were silently lost.
    """
    check_tracker(report_to)
    begin_training()
    # Heads are trained without a dataloader.
    alone = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    return Accelerator(
        mixed_precision="no",
        gradient_accumulation_plugin=alone,
        log_with=None if report_to == "none" else report_to,
        project_dir=logs,
    )


def check_tracker(report_to: Tracker) -> None:
    """Raise ConfigError for a tracker that accelerate would leave out without a word."""
    if report_to not in ["none", *map(str, get_available_trackers())]:
        raise ConfigError(
            f"head.report_to is {report_to}, which is not installed here: pip install {report_to}, "
            "or set it to none"
        )


@dataclass(slots=True)
class PreparedHead:
    """A head and a new AdamW, wrapped for a group of processes."""

    accelerator: Accelerator
    head: BaseHead  # itself, to reach its parameters
    model: Any  # as accelerate wrapped it, which is called
    optimizer: Any
    zero_stage: int | None  # None without DeepSpeed

    @classmethod
    def of(cls, accelerator: Accelerator, head: BaseHead, config: HeadConfig) -> PreparedHead:
        """Wrap a head; batch sizes are ours, not the launcher's."""
        size = config.micro_batch_size
        accumulation = math.ceil(config.batch_size / (size * accelerator.num_processes))
        accelerator.gradient_accumulation_steps = accumulation
        weight_decay = config.kind_facts.weight_decay
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=weight_decay)
        if accelerator.distributed_type != DistributedType.DEEPSPEED:
            model, optimizer = accelerator.prepare(head.to(accelerator.device), optimizer)
            return cls(accelerator, head, model, optimizer, None)
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        zero = settings["zero_optimization"]  # sizes that are filled in by a transformers model's
        settings.update(
            zero_optimization={key: value for key, value in zero.items() if value != AUTO},
            train_micro_batch_size_per_gpu=size,
            gradient_accumulation_steps=accumulation,
            train_batch_size=size * accumulation * accelerator.num_processes,
            gradient_clipping=MAX_GRAD_NORM,
            bf16={"enabled": False},
            fp16={"enabled": False},
        )
        model, optimizer = accelerator.prepare(head, optimizer)
        return cls(accelerator, head, model, optimizer, model.zero_optimization_stage())

    @property
    def name(self) -> str:
        """The kind that runs, read off the wrapped model: "single", "ddp", "deepspeed-zeroN"."""
        if self.zero_stage is not None:
            return f"deepspeed-zero{self.zero_stage}"
        ddp = isinstance(self.model, nn.parallel.DistributedDataParallel)
        return "ddp" if ddp else "single"

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss () of a micro-batch; take the step on the last one of a batch."""
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            # DeepSpeed clips and steps inside backward, and these calls do nothing there.
            self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def whole(self, moment: str | None = None) -> dict[str, Tensor]:
        """The parameters, or one of Adam's moments, by name, whole, on the CPU.

        Every process must call this; there are moments after the first step.
        """
        if self.zero_stage:
            from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
        values: dict[str, Any] = dict(self.head.named_parameters())
        for name, parameter in self.head.named_parameters():
            if self.zero_stage and moment is None:
                values[name] = safe_get_full_fp32_param(parameter)
            elif self.zero_stage:
                values[name] = safe_get_full_optimizer_state(parameter, moment)
            elif moment is not None:
                values[name] = self.optimizer.state[parameter][moment]
        return {name: v.detach().cpu().clone().contiguous() for name, v in values.items()}

    def restore_moments(self, checkpoint: Checkpoint, arguments: Sequence[Tensor]) -> None:
        """Put Adam back where it was; the weights go into the head before it is wrapped.

        `arguments` are any of the head: optimizers create their state in the first step, so one
        step at rate 0 is taken to have it.
        """
        self.set_learning_rate(0.0)
        for _ in range(self.accelerator.gradient_accumulation_steps):
            with self.accelerator.accumulate(self.model):
                self.backward(0.0 * self.model(*arguments).sum())
        steps = len(checkpoint.losses)
        for state in self.optimizer.state.values():  # DeepSpeed's of the CPU counts in an int
            state["step"] = steps if isinstance(state["step"], int) else state["step"].fill_(steps)
        for moment in MOMENTS:
            for name, parameter in self.head.named_parameters():
                value = checkpoint.moments[moment][name].to(self.accelerator.device)
                self._set_moment(parameter, moment, value)

    def _set_moment(self, parameter: Any, moment: str, value: Tensor) -> None:
        if not self.zero_stage:
            self.optimizer.state[parameter][moment].copy_(value)
        elif self.zero_stage < 3:
            from deepspeed.utils import safe_set_full_optimizer_state

            safe_set_full_optimizer_state(parameter, value, moment)
        else:
            from deepspeed.utils import safe_set_local_optimizer_state

            # DeepSpeed's setter for whole tensors runs over the end where the last part is padded.
            size = parameter.ds_tensor.numel()
            padded = value.new_zeros(size * self.accelerator.num_processes)
            padded[: value.numel()] = value.flatten()
            part = padded.narrow(0, size * self.accelerator.process_index, size)
            safe_set_local_optimizer_state(parameter, part, moment)

    def close(self, *, leave: bool) -> None:
        """Free the head, which cannot be used again; `leave` the group of processes, too."""
        self.accelerator.wait_for_everyone()
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        unset_hf_deepspeed_config()  # or transformers would go on to load models in parts (ZeRO-3)
        if leave:
            self.accelerator.end_training()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after some updates; every tensor is whole, float32, on the CPU.

    Parameters by name, Adam's moments, `moments["exp_avg"]` and `moments["exp_avg_sq"]`, by name,
    the losses of all steps done, float64, and what the untrained head was worth.
    """

    before: HeadMetrics
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    losses: list[float]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read what `write` wrote."""
        with safe_open(folder / STATE, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
            before = HeadMetrics(**json.loads(file.metadata()["before"]))
        losses = tensors.pop("losses").tolist()
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        return cls(before, groups.pop("weight"), groups, losses)

    def write(self, folder: Path) -> None:
        """Write it into a folder of checkpoints."""
        groups = {"weight": self.weights, **self.moments}
        tensors = {
            f"{group}.{name}": value
            for group, values in groups.items()
            for name, value in values.items()
        }
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        path = checkpoint_folder(folder, len(self.losses))
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / STATE, metadata={"before": json.dumps(asdict(self.before))})
        complete(path)
