"""Folders are whole or absent, whoever is killed; files are hashed once; settings are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdata.errors import ConfigError, ManifestError, OtherSettingsError
from specdata.storage import files
from specdata.storage.files import atomic_folder
from specdata.storage.resume import Settings, differences, read_record


def replace_partly(folder: Path) -> None:
    with atomic_folder(folder, replace=True) as new:
        (new / "part").write_text("some of it")
        raise OSError("no room")


def test_a_folder_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    here = tmp_path / "made"
    for text in ("first", "second"):
        with pytest.raises(OSError, match="no room"):
            replace_partly(here)
        assert [path.name for path in here.glob("*")] == (["first"] if text == "second" else [])
        with atomic_folder(here, replace=True) as folder:
            (folder / text).write_text(text)
        assert [path.name for path in here.iterdir()] == [text]
        assert list(tmp_path.iterdir()) == [here]
    with pytest.raises(FileExistsError, match="must not exist"), atomic_folder(here):
        pass


REPLACING = """
import os, signal, sys
from pathlib import Path
from specdata.storage.files import atomic_folder

folder, moments_left = Path(sys.argv[1]), int(sys.argv[2])
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")


def end(event, arguments):
    global moments_left
    if event in CHANGES and (event != "open" or str(folder.parent) in str(arguments[0])):
        if not moments_left:
            os.kill(os.getpid(), signal.SIGKILL)
        moments_left -= 1


sys.addaudithook(end)
with atomic_folder(folder, replace=True) as made:
    (made / "a").write_text("new")
    (made / "b").write_text("new")
"""


def held(folder: Path) -> str:
    """What a folder's two files say, which must be one."""
    (text,) = {(folder / name).read_text() for name in ("a", "b")}
    return text


@pytest.mark.slow
def test_one_that_is_killed_at_any_step_leaves_the_former_folder_or_the_new_one_whole(
    tmp_path: Path,
) -> None:
    status, moment, left = -9, 0, []
    while status == -9:
        folder = tmp_path / f"{moment}" / "made"
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            (folder / name).write_text("former")
        arguments = [sys.executable, "-c", REPLACING, str(folder), f"{moment}"]
        status = subprocess.run(arguments, check=False).returncode
        with pytest.raises(OSError, match="no room"):
            replace_partly(folder)
        left.append(held(folder))
        with atomic_folder(folder, replace=True) as made:
            for name in ("a", "b"):
                (made / name).write_text("newer")
        assert held(folder) == "newer"
        assert [path.name for path in folder.parent.iterdir()] == ["made"]
        moment += 1
    assert status == 0
    steps = left.index("new")
    assert left == ["former"] * steps + ["new"] * (moment - steps)
    assert steps > 10


def test_a_large_file_is_hashed_once_a_process_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "shard.parquet", []
    digest = files.hashlib.file_digest

    def counted(handle: Any, name: str) -> Any:
        read.append(handle.name)
        return digest(handle, name)

    monkeypatch.setattr(files.hashlib, "file_digest", counted)
    path.write_bytes(bytes(files.END))
    before = files.sha256(path)
    (tmp_path / "model.logs").mkdir()
    (tmp_path / "model.logs" / "events").write_text("which nothing reads")
    assert files.digests(tmp_path) == {"shard.parquet": before[:16]}
    assert files.fingerprint(str(path)) == before[:16]
    assert len(read) == 1
    path.write_bytes(bytes(files.END - 1) + b"\1")
    os.utime(path, ns=(0, 0))  # however coarse the file system's times are
    assert files.sha256(path) != before


# --- settings stored with an artefact: refused with what differs

STORED: dict[str, Any] = {
    "plan": {
        "methods": {"plain": {"name": "plain"}, "K=.5": {"name": "K=.5", "length": 4}},
        "sets": [{"name": "a"}, {"name": "b", "count": 5}],
        "target": {"name": "here", "revision": "f00"},
        "batch": 1,
    },
    "seed": 0,
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(STORED))
    change(settings["plan"])
    return settings


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda plan: plan.update(batch=3), "plan.batch: 1 -> 3"),
        (lambda plan: plan["methods"]["K=.5"].update(length=8), "plan.methods.K=.5.length: 4 -> 8"),
        (
            lambda plan: plan["methods"].pop("plain"),
            "plan.methods.plain: {'name': 'plain'} -> absent",
        ),
        (lambda plan: plan["sets"][1].update(count=9), "plan.sets.1.count: 5 -> 9"),
        (lambda plan: plan["sets"].append({"name": "c"}), "plan.sets.2: absent -> {'name': 'c'}"),
        (lambda plan: plan.update(unknown=None), "plan.unknown: absent -> null"),
        (
            lambda plan: plan["target"].update(revision="bad"),
            "plan.target.revision: 'f00' -> 'bad'",
        ),
    ],
)
def test_only_what_differs_is_shown(change: Callable[[dict[str, Any]], object], line: str) -> None:
    assert differences(STORED, changed(change), ["plan.target.name"]) == [line]


def test_a_free_key_may_differ_and_tuples_are_stored_as_lists() -> None:
    moved = changed(lambda plan: plan["target"].update(name="there"))
    assert differences(STORED, moved, ["plan.target.name"]) == []
    assert differences(STORED, moved) == ["plan.target.name: 'here' -> 'there'"]
    assert differences({"a": "0" * 16}, {"a": "b" * 16}) == ["a: its contents have changed"]
    assert Settings({"widths": (1, 2)}).values == {"widths": [1, 2]}


def test_a_refusal_names_the_artefact_the_differences_and_the_remedy() -> None:
    asked = Settings(changed(lambda plan: plan.update(batch=3)), "use another --folder")
    with pytest.raises(OtherSettingsError) as error:
        asked.check(STORED, "runs/toy/eval")
    assert str(error.value) == (
        "runs/toy/eval was made with other settings: use another --folder. Stored -> asked:\n"
        "  plan.batch: 1 -> 3"
    )
    assert isinstance(error.value, ConfigError)
    assert isinstance(error.value, ManifestError)
    asked.check(asked.values, "runs/toy/eval")
    with pytest.raises(ManifestError, match=r"eval was not written .*use another --folder"):
        asked.check([], "runs/toy/eval")  # type: ignore[arg-type]


def test_settings_are_stored_in_a_file_and_checked_against_it(tmp_path: Path) -> None:
    path = tmp_path / "work" / "settings.json"
    settings = Settings(STORED)
    assert not settings.check_file(path)
    settings.write(path)
    assert settings.check_file(path)
    with pytest.raises(OtherSettingsError, match=r"work was made with .* another output folder"):
        settings.extended({"seed": 1}).check_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("\udce4", "is damaged"),
        ("[1]", "must hold a JSON object"),
        ('{"a": 1}', "it has no 'b'"),
    ],
)
def test_a_damaged_record_is_refused_with_its_name_and_the_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ManifestError, match=f"run.json .*{message}.*: remove FOLDER$"):
        read_record(path, ("a", "b"), "remove FOLDER")
    path.write_text('{"a": 1, "b": 2, "c": 3}')
    assert read_record(path, ("a", "b"), "remove FOLDER") == {"a": 1, "b": 2, "c": 3}
