"""The launcher's processes: which one this is, and how they join into a group."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specdata.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

logger = logging.getLogger(__name__)

# How long processes wait for another in a collective before they count it as lost, where neither
# the launcher of its node nor a broken connection tells. What may take longer is waited for
# elsewhere: a stage by `recipes.run.wait_for`, the main process of a group by `broadcast_by_main`.
TIMEOUT = timedelta(minutes=15)
# DeepSpeed's settings that the recipe decides, and by what: others would replace that, or fail.
# transformers and accelerate fill in `auto` for the first of them.
AUTO, MISSING = "auto", "1 (accelerate's, as it is missing)"
BATCH_KEYS = "batch_size and accumulation of draft, batch_size and micro_batch_size of head"
AUTOMATIC = {
    "train_batch_size": BATCH_KEYS,
    "train_micro_batch_size_per_gpu": BATCH_KEYS,
    "gradient_accumulation_steps": BATCH_KEYS,
    "gradient_clipping": "1.0",
    "bf16.enabled": "draft.precision",
    "fp16.enabled": "draft.precision",
}
DECIDED_BY = {
    **AUTOMATIC,
    "optimizer": "draft.optimizer and learning_rate",
    "scheduler": "learning_rate and warmup_ratio",
    "torch_autocast.enabled": "draft.precision",
    "amp.enabled": "draft.precision",
}
TRUE = ("y", "yes", "t", "true", "on", "1")  # as accelerate reads its flags
# Share of its time in which a working thread has a core: .97 or more alone, .7 or less beside other
# programs, or while it waits for another thread that is beside them.
IDLE = 0.9
# Seconds between two looks for the main process, and the numbers of the waits for it.
LOOK_PAUSE = 0.2
_waits = count()


def process_count() -> int:
    """The number of processes that the launcher started on all nodes; needs no group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process on its machine, from 0: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_process_count() -> int:
    """The number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or process_count())


def is_launched() -> bool:
    """True under `accelerate launch`, in one process, too."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def is_main() -> bool:
    """True if this is the process that writes run.json and prints."""
    return rank() == 0


