"""The memory that a piece of work takes at most, as Linux counts it; for the memory benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def peak(work: Callable[[], object]) -> dict[str, float]:
    """Do the work: MiB beyond what was there before at its peak, what was there, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    base, begun = resident("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    return {"peak_mib": resident("VmHWM") - base, "base_mib": base, "seconds": seconds}


def resident(name: str) -> float:
    """A figure of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
