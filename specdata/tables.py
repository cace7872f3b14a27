"""Stored tables: parquet shards and a manifest that is rewritten after each shard.

A shard exists whole or not at all. A run that is killed and started again verifies the finished
shards by hash and makes the others; because every row has its own seed, the bytes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from specdata.errors import ManifestError
from specdata.schema import SCHEMA_VERSION
from specdata.shards import atomic_write, sha256, write_json

MANIFEST = "manifest.json"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines "key: old -> new" for every setting that differs, nested keys dotted."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines


def fill_table(
    folder: Path,
    schema: pa.Schema,
    settings: Mapping[str, Any],
    shards: Sequence[Callable[[], list[Any]]],
    report: Callable[[int], object],
) -> int:
    """Make every shard that is missing, in order.

    Args:
        folder: where `shard-00000.parquet`, ... and `manifest.json` go.
        schema: columns.
        settings: everything that decides the rows; stored, and compared on resume.
        shards: one function a shard that returns its rows.
        report: called with the number of rows of each shard as it is done or found done.

    Returns:
        Number of rows in the table.

    Raises:
        ManifestError: if the folder holds a table made with other settings, or a damaged one.
    """
    # JSON is what a resume compares with, so tuples must already be lists here.
    settings = json.loads(json.dumps(settings))
    manifest = _open(folder, settings, len(shards))
    done: list[dict[str, Any]] = manifest["shards"]
    for entry in done:
        report(entry["rows"])
    for index in range(len(done), len(shards)):
        rows = shards[index]()
        name = f"shard-{index:05d}.parquet"
        with atomic_write(folder / name) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
        done.append({"file": name, "rows": len(rows), "sha256": sha256(folder / name)})
        write_json(folder / MANIFEST, manifest)
        report(len(rows))
    manifest["finished"] = True
    write_json(folder / MANIFEST, manifest)
    return sum(entry["rows"] for entry in done)


def load_table(folder: Path) -> datasets.Dataset:
    """Read a finished table.

    Raises:
        ManifestError: if it is missing, unfinished, of another schema version, or damaged.
    """
    manifest = read_manifest(folder)
    if not manifest["finished"]:
        raise ManifestError(
            f"{folder} is unfinished ({len(manifest['shards'])} shards so far): run the stage that "
            "makes it again, it continues where it stopped"
        )
    _verify(folder, manifest)
    tables = [pq.read_table(folder / entry["file"]) for entry in manifest["shards"]]
    return datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(tables)))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a table; ManifestError if there is none that can be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ManifestError(f"{folder} holds no table: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: make "
                "the table again in an empty folder"
            )
        return {key: manifest[key] for key in _manifest({})}
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{path} is not a manifest of this program ({error!r})") from error


def _manifest(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "shards": [],
        "finished": False,
    }


def _open(folder: Path, settings: Mapping[str, Any], count: int) -> dict[str, Any]:
    if not (folder / MANIFEST).exists():
        write_json(folder / MANIFEST, manifest := _manifest(settings))
        return manifest
    manifest = read_manifest(folder)
    if changed := differences(manifest["settings"], settings):
        raise ManifestError(
            f"{folder} holds a table made with other settings; choose another output folder or "
            "remove it. Stored -> asked:\n  " + "\n  ".join(changed)
        )
    if len(manifest["shards"]) > count:
        raise ManifestError(f"{folder} lists more shards than these settings make, {count}")
    _verify(folder, manifest)
    return manifest


def _verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    for entry in manifest["shards"]:
        path = folder / entry["file"]
        if not path.is_file():
            raise ManifestError(f"shard {path} is listed in the manifest but missing")
        if sha256(path) != entry["sha256"]:
            raise ManifestError(
                f"shard {path} is not the file that was written (its SHA-256 differs): restore it, "
                f"or remove {folder} and make the table again"
            )
