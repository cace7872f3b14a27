"""Settings stored with an artefact: compared, and refused with what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdata.errors import ConfigError, ManifestError, OtherSettingsError
from specdata.storage.resume import (
    Settings,
    differences,
    read_record,
)

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
        (lambda plan: plan.update(unknown=None), "plan.unknown: absent -> None"),
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
