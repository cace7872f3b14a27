"""Checkpoints of drafts and heads: what is torn or damaged is passed over, or named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from specdata.errors import ManifestError
from specdata.storage import checkpoints
from specdata.storage.checkpoints import (
    checkpoint_folder,
    checkpoint_to_resume,
    complete,
    newest_checkpoint,
)


def written(work: Path, *steps: int) -> Path:
    """Checkpoints of some steps, two files each."""
    for step in steps:
        folder = checkpoint_folder(work, step)
        (folder / "part").mkdir(parents=True)
        (folder / "state.bin").write_bytes(bytes(range(100)) + b"%d" % step)
        (folder / "part" / "rank-1.bin").write_bytes(b"second")
        complete(folder, engine="PyTorch")
    return work


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "one other byte": lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:]),
}


@pytest.mark.parametrize(
    ("damage", "name"),
    [*((damage, "state.bin") for damage in DAMAGES), ("truncated", "complete.json")],
)
def test_a_damaged_checkpoint_is_passed_over_or_named(
    damage: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = written(tmp_path, 8, 12)
    DAMAGES[damage](work / "checkpoint-12" / name)
    assert checkpoint_to_resume(work, engine="PyTorch") == work / "checkpoint-8"
    assert f"{work / 'checkpoint-12' / name} is " in caplog.text
    assert f"going on from {work / 'checkpoint-8'} instead" in caplog.text
    assert not (work / "checkpoint-12").exists()
    DAMAGES[damage](work / "checkpoint-8" / name)
    with pytest.raises(ManifestError) as refusal:
        newest_checkpoint(work, engine="PyTorch")
    assert str(refusal.value).startswith(f"{work / 'checkpoint-8' / name} is ")
    assert "no older checkpoint is whole: remove" in str(refusal.value)
    assert (work / "checkpoint-8").is_dir()


def test_a_torn_checkpoint_goes_and_the_newest_two_whole_ones_stay(tmp_path: Path) -> None:
    work = written(tmp_path, 4, 8, 12)
    (work / "checkpoint-9999").mkdir()
    (work / "checkpoint-9999" / "state.bin").write_bytes(b"torn")
    assert newest_checkpoint(work, engine="PyTorch") == work / "checkpoint-12"
    assert {path.name for path in work.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-12"}
    assert newest_checkpoint(tmp_path / "nothing") is None


def test_checkpoints_of_another_engine_are_refused_and_stay(tmp_path: Path) -> None:
    work = written(tmp_path, 4)
    with pytest.raises(ManifestError, match="written under PyTorch and cannot be read under ZeRO"):
        checkpoint_to_resume(work, engine="ZeRO")
    assert (work / "checkpoint-4").is_dir()


def test_files_are_on_the_disk_before_they_count_and_that_before_an_older_checkpoint_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = written(tmp_path, 4, 8)
    newest = checkpoint_folder(work, 12)
    newest.mkdir()
    (newest / "state.bin").write_bytes(b"new")
    events = []

    def synced(folder: Path) -> None:
        assert folder == newest
        events.append(((newest / "complete.json").is_file(), (work / "checkpoint-4").is_dir()))

    monkeypatch.setattr(checkpoints, "sync_folder", synced)
    complete(newest)
    assert events == [(False, True), (True, True)]
    assert not (work / "checkpoint-4").exists()