def check_launcher() -> None:
    """Refuse settings of `accelerate launch` that contradict the recipe: one that it decides.

    accelerate hands them to its processes in the environment, which names DeepSpeed's file.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in TRUE:
        raise ConfigError(
            "nothing is trained under FSDP here: launch with launch/multi_gpu.yaml, or with "
            "launch/zero3.yaml where weights do not fit"
        )
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").upper()) not in ("", "NO"):
        raise ConfigError(
            f"the launcher's dynamo_backend {backend} would train a compiled copy, whose weights "
            "have other names: set it to NO, or leave it out"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("", "no"):
        raise ConfigError(
            f"the launcher's mixed_precision (ACCELERATE_MIXED_PRECISION) is {precision}, and the "
            "recipe decides the precision of a training (draft.precision): set it to 'no'"
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in TRUE:
        return
    name = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    settings: dict[str, Any] = {
        key: os.environ.get(f"ACCELERATE_{key.upper()}", AUTO)
        for key in ("gradient_accumulation_steps", "gradient_clipping")
    }
    if Path(name).is_file():
        try:
            settings = {
                "gradient_accumulation_steps": MISSING,
                **json.loads(Path(name).read_text(encoding="utf-8")),
            }
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name} must hold a JSON object: {error}") from error
    wrong = []
    for key, value in _leaves(settings):
        section = key.partition(".")[0]
        if value is None or value is False or (key in AUTOMATIC and value == AUTO):
            continue
        if key in DECIDED_BY or section in DECIDED_BY:
            remedy = "write auto" if key in AUTOMATIC else f"remove {section}"
            decided = DECIDED_BY.get(key) or DECIDED_BY[section]
            wrong.append(f"{key}: {value}, which the recipe decides ({decided}): {remedy}")
    if wrong:
        raise ConfigError(f"the launcher's DeepSpeed settings ({name}) say {'; and '.join(wrong)}")


def is_one_of_several() -> bool:
    """True if accelerate was asked for several processes on a CPU and started this one alone.

    It has told this one where the others would be found, and not how many they are.
    """
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE and "MASTER_ADDR" in os.environ
    mpi = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
    return is_launched() and asked and not any(each in os.environ for each in ("WORLD_SIZE", *mpi))


def zero_settings() -> dict[str, Any] | None:
    """What DeepSpeed divides among the processes: its `zero_optimization`, `stage` always in it.

    None without DeepSpeed. accelerate tells its processes in the environment.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in TRUE:
        return None
    file = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    zero = json.loads(file.read_text()).get("zero_optimization", {}) if file.is_file() else {}
    stage = int(zero.get("stage", os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)))
    return {**zero, "stage": stage}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is no section, by its path: "zero_optimization.stage"."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def join_processes() -> PartialState:
    """Join the processes of this run, once or again, before models are loaded for the right device.

    On the CPU, accelerate must be told two things, or each process trains alone: the backend, and
    `cpu` exactly without DeepSpeed (with it, DeepSpeed turns into plain DDP). Raises RuntimeError
    if it silently leaves out DeepSpeed, or processes, that the launcher asked for.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType, get_int_from_env, parse_flag_from_env

    wants_deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    launched = get_int_from_env(["LOCAL_RANK"], -1) >= 0
    if not in_group():  # once: a training asks at every step
        check_launcher()
        if wants_deepspeed and local_rank() == 0:
            remove_left_locks()
    if launched and not torch.cuda.is_available():
        state = PartialState(cpu=not wants_deepspeed, backend="gloo", timeout=TIMEOUT)
    else:
        state = PartialState(timeout=TIMEOUT)
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


def remove_left_locks() -> None:
    """Remove the locks of builds of `torch.utils.cpp_extension` whose processes are gone.

    They are files alone: who finds one waits until it is removed, without a word, and SIGKILL
    leaves it there. A process that builds, such as DeepSpeed's operators, keeps its lock open. One
    on another machine, of a folder that both share, is not seen.
    """
    import psutil
    from torch.utils.cpp_extension import get_default_build_root

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    root, place = (named, "*/lock") if named else (get_default_build_root(), "*/*/lock")
    for lock in Path(root).glob(place):
        opened = (each.info["open_files"] or () for each in psutil.process_iter(["open_files"]))
        if str(lock.resolve()) not in {file.path for files in opened for file in files}:
            age = f"{time.time() - lock.stat().st_mtime:.0f} s old"
            lock.unlink(missing_ok=True)
            logger.warning("%s, %s, is of a build whose process is gone: removed", lock, age)


def begin_training() -> PartialState:
    """Join the processes, without what an earlier training in this process left in accelerate.

    That is its DeepSpeed plugin, beside which no second one is taken, its precision, and a
    dataloader that it did not read to the end.
    """
    from accelerate.state import AcceleratorState, GradientState

    state = join_processes()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return state


def largest_of_all(value: int) -> int:
    """The largest of the processes' values; every process of a training must call this."""
    import torch

    state = join_processes()
    if state.num_processes == 1:
        return value
    values = torch.tensor([value], device=state.device)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return int(values.item())


def keep_freed_memory() -> None:
    """Let glibc keep what large tensors leave for the next ones.

    By default it goes back to the system, and to get a page again takes longer than a simple
    operation on it: a third of a draft's training on a CPU.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        libc = ctypes.CDLL(None)
        # Versions before 2.35 take at most 32 MiB, to which the threshold also grows by itself, but
        # no longer once another is set.
        if libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_threshold, 1 << 25):
            libc.mallopt(trim_threshold, (1 << 31) - 1)


def in_group() -> bool:
    """True if this process has joined others, or formed a group by itself."""
    torch = sys.modules.get("torch")  # what has not been imported has formed no group
    return (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    )


def broadcast_by_main(value: T) -> T:
    """The main process's value, in every process of the group, however long it takes.

    Every process must call this. The others do not wait in a collective, which would end after
    `TIMEOUT`, but look into the store by which the processes found each other.
    """
    state = join_processes()
    if state.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list
    from torch.distributed.distributed_c10d import _get_default_store  # there is no public one

    store, place = _get_default_store(), f"draftsmith/main/{next(_waits)}"
    if state.is_main_process:
        store.set(place, "here")
    while not store.check([place]):
        time.sleep(LOOK_PAUSE)
    received: T = broadcast_object_list([value])[0]
    return received


def leave_processes() -> None:
    """Leave the group, if this process is in one; nothing may be sent after it.

    A process that ends without it ends with its threads running, which now and then aborts it
    (SIGABRT) after its work is done, or turns a recipe's own exit status into -6.
    """
    if in_group():
        sys.modules["torch"].distributed.destroy_process_group()
