"""Stored datasets: nothing lost, nothing mixed up, damage is named."""

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from distill.batches import check_context, fitted
from heads.rows import LabelRows
from specdata.errors import ManifestError, trouble_outside
from specdata.processes import rank
from specdata.storage.dataset import example_ids, fill_dataset, load_stored, of_split, read_manifest
from specdata.storage.files import is_locked, locked
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Rollout
from tests.support.acceptance import rollout
from tests.support.tiny import tiny_llama
from tests.support.two_processes import as_rank, finish, kill, wait_for

SETTINGS = {"seed": 0, "sampling": {"temperature": 1.0}}


def row(number: int) -> Rollout:
    return rollout(number, [number, number + 1], prompt=(number,))


def shards(made: list[int], stop_at: int | None = None) -> list[Callable[[], list[Rollout]]]:
    def make(index: int) -> list[Rollout]:
        if index == stop_at:
            raise KeyboardInterrupt
        made.append(index)
        return [row(2 * index), row(2 * index + 1)]

    return [partial(make, index) for index in range(4)]


def fill(
    folder: Path,
    parts: list[Callable[[], list[Rollout]]],
    report: Callable[[int], object] = lambda rows: None,
) -> int:
    return fill_dataset(folder, ROLLOUTS, Settings(SETTINGS), parts, report)


def content(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, but for what `load_stored` keeps."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".cache" not in path.parts
    }


def test_an_interrupted_dataset_continues_and_has_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    made: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "a", shards(made, stop_at=1))
    with pytest.raises(ManifestError, match=r"unfinished \(2 shards so far\)"):
        load_stored(tmp_path / "a")
    found: list[int] = []
    assert fill(tmp_path / "a", shards(made), found.append) == 8
    assert made == [3, 2, 1, 0], "no shard is made twice"
    assert found == [2, 2], "those of the earlier run are reported, and not those made now"
    fill(tmp_path / "b", shards([]))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    dataset = load_stored(tmp_path / "a")
    assert dataset.to_list() == [dict(row(number)) for number in range(8)]
    assert dataset.cache_files, "it is a memory map, not a copy in memory"
    assert fill(tmp_path / "a", shards(made)) == 8
    assert len(made) == 4


def test_a_run_that_lost_its_folder_to_another_writes_nothing_into_it(tmp_path: Path) -> None:
    """As when a launcher is killed, its process is not, and the folder is made anew."""
    folder = tmp_path / "rows"

    def slow() -> list[Rollout]:
        shutil.rmtree(folder)
        with pytest.raises(KeyboardInterrupt):
            fill_dataset(folder, ROLLOUTS, Settings({"seed": 1}), shards([], 3), lambda rows: None)
        return [row(0)]

    with pytest.raises(ManifestError, match="seed: 1 -> 0"):
        fill(folder, [slow])
    assert list(folder.glob("shard-*")) == []


def test_a_shard_of_a_finished_dataset_is_not_written_over(tmp_path: Path) -> None:
    """Another node may have finished it meanwhile, on a file system that said so late."""
    fill(tmp_path / "theirs", shards([]))
    expected = content(tmp_path / "theirs")

    def late() -> list[Rollout]:
        shutil.copytree(tmp_path / "theirs", tmp_path / "ours", dirs_exist_ok=True)
        return [row(99)]

    assert fill(tmp_path / "ours", [*shards([])[:3], late]) == 8
    assert content(tmp_path / "ours") == expected


def test_an_edited_truncated_or_missing_shard_is_named(tmp_path: Path) -> None:
    fill(tmp_path, shards([]))
    shard = tmp_path / "shard-00002.parquet"
    whole = shard.read_bytes()
    for damaged in (whole[:-1] + b"x", whole[:-9], b""):
        shard.write_bytes(damaged)
        for use in (load_stored, partial(fill, parts=shards([]))):
            with pytest.raises(ManifestError, match=r"shard-00002\.parquet is not the file"):
                use(tmp_path)
    with pytest.raises(ManifestError, match=r"shard-00002\.parquet cannot be read"):
        example_ids(tmp_path, "train")
    shard.unlink()
    with pytest.raises(ManifestError, match=r"shard-00002\.parquet is listed"):
        fill(tmp_path, shards([]))


def test_a_training_begins_without_reading_a_row_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, shards([]))
    labels = [{"draft_ids": [1, 2], "accept_prob": [0.5, 0.5], **row(n)} for n in range(4)]
    labelled = Dataset.from_list(labels)

    def refuse(*_: object) -> Any:
        raise AssertionError("a row was read")

    for name in ("__getitem__", "__iter__"):
        monkeypatch.setattr(Dataset, name, refuse)
    rollouts = of_split(load_stored(tmp_path), "train", tmp_path, held_out_share=0.3)
    assert 0 < len(rollouts) < 8
    whole, cut = fitted(rollouts, None), fitted(rollouts, 2)
    assert (whole.cut, cut.cut) == (0, len(rollouts))
    check_context({"draft": tiny_llama(0, vocab=9).config}, whole.rollouts, cut.rollouts)
    assert len(LabelRows.read("train", labelled, 2, with_draws=True)) == 4


