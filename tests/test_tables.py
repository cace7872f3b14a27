"""Stored tables: nothing lost, nothing mixed up, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specdata.errors import ManifestError
from specdata.schema import ROLLOUTS, Rollout
from specdata.tables import fill_table, load_table

SETTINGS = {"seed": 0, "sampling": {"temperature": 1.0}}


def row(number: int) -> Rollout:
    return Rollout(
        example_id=f"id{number}",
        dataset="d",
        split="train",
        sample=0,
        prompt_ids=[number],
        completion_ids=[number, number + 1],
        finish="length",
    )


def shards(made: list[int], stop_at: int | None = None) -> list[Callable[[], list[Rollout]]]:
    def make(index: int) -> list[Rollout]:
        if index == stop_at:
            raise KeyboardInterrupt
        made.append(index)
        return [row(2 * index), row(2 * index + 1)]

    return [partial(make, index) for index in range(4)]


def fill(folder: Path, parts: list[Callable[[], list[Rollout]]]) -> int:
    return fill_table(folder, ROLLOUTS, SETTINGS, parts, lambda rows: None)


def test_an_interrupted_table_continues_and_has_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "a", shards(made, stop_at=1))
    with pytest.raises(ManifestError, match="unfinished"):
        load_table(tmp_path / "a")
    assert fill(tmp_path / "a", shards(made)) == 8
    assert made == [3, 2, 1, 0], "no shard is made twice"
    fill(tmp_path / "b", shards([]))
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert load_table(tmp_path / "a")["example_id"][:] == [f"id{n}" for n in range(8)]


def test_other_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    fill(tmp_path, shards([]))
    with pytest.raises(ManifestError, match=r"sampling\.temperature: 1\.0 -> 0\.5"):
        fill_table(
            tmp_path,
            ROLLOUTS,
            {"seed": 0, "sampling": {"temperature": 0.5}},
            shards([]),
            lambda rows: None,
        )


def test_an_edited_or_missing_shard_is_named(tmp_path: Path) -> None:
    fill(tmp_path, shards([]))
    shard = tmp_path / "shard-00002.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ManifestError, match=r"shard-00002\.parquet is not the file"):
        load_table(tmp_path)
    shard.unlink()
    with pytest.raises(ManifestError, match=r"shard-00002\.parquet is listed"):
        fill(tmp_path, shards([]))


def test_a_manifest_of_another_program_or_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json is missing"):
        load_table(tmp_path)
    fill(tmp_path, shards([]))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(ManifestError, match="schema version 99"):
        load_table(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match="not a manifest"):
        load_table(tmp_path)
