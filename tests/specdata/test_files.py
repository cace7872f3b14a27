"""Folders are whole or absent, whoever is killed; files are hashed once; settings are compared."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdata.errors import ManifestError, OtherSettingsError
from specdata.storage import files
from specdata.storage.files import atomic_folder, write_json
from specdata.storage.resume import Settings, differences, read_record


def replace_partly(folder: Path) -> None:
    with atomic_folder(folder, replace=True) as new:
        (new / "part").write_text("some of it")
        raise OSError("no room")


def test_a_matrix_that_changed_inside_a_large_file_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WHOLE_FILE", files.END)
    file, content = tmp_path / "weights", bytearray(16 * files.END)
    file.write_bytes(content)
    before = files.fingerprint(str(tmp_path))
    content[8 * files.END : 8 * files.END + (1 << 16)] = b"1" * (1 << 16)
    file.write_bytes(content)
    assert files.fingerprint(str(tmp_path)) != before


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
    },
    "seed": 0,
}


def test_only_what_differs_is_shown_and_a_free_key_may() -> None:
    asked = copy.deepcopy(STORED)
    asked["plan"]["methods"] = {"K=.5": {"name": "K=.5", "length": 8}}
    asked["plan"]["sets"][1]["count"] = 9
    asked["plan"]["target"] = {"name": "there", "revision": "bad"}
    asked["plan"]["unknown"] = None
    assert sorted(differences(STORED, asked, ["plan.target.name"])) == [
        "plan.methods.K=.5.length: 4 -> 8",
        "plan.methods.plain: {'name': 'plain'} -> absent",
        "plan.sets.1.count: 5 -> 9",
        "plan.target.revision: 'f00' -> 'bad'",
        "plan.unknown: absent -> null",
    ]
    assert "plan.target.name: 'here' -> 'there'" in differences(STORED, asked)
    assert differences({"a": "0" * 16}, {"a": "b" * 16}) == ["a: its contents have changed"]
    assert Settings({"widths": (1, 2)}).values == {"widths": [1, 2]}


def test_settings_are_stored_and_others_are_refused_with_the_differences_and_the_remedy(
    tmp_path: Path,
) -> None:
    path, settings = tmp_path / "settings.json", Settings(STORED)
    write_json(path, settings.values)
    stored = read_record(path, (), "")
    settings.check(stored, "work")
    with pytest.raises(OtherSettingsError) as error:
        Settings(STORED | {"seed": 1}, "use another --folder").check(stored, "work")
    said = "work was made with other settings: use another --folder. Stored -> asked:"
    assert str(error.value).endswith(f"{said}\n  seed: 0 -> 1")
    with pytest.raises(ManifestError, match=r"eval was not written .*another output folder"):
        settings.check([], "runs/toy/eval")  # type: ignore[arg-type]


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
