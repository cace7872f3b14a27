"""Where figures were measured: hardware, package versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_PACKAGES = ("torch", "transformers", "numpy", "accelerate", "huggingface_hub", "safetensors")


class Strict(BaseModel):
    """No unknown field, no silent conversion, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Environment(Strict):
    """Where and with what the figures were measured; a speed means nothing without it."""

    hardware: dict[str, str | int | float | None]
    software: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None
    date: str
    device: str
    dtype: str
    batch_size: int = 1


def describe_environment(*, device: str, dtype: str, batch_size: int = 1) -> Environment:
    """Describe this machine, the packages and the commit this code comes from."""
    import torch  # here: whoever only reads results does not need it

    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    commit, dirty = _git_state(Path(__file__))
    return Environment(
        hardware={
            "cpu": _cpu_name(),
            "cores": _cores(),
            "threads": torch.get_num_threads(),
            "memory_gib": _memory_gib(),
            "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
            "cuda": torch.version.cuda if on_gpu else None,
        },
        software={"python": platform.python_version()} | _versions(),
        git_commit=commit,
        git_dirty=dirty,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        dtype=dtype,
        batch_size=batch_size,
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return found


def _cores() -> int | None:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _memory_gib() -> float | None:
    if sys.platform != "linux":
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _cpu_name() -> str:
    """Marketing name on Linux, what Python knows elsewhere."""
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
