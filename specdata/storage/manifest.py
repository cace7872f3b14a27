"""The manifest of a stored dataset: settings, counts, each shard's hash, a finished mark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from specdata.errors import ManifestError
from specdata.sampling import SamplingConfig
from specdata.storage.files import sha256

MANIFEST = "manifest.json"
# The folder, beside it, of what is known of the shards while a dataset is being made.
PROGRESS = ".progress"
# The folder, beside it, of the copy that is mapped into memory.
CACHE = ".cache"


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


def new_manifest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a dataset of which no shard exists yet."""
    return {
        "schema_version": 2,
        "settings": settings,
        "counts": count([]),
        "shards": [],
        "finished": False,
    }


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


def describe_shard(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of one shard: file, rows, completion tokens, finish reasons, SHA-256."""
    return {
        "file": name,
        "rows": len(rows),
        "tokens": sum(len(row["completion_ids"]) for row in rows),
        "finish": dict(sorted(Counter(row["finish"] for row in rows).items())),
        "sha256": sha256(path),
    }


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
