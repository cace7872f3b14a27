"""Stored datasets: parquet shards, made by any number of processes, and a manifest written last.

What a shard holds is fixed before any work, so neither the number of processes nor an interruption
changes a byte. A process takes a shard by locking a file. The system releases the lock however the
process ends, so a shard that a dead process had begun is made by another one, or by the next run.
Several nodes need a shared file system with locks.

While a dataset is being made, `.progress` holds a record of each shard (rows, hash). The record is
written before the shard gets its name, so a shard without a record was not made by this program.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from specdata.errors import ConfigError, ManifestError
from specdata.processes import is_main
from specdata.sampling import SamplingConfig
from specdata.storage.columns import arrow_table
from specdata.storage.files import (
    CACHE_FOLDER,
    MANIFEST,
    PROGRESS,
    atomic_write,
    locked,
    sha256,
    share_out,
    write_json,
)
from specdata.storage.resume import Settings, read_record

# What a dataset's folder may hold beside its shards; hidden files are never looked at.
BESIDE = (MANIFEST, "run.json")


def fill_dataset(
    folder: Path,
    schema: pa.Schema,
    settings: Settings,
    shards: Sequence[Callable[[], list[Any]]],
    report: Callable[[int], object],
) -> int:
    """Make every shard that is missing, together with the other processes that do the same.

    Every process calls this with the same arguments, and returns when the dataset is finished, the
    number of its rows. Later shards are made first: rows are sorted by length, so a lack of memory
    shows at once, and the last shards, for which some processes wait, are short ones.

    Args:
        folder: where `shard-00000.parquet`, ... and `manifest.json` go.
        schema: columns; `completion_ids` and `finish` are counted in the manifest.
        settings: everything that decides the rows; stored, and compared on resume.
        shards: for each shard, a function that returns its rows.
        report: called with the number of rows of a shard that was made earlier or by another
            process; the functions in `shards` report themselves.
    """
    dataset = _DatasetInProgress(folder, schema, settings, len(shards))
    with locked(dataset.progress / "dataset.lock"):
        manifest = dataset.open()

    def attempt(index: int) -> bool:
        if record := dataset.done(index):
            report(record["rows"])
            return True
        return dataset.make(index, shards[index])

    if manifest["finished"]:
        report(manifest["counts"]["rows"])
    else:
        share_out(reversed(range(len(shards))), attempt)
        with locked(dataset.progress / "dataset.lock"):
            dataset.finish()
    shutil.rmtree(dataset.progress, ignore_errors=True)
    return int(read_manifest(folder)["counts"]["rows"])


@dataclass(frozen=True, slots=True)
class _DatasetInProgress:
    """A dataset that is being made, as one of its processes sees it."""

    folder: Path
    schema: pa.Schema
    settings: Settings
    size: int

    @property
    def progress(self) -> Path:
        return self.folder / PROGRESS

    def open(self) -> dict[str, Any]:
        """Check what the folder holds, or begin it."""
        # Listed before the records are read, so a shard without a record was not made here.
        present = sorted(path.name for path in self.folder.glob("[!.]*"))
        if not (self.folder / MANIFEST).exists():
            self._check_foreign(present, [])
            manifest: dict[str, Any] = {
                "schema_version": 2,
                "settings": self.settings.values,
                "counts": count([]),
                "shards": [],
                "finished": False,
            }
            write_json(self.folder / MANIFEST, manifest)
        manifest = read_manifest(self.folder)
        self.settings.check(manifest["settings"], self.folder)
        if manifest["finished"]:
            if len(manifest["shards"]) != self.size:
                raise ManifestError(
                    f"{self.folder} lists {len(manifest['shards'])} shards, these settings make "
                    f"{self.size}: remove it and make the dataset again"
                )
            records = manifest["shards"]
        else:
            records = [record for index in range(self.size) if (record := self._record(index))]
        self._check_foreign(present, [record["file"] for record in records])
        if is_main():  # hashing everything once is enough
            for record in records:
                if manifest["finished"] or (self.folder / record["file"]).exists():
                    verify(self.folder, record)
        return manifest

    def done(self, index: int) -> dict[str, Any] | None:
        """The record of a shard, if it exists and the dataset is unfinished."""
        return self._record(index) if (self.folder / _name(index)).exists() else None

    def make(self, index: int, rows: Callable[[], list[Any]]) -> bool:
        """Make a shard, unless all are made; False if another process is at it or was just now."""
        with locked(self.progress / f"{_name(index)}.lock", wait=False) as is_held:
            if not is_held:
                return False
            for each in (self.progress, self.folder):  # opened, so that NFS looks again
                os.scandir(each).close()
            if self.done(index):  # by another process, since the last look
                return False
            if read_manifest(self.folder)["finished"]:
                return True
            made = rows()
            # Another run may have taken the folder meanwhile, if the launcher of this process was
            # killed and the process was not, or have finished it.
            manifest = read_manifest(self.folder)
            self.settings.check(manifest["settings"], self.folder)
            if manifest["finished"]:
                return True
            with atomic_write(self.folder / _name(index)) as temporary:
                pq.write_table(pa.Table.from_pylist(made, schema=self.schema), temporary)
                record = {
                    "file": _name(index),
                    "rows": len(made),
                    "tokens": sum(len(row["completion_ids"]) for row in made),
                    "finish": dict(sorted(Counter(row["finish"] for row in made).items())),
                    "sha256": sha256(temporary),
                }
                write_json(self.progress / f"{_name(index)}.json", record)
            return True

    def finish(self) -> None:
        """Write the manifest with every shard and the finished mark."""
        manifest = read_manifest(self.folder)
        if manifest["finished"]:
            return
        self.settings.check(manifest["settings"], self.folder)
        manifest["shards"] = [self._record(index) for index in range(self.size)]
        manifest["counts"] = count(manifest["shards"])
        manifest["finished"] = True
        write_json(self.folder / MANIFEST, manifest)

    def _record(self, index: int) -> dict[str, Any] | None:
        path = self.progress / f"{_name(index)}.json"
        try:
            return read_record(path, ("file", "rows", "sha256"), "remove it and its shard")
        except FileNotFoundError:
            return None

    def _check_foreign(self, present: Sequence[str], shards: Sequence[str]) -> None:
        foreign = sorted({*present} - {*shards} - {*BESIDE})
        if foreign:
            raise ManifestError(
                f"{self.folder / foreign[0]} is not part of the dataset in its folder "
                f"({len(foreign)} such files): move it away"
            )


def _name(index: int) -> str:
    return f"shard-{index:05d}.parquet"


def load_stored(folder: Path) -> datasets.Dataset:
    """Load a finished dataset with random access, memory-mapped.

    For that the first process that loads it copies the shards into one Arrow file: in the folder
    itself (`.cache`, which may be removed) if that can be written, else in the usual cache of
    `datasets`.
    """
    manifest = read_manifest(folder)
    if not manifest["finished"]:
        made = len(list(folder.glob("shard-*.parquet")))
        raise ManifestError(
            f"{folder} is unfinished ({made} shards so far): run the stage that makes it again, it "
            "continues where it stopped"
        )
    if not (shards := manifest["shards"]):
        return datasets.Dataset.from_dict({})
    names = [folder / record["file"] for record in shards]
    is_ours = os.access(folder, os.W_OK)
    cache = folder / CACHE_FOLDER if is_ours else Path(datasets.config.HF_DATASETS_CACHE)
    hashes = "".join(record["sha256"] for record in shards)
    path = cache / f"{hashlib.sha256(hashes.encode()).hexdigest()[:32]}.arrow"
    with locked(path.with_suffix(".lock")):
        is_kept = path.is_file()
        if is_main() or not is_kept:  # the others read what it has checked
            for record in shards:
                verify(folder, record)
        if not is_kept:
            with (
                atomic_write(path) as temporary,
                pa.ipc.new_stream(str(temporary), pq.read_schema(names[0])) as joined,
            ):
                for name in names:
                    shard = pq.ParquetFile(pa.py_buffer(name.read_bytes()))
                    joined.write_table(shard.read(use_threads=False))
    return datasets.Dataset.from_file(str(path))


def is_held_out(example_id: str, share: float) -> bool:
    """True if a prompt is among a share, from 0 to 1, of all, which its id alone decides.

    So all completions of a prompt go together.
    """
    # The first word is a salt: another one would hold other prompts out.
    digest = hashlib.sha256(f"spared {example_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def example_ids(folder: Path, split: str) -> set[str]:
    """The ids of a split's prompts in the shards that are there; of none it is empty.

    They are not compared with the manifest: all bytes would be read. Raises ManifestError for one
    that cannot be read.
    """
    found: set[str] = set()
    for shard in folder.glob("shard-*.parquet"):
        try:
            rows = pq.ParquetFile(shard).read(["example_id", "split"])
        except pa.ArrowException as error:
            raise ManifestError(
                f"{shard} cannot be read ({error}): restore it, or remove {folder} and run the "
                "stage that makes it again"
            ) from error
        found.update(rows.filter(pc.equal(rows["split"], split))["example_id"].to_pylist())
    return found


def of_split(
    dataset: datasets.Dataset,
    split: str,
    source: Path,
    *,
    held_out_share: float = 0.0,
    wants_held_out: bool = False,
) -> datasets.Dataset:
    """Rows of one split of a stored dataset, in its order; `source` is its folder, for the message.

    Without the share of the prompts that is held out (`is_held_out`), or only these, if they are
    wanted.
    """
    table = arrow_table(dataset, "split", "example_id")
    rows = np.flatnonzero(pc.equal(table["split"], split))
    if held_out_share:
        examples = table["example_id"].take(pa.array(rows)).to_pylist()
        rows = rows[[is_held_out(each, held_out_share) == wants_held_out for each in examples]]
    if len(rows) == 0:
        of, remedy = "", "rollouts.sets must hold a prompt set with that split, not all of whose "
        remedy += "prompts are dropped as duplicates"
        if held_out_share:
            kind, other = ("are", "larger") if wants_held_out else ("are not", "smaller")
            of = f" that {kind} among the share {held_out_share:g} that is held out from the draft"
            remedy = f"give more prompts, or a {other} draft.held_out_share"
        raise ConfigError(f"{source} has no rows of split {split!r}{of}: {remedy}")
    return dataset.select(rows)


class _Shape(BaseModel):
    """What is read of a manifest; more may be there."""

    model_config = ConfigDict(strict=True)


class _Shard(_Shape):
    file: str
    rows: NonNegativeInt
    tokens: NonNegativeInt
    finish: dict[str, int]
    sha256: str


class _Model(_Shape):
    name: str
    revision: str | None = None


class _Account(_Shape):
    name: str
    split: str
    read: int
    kept: int
    dropped: dict[str, int]


class _Settings(_Shape):
    target: _Model | str | None = None
    draft: _Model | str | None = None
    sampling: SamplingConfig | None = None
    prompts: list[_Account] | None = None


class _Manifest(_Shape):
    schema_version: Literal[2]
    settings: _Settings
    counts: dict[str, Any]
    shards: list[_Shard]
    finished: bool


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a dataset."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ManifestError(f"{folder} holds no dataset: {MANIFEST} is missing")
    text = path.read_bytes()
    try:
        _Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ManifestError(
            f"{path} is not a manifest of this program ({where}: {first['msg']}): remove {folder} "
            "and make the dataset again"
        ) from error
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def count(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records' counts, added up."""
    finish: Counter[str] = Counter()
    for record in shards:
        finish.update(record["finish"])
    return {
        "rows": sum(record["rows"] for record in shards),
        "tokens": sum(record["tokens"] for record in shards),
        "finish": dict(sorted(finish.items())),
    }


def verify(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise ManifestError unless a shard is the file that its record describes."""
    path = folder / record["file"]
    if not path.is_file():
        raise ManifestError(
            f"shard {path} is listed in the manifest but missing: restore it, or remove {folder} "
            "and make the dataset again"
        )
    if sha256(path) != record["sha256"]:
        raise ManifestError(
            f"shard {path} is not the file that was written (its SHA-256 differs): restore it, "
            f"or remove {folder} and make the dataset again"
        )
