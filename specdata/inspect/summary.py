"""What a stored dataset holds, in numbers: read a part of one shard at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdata.errors import ManifestError
from specdata.storage.manifest import read_manifest, verify

if TYPE_CHECKING:  # help is shown without it
    import pyarrow as pa
    import pyarrow.parquet as pq

BINS = 20
ROWS_AT_ONCE = 256
# Columns of labels that are summed up; the first is the acceptance that groups are shown with.
ACCEPTANCE = {"overlap": "sum of min(p, q)", "accept_prob": "min(1, p/q)"}

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Group:
    """Rows of one set and split; lengths in tokens, overlap summed over all positions."""

    rows: int = 0
    prompts: Counter[int] = field(default_factory=Counter)
    completions: Counter[int] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    overlap: float = 0.0

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(length * count for length, count in self.completions.items())


@dataclass(slots=True)
class Spread:
    """A number in [0, 1] at every position of every row.

    Attributes:
        histogram: (BINS,) how many values fall into each of equal bins.
        sums: (longest,) sum over rows by position in the completion.
        counts: (longest,) rows that reach the position.
    """

    histogram: Floats = field(default_factory=lambda: np.zeros(BINS))
    sums: Floats = field(default_factory=lambda: np.zeros(0))
    counts: Floats = field(default_factory=lambda: np.zeros(0))

    def add(self, values: Floats, positions: NDArray[np.int64]) -> None:
        """Count values (n,) at positions (n,) of completions."""
        self.histogram += np.histogram(values, bins=BINS, range=(0.0, 1.0))[0]
        missing = int(positions.max(initial=-1)) + 1 - len(self.sums)
        if missing > 0:
            self.sums, self.counts = (np.pad(a, (0, missing)) for a in (self.sums, self.counts))
        self.sums += np.bincount(positions, values, len(self.sums))
        self.counts += np.bincount(positions, minlength=len(self.counts))

    @property
    def mean(self) -> float:
        """Over all positions of all rows."""
        return float(self.sums.sum() / max(1.0, self.counts.sum()))


@dataclass(slots=True)
class Summary:
    """A stored dataset in numbers.

    Attributes:
        folder: where it is.
        manifest: its manifest.
        groups: "set/split" -> its rows.
        acceptance: for labels, column of `ACCEPTANCE` -> its values.
        samples: some whole rows, spread evenly over the dataset.
    """

    folder: Path
    manifest: Mapping[str, Any]
    groups: dict[str, Group] = field(default_factory=dict)
    acceptance: dict[str, Spread] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return sum(group.rows for group in self.groups.values())


def summarise(folder: Path, samples: int = 0) -> Summary:
    """Read a dataset, finished or not, and add it up.

    Args:
        folder: a dataset of rollouts or labels.
        samples: how many whole rows to keep.

    Raises:
        ManifestError: if there is no dataset, or a shard is damaged or not of this program.
    """
    summary = Summary(folder, read_manifest(folder))
    paths = _shards(folder, summary.manifest)
    starts = np.cumsum([0, *(_open(path).metadata.num_rows for path in paths)]).tolist()
    wanted = {int((index + 0.5) * starts[-1] / samples) for index in range(samples)}
    for path, start in zip(paths, starts[:-1], strict=True):
        for batch in _batches(path):
            _add(summary, batch, wanted, start)
            start += batch.num_rows
    return summary


def quantiles(lengths: Counter[int], points: list[float]) -> list[int]:
    """Quantiles of counted whole numbers; zeros if there are none."""
    if not lengths:
        return [0] * len(points)
    values = np.array(sorted(lengths))
    weights = np.array([lengths[value] for value in values.tolist()])
    quantile_values = np.quantile(values, points, weights=weights, method="inverted_cdf")
    return [int(value) for value in quantile_values]


def _shards(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    if not manifest["finished"]:
        return sorted(folder.glob("shard-*.parquet"))
    for record in manifest["shards"]:
        verify(folder, record)
    return [folder / record["file"] for record in manifest["shards"]]


def _open(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from specdata.storage.schema import ROLLOUTS

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ManifestError(f"shard {path} is not readable parquet ({error})") from error
    if missing := {*ROLLOUTS.names} - {*file.schema_arrow.names}:
        raise ManifestError(
            f"shard {path} has no column {sorted(missing)[0]!r}: it holds neither rollouts nor "
            "labels of this program"
        )
    return file


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    from specdata.storage.schema import ROLLOUTS

    file = _open(path)
    there = [name for name in ACCEPTANCE if name in file.schema_arrow.names]
    yield from file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[*ROLLOUTS.names, *there])


def _add(summary: Summary, batch: pa.RecordBatch, wanted: set[int], start: int) -> None:
    """Count a batch whose first row has the number `start`."""
    import pyarrow.compute as pc

    prompts, lengths = (
        pc.list_value_length(batch[name]).to_numpy() for name in ("prompt_ids", "completion_ids")
    )
    positions = np.concatenate([np.arange(length) for length in [*lengths, 0]])
    for name in ACCEPTANCE:
        if name in batch.schema.names:
            values = batch[name].flatten().to_numpy().astype(np.float64)
            summary.acceptance.setdefault(name, Spread()).add(values, positions)
    sums = [0.0] * batch.num_rows
    if "overlap" in batch.schema.names:
        sums = [sum(values) for values in batch["overlap"].to_pylist()]
    names = zip(batch["dataset"].to_pylist(), batch["split"].to_pylist(), strict=True)
    for row, (name, split) in enumerate(names):
        group = summary.groups.setdefault(f"{name}/{split}", Group())
        group.rows += 1
        group.prompts[int(prompts[row])] += 1
        group.completions[int(lengths[row])] += 1
        group.finish[batch["finish"][row].as_py()] += 1
        group.turns[batch["turn"][row].as_py()] += 1
        group.overlap += sums[row]
        if start + row in wanted:
            summary.samples.append(batch.slice(row, 1).to_pylist()[0])
