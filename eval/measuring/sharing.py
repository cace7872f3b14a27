"""Sharing an evaluation out among the launcher's processes.

Counts and texts do not depend on who decodes: every process works. Times do: two processes on one
device would spoil each other's clock, so prompts are timed by one process a device, and by those of
one machine, because times of two machines must not end up in one table.
"""

from __future__ import annotations

from pathlib import Path

from specdata.processes import rank
from specdata.storage.files import PROGRESS, write_json
from specdata.storage.resume import read_record


def is_measuring(*, timed: bool, rank: int, local_rank: int, devices: int) -> bool:
    """True if a process decodes prompts of an evaluation, or waits for those that do.

    Args:
        timed: whether times are measured, not counts alone.
        rank: of the process, among all.
        local_rank: among those of its machine; it has the device of this number, if there is one.
        devices: GPUs of its machine; 0 where the models are on the CPU, which all share.
    """
    is_on_first_machine = rank == local_rank
    return not timed or (is_on_first_machine and local_rank < max(1, devices))


def who_measures(*, timed: bool, processes: int, local_processes: int, devices: int) -> str:
    """The message for an evaluation that several processes were started for.

    Those of the first machine are `local_processes`, its GPUs `devices`; 0 where the models are on
    the CPU.
    """
    if not timed:
        return f"prompts are shared out among {processes} processes"
    timing = min(local_processes, max(1, devices))
    own = "each on a GPU of its own" if devices else "because they share the CPU"
    if timing == processes:
        return f"times are measured by all {processes} processes, {own}"
    return (
        f"times are measured by {timing} of {processes} processes, {own}: others would spoil their "
        "clocks and wait (with eval.batch above 1, counts alone, all of them work)"
    )


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
