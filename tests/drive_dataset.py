"""Fill a dataset of 12 shards, as one of any number of processes; print which ones were made here.

Arguments: the folder, and the seconds that a shard takes.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path

from specdata.storage.dataset import fill_dataset
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Rollout

SHARDS = 12


def rows(index: int, seconds: float) -> list[Rollout]:
    """Rows whose shard takes some milliseconds to write."""
    sys.stdout.write(f"{index}\n")
    time.sleep(seconds)
    rng = random.Random(index)
    return [
        Rollout(
            example_id=f"id{index}-{number}",
            dataset="d",
            split="train",
            sample=0,
            turn=0,
            prompt_ids=[index],
            completion_ids=[rng.randrange(1 << 30) for _ in range(2000)],
            finish="length",
        )
        for number in range(20)
    ]


def fill(folder: Path, seconds: float = 0.0) -> int:
    """The dataset, in this process."""
    shards = [partial(rows, index, seconds) for index in range(SHARDS)]
    return fill_dataset(folder, ROLLOUTS, Settings({"seed": 0}), shards, lambda rows: None)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), float(sys.argv[2]))
