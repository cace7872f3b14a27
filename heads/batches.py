"""Which rows make a batch, and which part of it a process computes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, cast

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from heads.mixing import COLUMNS, LabelRow
from specdata.errors import ConfigError
from specdata.sampling import numpy_generator_for


class Row(Protocol):
    """One row as it is trained on."""

    @property
    def input_ids(self) -> Tensor:
        """(T,) what the draft reads."""

    def blank(self) -> Self:
        """The same with no label that counts: fills up batches."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The usable rows of a labelled dataset.

    Attributes:
        dataset: the label columns.
        usable: positions of the rows with a completion token within the maximum length.
        sizes: labels that are kept of each usable row.
        longest: tokens of the longest usable row, prompt and what is kept of the completion.
        labels: positions with a label, in all rows.
        fingerprint: digest of the content of all rows.
    """

    dataset: datasets.Dataset
    usable: list[int]
    sizes: list[int]
    longest: int
    labels: int
    fingerprint: str

    @classmethod
    def read(
        cls,
        name: str,
        dataset: datasets.Dataset,
        max_length: int,
        *,
        required: Sequence[str] = COLUMNS,
        optional: Sequence[str] = (),
    ) -> LabelRows:
        """Check a dataset and find its usable rows.

        Args:
            name: what errors call it.
            dataset: label rows.
            max_length: tokens of prompt + completion that are kept of a row.
            required: columns that it must have.
            optional: columns that are read if it has them.

        Raises:
            ConfigError: if a column is missing or no row can be used.
        """
        missing = [column for column in required if column not in dataset.column_names]
        if missing:
            raise ConfigError(
                f"the {name} rows must have the columns {', '.join(required)}; "
                f"{', '.join(missing)} missing; label the rollouts first"
            )
        held = [column for column in optional if column in dataset.column_names]
        columns = dataset.select_columns([*required, *held])
        digest = hashlib.sha256()
        prompts: list[int] = []
        completions: list[int] = []
        for rows in columns.with_format("arrow").iter(batch_size=1024):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_table(rows.combine_chunks())
            digest.update(sink.getvalue())
            prompts += pc.list_value_length(rows["prompt_ids"]).to_pylist()
            completions += pc.list_value_length(rows["completion_ids"]).to_pylist()
        lengths = list(zip(prompts, completions, strict=True))
        usable = [i for i, (prompt, rest) in enumerate(lengths) if prompt < max_length and rest > 0]
        if not usable:
            raise ConfigError(
                f"none of the {len(prompts)} {name} rows has a completion token within max_length="
                f"{max_length} tokens; raise max_length or make rollouts with shorter prompts"
            )
        sizes = [min(lengths[i][1], max_length - lengths[i][0]) for i in usable]
        longest = max(lengths[i][0] + size for i, size in zip(usable, sizes, strict=True))
        return cls(columns, usable, sizes, longest, sum(completions), digest.hexdigest())

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, position: int) -> LabelRow:
        return cast(LabelRow, self.dataset[self.usable[position]])

    @property
    def skipped(self) -> int:
        """Rows left out because nothing in them can be learned."""
        return len(self.dataset) - len(self.usable)

    @property
    def cut(self) -> int:
        """Labels beyond the maximum length."""
        return self.labels - sum(self.sizes)

    def epoch(self, seed: int, epoch: int, batch_size: int) -> Iterator[list[int]]:
        """Yield the rows of the global batches of one epoch, shuffled; the last may be short."""
        order = numpy_generator_for("order", seed, epoch).permutation(len(self)).tolist()
        for start in range(0, len(self), batch_size):
            yield order[start : start + batch_size]


def micro_batches(
    rows: Sequence[R], *, size: int, count: int, process: int, processes: int
) -> Iterator[list[R]]:
    """Yield one process's part of a global batch, in `count` micro-batches.

    Where rows run out, rows without labels fill up: every process computes equally many
    micro-batches of equal size, as collective operations require, and the sum does not change.

    Args:
        rows: the whole batch, the same on every process.
        size: rows a micro-batch.
        count: micro-batches a process; size * count * processes must hold all rows.
        process: index of this process.
        processes: how many there are.
    """
    ordered = sorted(rows, key=lambda row: row.input_ids.numel())  # like lengths pad less
    ordered += [ordered[0].blank()] * (size * count * processes - len(ordered))
    for index in range(count):
        start = (index * processes + process) * size
        yield ordered[start : start + size]


def micro_batch_count(rows: int, *, size: int, processes: int) -> int:
    """The number of micro-batches that a process needs for so many rows."""
    return math.ceil(rows / (size * processes))
