"""Checkpoints of the Trainer: whole on the disk before they count, checked before they are used.

The Trainer writes a folder of files, each process its own; one that was killed meanwhile leaves a
torn folder. So the main process ends a checkpoint with `complete.json`, which lists every file.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from specdata.errors import ManifestError
from specdata.storage.files import sha256, sync_folder, write_json
from specdata.storage.resume import read_record

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"
KEPT = 2


def checkpoint_folder(work: Path, step: int) -> Path:
    """Where the Trainer writes the checkpoint after `step` optimizer steps."""
    return work / f"checkpoint-{step}"


def is_finite(checkpoint: Path) -> bool:
    """Whether all weights in a checkpoint are finite."""
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                if not torch.isfinite(file.get_tensor(name)).all():
                    return False
    return True


def complete(checkpoint: Path, *, engine: str) -> None:
    """Make a checkpoint count, and drop all but the newest two; main process only.

    A power failure can leave the directory entry of a file without its content, so every file is
    on the disk before `complete.json` is, and that before an older checkpoint goes.

    Args:
        checkpoint: what all processes have written.
        engine: what can read it, as `newest_checkpoint` will be told.
    """
    sync_folder(checkpoint)
    files = {
        str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != COMPLETE
    }
    write_json(checkpoint / COMPLETE, {"step": _step(checkpoint), "engine": engine, "files": files})
    sync_folder(checkpoint)
    for older in _by_step(checkpoint.parent)[:-KEPT]:
        shutil.rmtree(older)


def newest_complete(work: Path) -> Path | None:
    """The newest checkpoint that was written to its end; its files are not looked at."""
    whole = [path for path in _by_step(work) if (path / COMPLETE).is_file()]
    return whole[-1] if whole else None


def complete_steps(work: Path) -> list[int]:
    """Steps of the checkpoints that were written to their end, in order."""
    return [_step(path) for path in _by_step(work) if (path / COMPLETE).is_file()]


def newest_checkpoint(work: Path, *, engine: str) -> Path | None:
    """Find the checkpoint to go on from, and remove torn and damaged ones; main process only.

    Args:
        work: folder of the checkpoints.
        engine: what will read it.

    Returns:
        The newest whose files are as they were written; None if there is no complete one.

    Raises:
        ManifestError: naming a damaged file, if no other checkpoint is whole; or if the newest was
            written by another engine. Nothing complete is removed then.
    """
    for checkpoint in _by_step(work):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(_by_step(work)):
        damage = _damage(checkpoint)
        if damage is None:
            _check_engine(checkpoint, engine, work)
            for other, reason in damaged.items():
                logger.warning("%s: going on from %s instead", reason, checkpoint)
                shutil.rmtree(other)
            return checkpoint
        damaged[checkpoint] = damage
    if damaged:
        raise ManifestError(
            f"{next(iter(damaged.values()))}, and no older checkpoint is whole: remove {work} to "
            "train from the start"
        )
    return None


def _by_step(work: Path) -> list[Path]:
    return sorted(work.glob("checkpoint-*"), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None if nothing is."""
    try:
        record = read_record(checkpoint / COMPLETE, ("step",), f"remove {checkpoint}")
        # Earlier versions listed no files.
        for name, written in record.get("files", {}).items():
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


def _check_engine(checkpoint: Path, engine: str, work: Path) -> None:
    written = read_record(checkpoint / COMPLETE, (), "").get("engine", engine)
    if written != engine:
        raise ManifestError(
            f"{checkpoint} was written under {written} and cannot be read under {engine}: launch "
            f"the training as before, or remove {work} to train from the start"
        )
