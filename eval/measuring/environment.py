"""The environment of a measurement: hardware, package versions, commit.

Cores and memory come from psutil, which reads them on every system. The processor's name does not:
psutil has none, and py-cpuinfo takes about a second, in subprocesses, for the line of /proc/cpuinfo
that is read here.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field

from eval.measuring.records import Strict
from specdata.processes import local_process_count, local_rank, process_count, rank
from specdata.storage.files import PROGRESS, write_json
from specdata.storage.resume import read_record

_PACKAGES = ("torch", "transformers", "numpy", "accelerate", "huggingface_hub", "safetensors")


class Environment(Strict):
    """The machine, packages and commit of a measurement; a speed means nothing without them.

    Attributes:
        hardware: cpu, cores this process may use, threads of torch, memory_gib, gpu and cuda.
        git_commit: of this code; None for an installed copy.
        device: of the models, such as "cpu" or "cuda:0".
        dtype: of the target, and of the draft unless `draft_dtype` says another.
        devices: of each process that measured, once that is known.
    """

    hardware: dict[str, str | int | float | None]
    software: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None
    date: str
    device: str
    dtype: str
    draft_dtype: str | None = None
    batch_size: int = 1
    devices: list[str] = Field(default_factory=list)


def describe_environment(
    *, device: str, dtype: str, draft_dtype: str | None = None, batch_size: int = 1
) -> Environment:
    """Describe this machine, the packages and the commit this code comes from."""
    import psutil
    import torch  # here: whoever only reads results does not need it

    software = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            software[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    # Cores this process may use; all logical ones on systems without affinity (macOS).
    has_affinity = psutil.LINUX or psutil.WINDOWS
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    commit, dirty = _git_state(Path(__file__))
    return Environment(
        hardware={
            "cpu": _cpu_name(),
            "cores": len(psutil.Process().cpu_affinity()) if has_affinity else psutil.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
            "cuda": torch.version.cuda if on_gpu else None,
        },
        software=software,
        git_commit=commit,
        git_dirty=dirty,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        dtype=dtype,
        draft_dtype=None if draft_dtype == dtype else draft_dtype,
        batch_size=batch_size,
    )


def _cpu_name() -> str:
    """Marketing name on Linux, `platform.processor()` or the like elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git_state(source: Path) -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the checkout that tracks `source`; None for an installed copy."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source.parent), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An environment inside some other checkout must not lend that checkout's commit to this code.
    if git("ls-files", "--error-unmatch", source.name) is None:
        return None, None
    status = git("status", "--porcelain")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def who_measures(
    *, timed: bool, rank: int, local_rank: int, processes: int, local_processes: int, devices: int
) -> tuple[bool, str]:
    """Decide whether a process decodes prompts of an evaluation, and say in words which do.

    Counts and texts do not depend on who decodes: every process works. Times do: two processes on
    one device would spoil each other's clock, so prompts are timed by one process a device, and by
    those of the first machine (`local_processes` of them), because times of two machines must not
    end up in one table. Its GPUs are `devices`; 0 where the models are on the CPU.
    """
    if not timed:
        return True, f"prompts are shared out among {processes} processes"
    timing = min(local_processes, max(1, devices))
    joins = rank == local_rank < timing
    place = "each on a GPU of its own" if devices else "because they share the CPU"
    if timing == processes:
        return joins, f"times are measured by all {processes} processes, {place}"
    return joins, (
        f"times are measured by {timing} of {processes} processes, {place}: others would spoil "
        "their clocks and wait (with eval.batch above 1, counts alone, all of them work)"
    )


def joins_measuring(*, timed: bool, on_cpu: bool, say: Callable[[str], object]) -> bool:
    """True if this process decodes prompts; says who does, if there are several.

    `on_cpu`: the target lies there whatever GPUs there are.
    """
    import torch

    joins, message = who_measures(
        timed=timed,
        rank=rank(),
        local_rank=local_rank(),
        processes=process_count(),
        local_processes=local_process_count(),
        devices=0 if on_cpu else torch.cuda.device_count(),
    )
    if process_count() > 1:
        say(f"  {message}")
    return joins


def sign(folder: Path, device: str) -> None:
    """Note the device of this process before it stores anything in an evaluation's folder."""
    signature = folder / PROGRESS / f"rank-{rank():05d}.json"
    if not signature.exists():
        write_json(signature, {"device": device})


def measured_on(folder: Path) -> list[str]:
    """The device of each process that measured, by rank; empty once the evaluation is finished.

    Those of an interrupted evaluation's earlier launches are among them, one for each rank.
    """
    signed = sorted((folder / PROGRESS).glob("rank-*.json"))
    return [str(read_record(path, ("device",), "remove it")["device"]) for path in signed]