@pytest.mark.parametrize("name", ["shard-00001.parquet", "thesis.txt"])
def test_a_foreign_file_is_named_and_kept(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, shards([], stop_at=1))
    (tmp_path / name).write_text("years of work")
    with pytest.raises(ManifestError, match=f"{name} is not part of the dataset"):
        fill(tmp_path, shards([]))
    assert (tmp_path / name).read_text() == "years of work"


def test_a_manifest_of_another_program_or_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json is missing"):
        load_stored(tmp_path)
    fill(tmp_path, shards([]))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(ManifestError, match="schema_version: Input should be 2"):
        load_stored(tmp_path)
    for text in (
        "{",
        json.dumps({**manifest, "shards": 5}),
        json.dumps({**manifest, "shards": [{}]}),
        json.dumps({**manifest, "settings": [1]}),
        json.dumps({**manifest, "settings": {"sampling": {"temp": 1}}}),
        json.dumps({**manifest, "settings": {"sampling": {"temperature": -1}}}),
        json.dumps({**manifest, "settings": {"sampling": {"top_k": 2.5}}}),
        json.dumps({**manifest, "shards": [{**manifest["shards"][0], "file": 3}]}),
        "[" * 100_000,
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ManifestError, match="not a manifest"):
            load_stored(tmp_path)


def test_a_lock_is_taken_although_its_folder_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that finishes a dataset, whose locks another one is about to use."""
    path, mkdir, left = tmp_path / ".progress" / "dataset.lock", Path.mkdir, [2, 1, 0]

    def made_and_gone(folder: Path, *given: Any, **how: Any) -> None:
        mkdir(folder, *given, **how)
        if left:
            folder.rmdir()
            if not left.pop():
                raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", made_and_gone)
    with locked(path) as held:
        assert held
        assert is_locked(path)
    assert not left


SHARDS = 12


def fill_slowly(folder: Path, seconds: float) -> None:
    """Fill a dataset whose shards take some time, and write which were made here beside it."""

    def rows(index: int) -> list[Rollout]:
        with (folder.parent / f"made-{rank()}").open("a") as made:
            made.write(f"{index}\n")
        time.sleep(seconds)
        draw = torch.Generator().manual_seed(index)
        texts = torch.randint(1 << 30, (20, 2000), generator=draw)  # some milliseconds to write
        return [rollout(number, text) for number, text in enumerate(texts.tolist(), 20 * index)]

    fill(folder, [partial(rows, index) for index in range(SHARDS)])


def start(server: ForkServerContext, folder: Path, count: int, seconds: float) -> list[BaseProcess]:
    """Processes that fill a dataset together."""
    processes: list[BaseProcess] = [
        server.Process(
            target=as_rank, args=(each, {"WORLD_SIZE": str(count)}, fill_slowly, folder, seconds)
        )
        for each in range(count)
    ]
    for process in processes:
        process.start()
    return processes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    fill_slowly(folder, 0.0)
    return content(folder)


@pytest.mark.slow
def test_a_dataset_whose_processes_are_killed_at_any_time_ends_with_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], server: ForkServerContext
) -> None:
    folder = tmp_path / "dataset"
    for pattern in (
        "manifest.json",
        ".shard-00008.parquet.tmp",
        ".progress/shard-00005.parquet.json",
    ):
        processes = start(server, folder, 2, 0.05)
        wait_for(folder, pattern, processes)
        kill(processes)
    assert not read_manifest(folder)["finished"]
    # It may go on with another number of processes.
    finish(start(server, folder, 1, 0.0))
    assert content(folder) == whole


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_bytes_and_shares_the_work(
    tmp_path: Path, whole: dict[str, bytes], server: ForkServerContext
) -> None:
    finish(start(server, tmp_path / "3", 3, 0.5))
    made = [(tmp_path / f"made-{each}").read_text().split() for each in range(3)]
    assert all(made), "every process makes some"
    assert sorted(int(index) for part in made for index in part) == list(range(SHARDS))
    assert content(tmp_path / "3") == whole


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A real file system of this size; the test is skipped where none may be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a dataset that this process has loaded is still mapped from there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def loaded_by_datasets(path: Path) -> None:
    source = path.parent.parent / "rows.parquet"
    pq.write_table(pa.table({"ids": range(30_000)}), source)
    Dataset.from_parquet([str(source)], cache_dir=str(path))


WRITERS: dict[str, Callable[[Path], object]] = {
    "torch": lambda path: torch.save({"weights": torch.zeros(30_000)}, path),
    "safetensors": lambda path: save_file({"weights": torch.zeros(30_000)}, path),
    "datasets": loaded_by_datasets,
}


@pytest.mark.parametrize("library", WRITERS)
@pytest.mark.parametrize("size", [4, 112])
def test_a_full_disk_is_told_from_the_errors_of_every_library(
    tmp_path: Path, library: str, size: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, f"{size}k"):
        with pytest.raises(Exception, match=r"\S") as failure:
            WRITERS[library](disk / "file")
        full = trouble_outside(failure.value)
        assert full is not None, repr(failure.value)
        assert full.errno == errno.ENOSPC
    assert trouble_outside(ValueError("no such thing")) is None
    assert trouble_outside(FileNotFoundError(errno.ENOENT, "No such file")) is None
