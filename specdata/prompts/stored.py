"""Tokenized prompts as a table: in memory, or in a file that every process and later run maps.

Beside the file lies `prompts.json`, which is written last and says what the prompts were made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc

from specdata.prompts.prompt import RECORD, LoadedPrompts, Prompt, kept_report
from specdata.storage.files import atomic_write, locked, write_json
from specdata.storage.resume import Settings

FILE = "prompts.arrow"
_JSON = ("messages", "variables")
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("example_id", "dataset", "split"), pa.string()),
        "ids": pa.list_(pa.int32()),
        "messages": pa.string(),
        "follow_ups": pa.list_(pa.string()),
        "reference": pa.string(),
        "variables": pa.string(),
        "row": pa.int64(),
    }
)


def record_batch(prompts: Iterable[Prompt]) -> pa.RecordBatch:
    """Prompts as rows of a table."""
    columns: dict[str, list[Any]] = {
        name: [getattr(prompt, name) for prompt in prompts] for name in SCHEMA.names
    }
    for name in _JSON:
        columns[name] = [json.dumps(value, default=str) for value in columns[name]]
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


class Prompts(Sequence[Prompt]):
    """Prompts by their number, each read from the table when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Prompts:
        """Make a table of a list of prompts; a table stays."""
        return prompts if isinstance(prompts, cls) else cls.of_batches([record_batch(prompts)])

    @classmethod
    def of_batches(cls, batches: Sequence[pa.RecordBatch]) -> Prompts:
        """Join the tables of `record_batch`."""
        return cls(pa.Table.from_batches(batches, SCHEMA))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        (row,) = self.table.slice(range(len(self))[index], 1).to_pylist()
        row |= {name: json.loads(row[name]) for name in _JSON}
        row |= {name: tuple(row[name]) for name in ("messages", "follow_ups")}
        return Prompt(**row)

    def by_length(self) -> list[int]:
        """Their numbers, shortest first and those of one length by their ids."""
        lengths = pc.list_value_length(self.table["ids"])
        keys = {"length": lengths, "example_id": self.table["example_id"]}
        order = [(name, "ascending") for name in keys]
        indices: list[int] = pc.sort_indices(pa.table(keys), sort_keys=order).to_pylist()
        return indices

    @property
    def turns(self) -> int:
        """The user's turns in all of them."""
        later = pc.sum(pc.list_value_length(self.table["follow_ups"])).as_py()
        return len(self) + (later or 0)


def kept_prompts(
    folder: Path,
    made_of: Mapping[str, Any],
    read: Callable[[Callable[[pa.RecordBatch], object]], list[dict[str, Any]]],
) -> LoadedPrompts:
    """Prompts that a folder keeps, made by one process if it keeps none that are `made_of` this.

    `read` hands the prompts to what it is given, and returns the report.
    """
    with locked(folder / "prompts.lock"):
        if (kept := _kept(folder, made_of)) is None:
            with atomic_write(folder / FILE) as path, pa.ipc.new_file(str(path), SCHEMA) as file:
                report = read(file.write_batch)
            record = {"made_of": Settings(made_of).values, "report": report}
            write_json(folder / RECORD, record)
            kept = _kept(folder, made_of)
    assert kept is not None
    return kept


def _kept(folder: Path, made_of: Mapping[str, Any]) -> LoadedPrompts | None:
    if (report := kept_report(folder, made_of)) is None:
        return None
    with suppress(OSError, pa.ArrowInvalid):  # it is damaged, and made again
        table = pa.ipc.open_file(pa.memory_map(str(folder / FILE))).read_all()
        return LoadedPrompts(Prompts(table), report)
    return None
