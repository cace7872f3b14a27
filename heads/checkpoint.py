"""Checkpoints of a head in training.

A checkpoint is one safetensors file with whole tensors, whatever the engine: it is written
atomically, holds no pickle, and a run may resume on another number of processes or another engine.
All randomness derives from (seed, epoch, example), and the learning rate from the step, so weights,
Adam's moments and the step are all there is to save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdata.errors import ManifestError
from specdata.storage.files import atomic_write
from specdata.storage.resume import Settings

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
    with atomic_write(folder / f"step-{checkpoint.step:08d}.safetensors") as temporary:
        save_file(tensors, temporary, metadata=metadata)
    for _, path in _steps(folder)[:-CHECKPOINTS_KEPT]:
        path.unlink()
    for path in folder.glob(".*.tmp"):  # what a killed run was writing
        path.unlink()


def latest_checkpoint(folder: Path, settings: Settings) -> Checkpoint | None:
    """Read the newest checkpoint, or None if there is none.

    Raises:
        ManifestError: if it was made with other settings, or not by this program.
    """
    steps = _steps(folder)
    if not steps:
        return None
    path = steps[-1][1]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    if "settings" not in metadata:
        raise ManifestError(f"{path} is of an older version: {settings.remedy}")
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
