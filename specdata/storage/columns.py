"""Columns of datasets as Arrow and numpy arrays: what is asked of all rows makes no Python objects.

`datasets` hands over rows that are chosen (`Dataset.select`) one by one, in some 50 microseconds
each. Here they are taken some thousands at once, so this is the one file that reads its indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

ROWS_A_PART = 4096
"""Stored rows of one part."""


def arrow_parts(
    dataset: Dataset, *columns: str, at_once: int = ROWS_A_PART
) -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
    """Some rows' places in a dataset, and their columns, in the order in which they are stored."""
    table, indices = dataset.data.table.select(columns), dataset._indices
    rows = np.arange(len(dataset)) if indices is None else indices.column(0).to_numpy()
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(at_once, table.num_rows, at_once))
    for places in np.split(order, bounds):
        if len(places):
            taken = rows[places].astype(np.int64)
            nearby = table.slice(taken[0], taken[-1] - taken[0] + 1)
            yield places, nearby.take(pa.array(taken - taken[0]))


def arrow_table(dataset: Dataset, *columns: str) -> pa.Table:
    """Short columns of all rows, in the dataset's order."""
    places, parts = zip(*arrow_parts(dataset, *columns), strict=True)
    return pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(places))))


def list_lengths(dataset: Dataset, *columns: str) -> NDArray[np.int64]:
    """(columns, rows) the number of values in each list."""
    lengths = np.empty((len(columns), len(dataset)), dtype=np.int64)
    for places, table in arrow_parts(dataset, *columns):
        for of_column, column in zip(lengths, table.columns, strict=True):
            of_column[places] = pc.list_value_length(column)
    return lengths


def value_counts(dataset: Dataset, *columns: str) -> Counter[int]:
    """The number of times that each value is in the lists of some columns."""
    counts: Counter[int] = Counter()
    for _, table in arrow_parts(dataset, *columns):
        for column in table.columns:
            values, counted = pc.value_counts(pc.list_flatten(column)).flatten()
            counts.update(dict(zip(values.to_pylist(), counted.to_pylist(), strict=True)))
    return counts


def cut_lists(lists: pa.ChunkedArray, most: NDArray[np.int64]) -> pa.ListArray:
    """Lists, each cut to so many values."""
    lengths = np.asarray(pc.list_value_length(lists))
    places = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    kept = pa.array(places < np.repeat(most, lengths))
    values = pc.list_flatten(lists).combine_chunks().filter(kept)
    offsets = np.concatenate([[0], np.minimum(lengths, most).cumsum()])
    return pa.ListArray.from_arrays(offsets.astype(np.int32), values)
