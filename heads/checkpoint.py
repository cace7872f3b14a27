"""Checkpoints of a head in training.

A checkpoint is one safetensors file with whole tensors, whatever the engine: it is written
atomically, holds no pickle, and a run may resume on another number of processes or another engine.
All randomness derives from (seed, epoch, example), and the learning rate from the step, so weights,
Adam's moments and the step are all there is to save.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdata.errors import ManifestError
from specdata.storage.files import atomic_write

CHECKPOINTS_KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` updates; every tensor is whole, float32, on the CPU.

    Attributes:
        step: updates done.
        run: digest of configuration, seed, data and draft.
        notes: JSON values to carry along.
        weights: head parameters by name.
        moments: Adam's moments, `moments["exp_avg"]` and `moments["exp_avg_sq"]` by name.
        losses: (step,) training losses, float64.
    """

    step: int
    run: str
    notes: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    losses: Tensor


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"step-(\d+)\.safetensors", p.name), p) for p in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically and drop all but the last two; main process only."""
    tensors = {f"weight.{name}": value for name, value in checkpoint.weights.items()}
    for moment, values in checkpoint.moments.items():
        tensors |= {f"{moment}.{name}": value for name, value in values.items()}
    tensors["losses"] = checkpoint.losses
    metadata = {
        "step": str(checkpoint.step),
        "run": checkpoint.run,
        "notes": json.dumps(checkpoint.notes),
    }
    with atomic_write(folder / f"step-{checkpoint.step:08d}.safetensors") as temporary:
        save_file(tensors, temporary, metadata=metadata)
    for _, path in _steps(folder)[:-CHECKPOINTS_KEPT]:
        path.unlink()
    for path in folder.glob(".*.tmp"):  # what a killed run was writing
        path.unlink()


def latest_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    """Read the newest checkpoint, or None if there is none.

    Raises:
        ManifestError: if it belongs to a run with another configuration, seed, data or draft.
    """
    found = _steps(folder)
    if not found:
        return None
    path = found[-1][1]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    if metadata["run"] != run:
        raise ManifestError(
            f"{path} belongs to a run with another configuration, seed, data or draft; "
            f"delete {folder.parent} or choose another output folder"
        )

    def group(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return Checkpoint(
        step=int(metadata["step"]),
        run=run,
        notes=json.loads(metadata["notes"]),
        weights=group("weight."),
        moments={moment: group(f"{moment}.") for moment in MOMENTS},
        losses=tensors["losses"],
    )
