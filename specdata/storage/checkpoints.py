"""Checkpoints of a training: whole on the disk before they count, checked before they are used.

A checkpoint is a folder of files, `checkpoint-STEP`, which several processes may write; one that
was killed meanwhile leaves a torn folder. So the main process ends a checkpoint with
`complete.json`, which lists every file and its digest. Trainings of drafts and of heads go on by
these rules alike.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from specdata.errors import ManifestError
from specdata.processes import join_processes
from specdata.storage.files import sha256, sync_folder, write_json
from specdata.storage.resume import read_record

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"
CHECKPOINTS_KEPT = 2


def checkpoint_folder(work: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return work / f"checkpoint-{step}"


def checkpoint_to_resume(work: Path, *, engine: str = "") -> Path | None:
    """The checkpoint that a training goes on from; None to begin it. All processes together.

    `work` is the folder of its checkpoints alone; `engine` is what will read them (`complete`).
    """
    state = join_processes()
    with state.main_process_first():
        if state.is_main_process:
            newest_checkpoint(work, engine=engine)  # removes those that cannot be used
    return newest_complete(work)


def complete(checkpoint: Path, *, engine: str = "") -> None:
    """Make a checkpoint count, and drop all but the newest two; main process only.

    A power failure can leave the directory entry of a file without its content, so every file is on
    the disk before `complete.json` is, and that before an older checkpoint goes. `engine` is what
    alone can read it, if not every engine can.
    """
    sync_folder(checkpoint)
    files = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != COMPLETE
    }
    record = {"step": step_of(checkpoint), "engine": engine, "files": files}
    write_json(checkpoint / COMPLETE, record)
    sync_folder(checkpoint)
    for older in _by_step(checkpoint.parent)[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(older)


def complete_steps(work: Path) -> list[int]:
    """Steps of the checkpoints that were written to their end, in order."""
    return [step_of(path) for path in _by_step(work) if (path / COMPLETE).is_file()]


def newest_complete(work: Path) -> Path | None:
    """The newest checkpoint that was written to its end; its files are not looked at."""
    steps = complete_steps(work)
    return checkpoint_folder(work, steps[-1]) if steps else None


def newest_checkpoint(work: Path, *, engine: str = "") -> Path | None:
    """Find the checkpoint to go on from, and remove torn and damaged ones; main process only.

    That is the newest whose files are as they were written; None if there is no complete one.
    """
    for checkpoint in _by_step(work):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(_by_step(work)):
        if (damage := _damage(checkpoint)) is not None:
            damaged[checkpoint] = damage
            continue
        written = read_record(checkpoint / COMPLETE, (), "")["engine"]
        if written != engine:
            raise ManifestError(
                f"{checkpoint} was written under {written} and cannot be read under {engine}: "
                f"launch the training as before, or remove {work} to train from the start"
            )
        for folder, reason in damaged.items():
            logger.warning("%s: going on from %s instead", reason, checkpoint)
            shutil.rmtree(folder)
        return checkpoint
    if damaged:
        raise ManifestError(
            f"{next(iter(damaged.values()))}, and no older checkpoint is whole: remove {work} to "
            "train from the start"
        )
    return None


def step_of(checkpoint: Path) -> int:
    """Optimizer steps before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def _by_step(work: Path) -> list[Path]:
    return sorted(work.glob("checkpoint-*"), key=step_of)


def _damage(checkpoint: Path) -> str | None:
    """The fault of a checkpoint's files, in words; None if there is none."""
    try:
        record = read_record(checkpoint / COMPLETE, ("step", "engine"), f"remove {checkpoint}")
        for name, written in record["files"].items():
            path = checkpoint / name
            if not path.is_file():
                return f"{path} is missing"
            if (size := path.stat().st_size) != written["bytes"]:
                return f"{path} is damaged ({size} bytes of {written['bytes']})"
            if sha256(path) != written["sha256"]:
                return f"{path} is damaged (its content is not what was written)"
    except (ManifestError, AttributeError, KeyError, TypeError):
        return f"{checkpoint / COMPLETE} is damaged"
    return None
