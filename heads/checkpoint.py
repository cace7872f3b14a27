"""Checkpoints of a head in training.

A checkpoint is one safetensors file with whole tensors, whatever the engine: it is written
atomically, holds no pickle, and a run may resume on another number of processes or another engine.
All randomness derives from (seed, epoch, example), and the learning rate from the step, so weights,
Adam's moments and the step are all there is to save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdata.errors import ManifestError
from specdata.storage.files import atomic_write, sync_folder
from specdata.storage.resume import Settings

logger = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` updates; every tensor is whole, float32, on the CPU.

    Attributes:
        step: updates done.
        settings: all that the weights depend on, as stored (`specdata.storage.resume`).
        notes: JSON values to carry along.
        weights: head parameters by name.
        moments: Adam's moments, `moments["exp_avg"]` and `moments["exp_avg_sq"]` by name.
        losses: (step,) training losses, float64.
    """

    step: int
    settings: Mapping[str, Any]
    notes: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    losses: Tensor


def _steps(folder: Path) -> list[tuple[int, Path]]:
    names = ((re.fullmatch(r"step-(\d+)\.safetensors", p.name), p) for p in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in names if match)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically and drop all but the last two; main process only."""
    tensors = {f"weight.{name}": value for name, value in checkpoint.weights.items()}
    for moment, values in checkpoint.moments.items():
        tensors |= {f"{moment}.{name}": value for name, value in values.items()}
    tensors["losses"] = checkpoint.losses
    metadata = {
        "step": str(checkpoint.step),
        "settings": json.dumps(checkpoint.settings),
        "notes": json.dumps(checkpoint.notes),
    }
    metadata["digest"] = _digest(tensors, metadata)
    with atomic_write(folder / f"step-{checkpoint.step:08d}.safetensors") as temporary:
        save_file(tensors, temporary, metadata=metadata)
    sync_folder(folder)  # the new name is on the disk before an older one goes
    for _, path in _steps(folder)[:-CHECKPOINTS_KEPT]:
        path.unlink()
    for path in folder.glob(".*.tmp"):  # what a killed run was writing
        path.unlink()


def newest_file(folder: Path) -> Path | None:
    """The file of the newest checkpoint, if there is one."""
    steps = _steps(folder)
    return steps[-1][1] if steps else None


def latest_checkpoint(folder: Path, settings: Settings) -> Checkpoint | None:
    """Read the newest whole checkpoint, or None if there is none at all.

    Raises:
        ManifestError: if it was made with other settings, or not by this program; or if no
            checkpoint is whole, naming the newest.
    """
    damaged: list[Path] = []
    for _, path in reversed(_steps(folder)):
        try:
            checkpoint = _read(path, settings)
        except ManifestError:
            raise
        except (SafetensorError, KeyError, ValueError):
            damaged.append(path)
            continue
        for other in damaged:
            logger.warning("%s is damaged: going on from %s instead", other, path)
        return checkpoint
    if damaged:
        raise ManifestError(
            f"{damaged[0]} is damaged, and no older checkpoint is whole: remove {folder} to train "
            "from the start"
        )
    return None


def _read(path: Path, settings: Settings) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    if "settings" not in metadata:
        raise ManifestError(f"{path} is of an older version: {settings.remedy}")
    # Earlier versions wrote no digest.
    if "digest" in metadata and metadata["digest"] != _digest(tensors, metadata):
        raise SafetensorError("its content is not what was written")
    stored = json.loads(metadata["settings"])
    settings.check(stored, path)

    def group(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return Checkpoint(
        step=int(metadata["step"]),
        settings=stored,
        notes=json.loads(metadata["notes"]),
        weights=group("weight."),
        moments={moment: group(f"{moment}.") for moment in MOMENTS},
        losses=tensors["losses"],
    )


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Hex digest of all that a checkpoint holds; safetensors has no checksum."""
    digest = hashlib.sha256()
    for name in ("step", "settings", "notes"):
        digest.update(f"{name}={metadata[name]};".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
