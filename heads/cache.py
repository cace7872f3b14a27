"""What the draft says along the training rows, kept on the disk while a head trains.

With it a pass over the rows runs no forward of the draft. States are bfloat16: 2 bytes times the
hidden size for each position, and as much again for each of its drafted tokens if the head reads
the states after them. Numbers are float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.inputs import FEATURES
from heads.target_context import TargetBatch, TargetRow
from specdata.errors import ManifestError
from specdata.storage.files import atomic_write
from specdata.storage.resume import Settings
from specdata.terminal import progress

ROWS_IN_SHARD = 256
SETTINGS_NAME = "settings.json"


@dataclass(frozen=True, slots=True)
class FeatureCache:
    """A folder of shards with the features of `ROWS_IN_SHARD` rows each, made by `fill`.

    Attributes:
        folder: where they are.
        starts: of each row, its first position among those of its shard.
        sizes: positions of each row.
    """

    folder: Path
    starts: list[int]
    sizes: list[int]
    _open: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, sizes: list[int]) -> FeatureCache:
        """The cache in a folder, of rows with so many positions."""
        shards = [
            sizes[start : start + ROWS_IN_SHARD] for start in range(0, len(sizes), ROWS_IN_SHARD)
        ]
        starts = [start for shard in shards for start in accumulate(shard[:-1], initial=0)]
        return cls(folder, starts, sizes)

    def fill(
        self,
        accelerator: Accelerator,
        settings: Settings,
        features: Callable[[range], dict[str, Tensor]],
    ) -> None:
        """Make the shards that are not there; each process makes its share, and waits for all.

        Args:
            accelerator: the group of processes.
            settings: all that the features depend on. Those of other settings are removed.
            features: gives those of a range of rows for all their draws, (N, S) and (N, S or 1, H).
        """
        if accelerator.is_main_process and not _belongs(self.folder, settings):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            settings.write(self.folder / SETTINGS_NAME)
        accelerator.wait_for_everyone()
        count = len(self.sizes)
        shards = range(0, count, ROWS_IN_SHARD)
        mine = list(shards)[accelerator.process_index :: accelerator.num_processes]
        missing = [start for start in mine if not self._path(start // ROWS_IN_SHARD).is_file()]
        shown = accelerator.is_main_process
        with progress(len(missing), "draft's states", "shard", is_shown=shown) as bar:
            for start in missing:
                computed = features(range(start, min(start + ROWS_IN_SHARD, count)))
                kept = {
                    name: values.to("cpu", _kept_as(name)).contiguous()
                    for name, values in computed.items()
                }
                with atomic_write(self._path(start // ROWS_IN_SHARD)) as temporary:
                    save_file(kept, temporary)
                bar.update()
        accelerator.wait_for_everyone()

    def features(self, batch: TargetBatch) -> dict[str, Tensor]:
        """What `fill` was given of the tokens of a batch, float32."""
        rows = [self._of(row) for row in batch.rows]
        device = batch.input_ids.device
        return {
            name: torch.cat([row[name] for row in rows]).to(device, torch.float32)
            for name in rows[0]
        }

    def _of(self, row: TargetRow) -> dict[str, Tensor]:
        shard = row.index // ROWS_IN_SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._path(shard), framework="pt")
        file, begin = self._open[shard], self.starts[row.index]
        here = slice(begin, begin + self.sizes[row.index])
        found = {name: file.get_slice(name)[here] for name in file.keys()}  # noqa: SIM118, no dict
        return {
            name: values if values.shape[1] == 1 else values[:, list(row.draws)]
            for name, values in found.items()
        }

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"


def _kept_as(feature: str) -> torch.dtype:
    return torch.float32 if FEATURES[feature].shape == "number" else torch.bfloat16


def _belongs(folder: Path, settings: Settings) -> bool:
    """Whether what a folder holds was made with these settings."""
    try:
        return settings.check_file(folder / SETTINGS_NAME)
    except ManifestError:
        return False
