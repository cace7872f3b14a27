"""The launcher's processes: which one this is, and how they join into a group."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

logger = logging.getLogger(__name__)


def process_count() -> int:
    """How many processes the launcher started, on all nodes; no group is needed to know."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this is the process that writes run.json and prints."""
    return rank() == 0


def join_processes() -> PartialState:
    """Join the processes of this run; call it before models are loaded, to have the right device.

    Every training calls this first, heads and drafts alike. It may be called again.

    On the CPU, accelerate must be told two things, or each process trains alone: the backend, and
    `cpu` exactly without DeepSpeed (with it, DeepSpeed turns into plain DDP).

    Raises:
        RuntimeError: if the launcher asked for DeepSpeed or for several processes and accelerate
            silently left that out.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType, get_int_from_env, parse_flag_from_env

    wants_deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    launched = get_int_from_env(["LOCAL_RANK"], -1) >= 0
    if on_cpu and not launched and get_int_from_env(["MASTER_PORT"], 0):
        _warn_of_one_process()
    if launched and not torch.cuda.is_available():
        state = PartialState(cpu=not wants_deepspeed, backend="gloo")
    else:
        state = PartialState()
    # Accelerate would drop DeepSpeed later, when it reads ACCELERATE_USE_CPU.
    if wants_deepspeed and (on_cpu or state.distributed_type != DistributedType.DEEPSPEED):
        raise RuntimeError(
            "the launcher asked for DeepSpeed but accelerate runs without it; without a GPU, unset "
            "ACCELERATE_USE_CPU, do not pass --cpu, and set DS_ACCELERATOR=cpu"
        )
    if state.num_processes != process_count():
        raise RuntimeError(
            f"the launcher started {process_count()} processes but they formed a group of "
            f"{state.num_processes}; check MASTER_ADDR and MASTER_PORT"
        )
    return state


def told_by_main(value: T) -> T:
    """What the main process passes, in every process of the group; all call this together."""
    from accelerate.utils import broadcast_object_list

    told: T = broadcast_object_list([value])[0]
    return told


def leave_processes() -> None:
    """Leave the group, if this process is in one; nothing may be sent after it.

    A process that ends without it ends with its threads running, which now and then aborts it
    (SIGABRT) after its work is done, or turns a recipe's own exit status into -6.
    """
    torch = sys.modules.get("torch")  # what has not been imported has formed no group
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        torch.distributed.destroy_process_group()


@cache
def _warn_of_one_process() -> None:
    logger.warning(
        "accelerate was asked for several CPU processes and started one, as it does without "
        "mpirun; the result is the same, and launch/cpu-2.yaml starts two"
    )
