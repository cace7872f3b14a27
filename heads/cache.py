"""The draft's states along the training rows, kept on the disk while a head trains.

With them a pass over the rows runs no forward of the draft. They are bfloat16: 2 bytes times the
hidden size for each position, and as much again for each of its drafted tokens if the head is also
asked when the draft has consumed them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.target_context import TargetBatch, TargetRow
from specdata.errors import ManifestError
from specdata.storage.files import atomic_write
from specdata.storage.resume import Settings
from specdata.terminal import progress

ROWS_IN_SHARD = 256
SETTINGS_NAME = "settings.json"


@dataclass(frozen=True, slots=True)
class StateCache:
    """A folder of shards with the states of `ROWS_IN_SHARD` rows each, made by `fill`.

    Attributes:
        folder: where they are.
        sizes: positions of each row.
        dtype: what states are returned in, the draft's precision.
    """

    folder: Path
    sizes: list[int]
    dtype: torch.dtype
    _open: dict[int, Any] = field(default_factory=dict)

    def fill(
        self,
        accelerator: Accelerator,
        settings: Settings,
        states: Callable[[range], tuple[Tensor, Tensor | None]],
    ) -> None:
        """Make the shards that are not there; each process makes its share, and waits for all.

        Args:
            accelerator: the group of processes.
            settings: all that the states depend on. Those of other settings are removed.
            states: gives (N, H) and (N, S, H) of a range of rows, all their draws.
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
                before, after = states(range(start, min(start + ROWS_IN_SHARD, count)))
                tensors = (
                    {"before": before} if after is None else {"before": before, "after": after}
                )
                halved = {
                    name: value.to("cpu", torch.bfloat16).contiguous()
                    for name, value in tensors.items()
                }
                with atomic_write(self._path(start // ROWS_IN_SHARD)) as temporary:
                    save_file(halved, temporary)
                bar.update()
        accelerator.wait_for_everyone()

    def states(self, batch: TargetBatch) -> tuple[Tensor, Tensor | None]:
        """(N, H) states before the tokens of a batch were drawn, and (N, S, H) after them."""
        pairs = [self._of(row) for row in batch.rows]
        device = batch.input_ids.device
        before = torch.cat([before for before, _ in pairs]).to(device, self.dtype)
        if pairs[0][1] is None:
            return before, None
        return before, torch.cat([after for _, after in pairs if after is not None]).to(
            device, self.dtype
        )

    def _of(self, row: TargetRow) -> tuple[Tensor, Tensor | None]:
        shard = row.index // ROWS_IN_SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._path(shard), framework="pt")
        file = self._open[shard]
        begin = sum(self.sizes[shard * ROWS_IN_SHARD : row.index])
        here = slice(begin, begin + self.sizes[row.index])
        after = None
        if "after" in file.keys():  # noqa: SIM118, not a dict
            after = file.get_slice("after")[here][:, list(row.draws)]
        return file.get_slice("before")[here], after

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"


def _belongs(folder: Path, settings: Settings) -> bool:
    """Whether what a folder holds was made with these settings."""
    try:
        return settings.check_file(folder / SETTINGS_NAME)
    except ManifestError:
        return False
