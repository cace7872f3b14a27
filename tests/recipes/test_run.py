"""The frame of a stage: its folder, its lock, the processes that wait, the exit status."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from recipes.config import PipelineConfig, parse
from recipes.recipe import Recipe
from recipes.run import KEYS, Stage, finished, portable, run_stage, stored_config, wait_for
from recipes.train_head import Labels
from specdata.errors import ConfigError, ManifestError
from specdata.storage.files import fingerprint, locked


@dataclass(frozen=True)
class Work(Stage):
    """A made-up stage: do `work`, of a `source`, with a seed."""

    work: Callable[[], dict[str, Any]] = dict
    source: str = "hub/model"
    name, recipe, sections = "work", "work", ("seed",)

    def stored_settings(self) -> dict[str, Any]:
        return {"seed": self.config.seed, "drafts": [self.source]}

    @property
    def inputs(self) -> dict[str, str]:
        return {"model": self.source, f"path draft {self.source}": self.source}

    @property
    def size(self) -> str:
        return "little"

    def run(self) -> dict[str, Any]:
        return self.work()


def at(output: Path, seed: int = 0) -> PipelineConfig:
    """The demo's configuration, in another folder."""
    here = [f"--models.target={output}/pair/target", f"--models.draft={output}/pair/draft"]
    return parse(["--output", str(output), "--seed", str(seed), *here]).config


def fail() -> dict[str, Any]:
    raise OSError("disk full")


def test_run_json_remembers_what_was_found_and_where(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        run_stage(Work(at(tmp_path), fail))
    assert not finished(tmp_path / "work")
    assert run_stage(Work(at(tmp_path), lambda: {"rows": 3})) == {"rows": 3}
    record = json.loads((tmp_path / "work" / "run.json").read_text())
    assert record["finished"]
    assert {"arguments", "environment", "inputs", "settings", "seed"} <= record.keys()


def test_a_missing_input_and_a_folder_with_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not there: run the stage that makes it"):
        run_stage(Work(at(tmp_path), source=str(tmp_path / "gone")))
    here = tmp_path / "work"
    here.mkdir()
    (here / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not an output folder"):
        run_stage(Work(at(tmp_path)))
    assert [path.name for path in here.iterdir()] == ["thesis.txt"]
    (here / "run.json").write_text('{"who": "someone else"}')
    with pytest.raises(ManifestError, match="not written by this program"):
        run_stage(Work(at(tmp_path)))
    with pytest.raises(ConfigError, match="cannot write into"):
        run_stage(Work(at(here / "thesis.txt")))


def test_a_mistake_found_before_anything_is_made_leaves_the_folder_free(tmp_path: Path) -> None:
    def refuse() -> dict[str, Any]:
        raise ConfigError("no such prompt file")

    with pytest.raises(ConfigError, match="no such prompt file"):
        run_stage(Work(at(tmp_path), refuse))
    assert run_stage(Work(at(tmp_path, seed=1))) == {}


def test_two_runs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    def second() -> dict[str, Any]:
        with pytest.raises(ConfigError, match="another process is working"):
            run_stage(Work(at(tmp_path)))
        return {"rows": 1}

    assert run_stage(Work(at(tmp_path), second)) == {"rows": 1}


def test_a_process_that_waits_gives_up_when_no_main_process_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.run.PAUSE", 0.05)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(TimeoutError, match="rank 0 ended, was lost, or never began, and rank 3"):
        wait_for(tmp_path, patience=0.5)
    with locked(tmp_path / ".lock", wait=False):
        waiting = threading.Thread(target=wait_for, args=(tmp_path, 0.1), daemon=True)
        waiting.start()
        waiting.join(0.6)
        assert waiting.is_alive()
        (tmp_path / "run.json").write_text(json.dumps(dict.fromkeys(KEYS, True)))
        waiting.join()
    wait_for(tmp_path, patience=0.1)


def test_a_process_works_only_after_the_main_process_of_this_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json alone may be what an earlier run left, whose lock is free."""
    with pytest.raises(OSError, match="disk full"):
        run_stage(Work(at(tmp_path), fail))
    monkeypatch.setattr("recipes.run.PATIENCE", 0.1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError, match="no main process"):
        run_stage(Work(at(tmp_path), lambda: pytest.fail("nobody keeps run.json")))


def test_a_fingerprint_follows_the_content_of_files_but_not_run_json(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = fingerprint(str(tmp_path))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".lock").write_text("")
    assert fingerprint(str(tmp_path)) == first
    (tmp_path / "a").write_text("2")
    assert fingerprint(str(tmp_path)) != first
    assert fingerprint("some/hub-id") == "some/hub-id"


def test_what_is_not_found_is_not_called_changed_and_what_changed_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder paths that were written relative are those of the run."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-model", "mine", "elsewhere"):
        Path(name).mkdir()
    Path("mine/a.jsonl").write_text("1")
    config = parse(["--output=runs/out", "--models.target=my-model"]).config
    stage = Work(config, source="mine/a.jsonl")
    run_stage(stage)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert stored_config(Path("../runs/out/work")).models.target == str(tmp_path / "my-model")
    with pytest.raises(ConfigError, match=r"draft is not found from here .*--output"):
        run_stage(Work(config, source="runs/out/draft/model"))
    gone = Work(parse(["--output=../runs/out"]).config, source="mine/a.jsonl")
    with pytest.raises(ConfigError, match=r"model mine/a\.jsonl: no such file .*not compared"):
        run_stage(gone)
    monkeypatch.chdir(tmp_path)
    Path("mine/a.jsonl").write_text("2")
    with pytest.raises(ManifestError, match=r"^the model, .* changed .*: give a new --output, "):
        run_stage(stage)


def test_paths_in_the_output_are_compared_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"drafts": ["", "my run/pair/draft", "org/model"], "path draft my run/x": "f00"}
    expected = {"drafts": ["", "OUTPUT/pair/draft", "org/model"], "path draft OUTPUT/x": "f00"}
    assert portable(values, "my run") == expected
    assert portable(values, f"{tmp_path}/other/../my run/") == expected
    moved = {"drafts": ["", '/a "b"\\c/pair/draft', "org/model"], 'path draft /a "b"\\c/x': "f00"}
    assert portable(values, "my run", '/a "b"\\c') == moved
    assert portable(values, ".") == values, "every name would be a path in the current folder"


def test_a_dataset_is_continued_wherever_its_models_are_and_refused_for_other_models() -> None:
    def made_by(name: str, revision: str) -> dict[str, Any]:
        return {"draft": {"name": name, "revision": revision}}

    stage = Labels(parse([]).config)
    stored = stage.dataset_settings(made_by("runs/a/draft/model", "f00")).values
    stage.dataset_settings(made_by("/moved/draft/model", "f00")).check(stored, "labels")
    with pytest.raises(ConfigError, match=r"draft\.revision: 'f00' -> 'bad'"):
        stage.dataset_settings(made_by("runs/a/draft/model", "bad")).check(stored, "labels")


class Failing(Recipe):
    """A recipe that does nothing, or raises."""

    error: Exception | None = None
    group: str = ""

    def main(self, config: PipelineConfig) -> None:
        if self.group:
            distributed.init_process_group("gloo", init_method=self.group, rank=0, world_size=1)
        if self.error:
            raise self.error

    def stages_of(self, config: PipelineConfig) -> list[Any]:
        return [Work(config)]


ENDS: list[tuple[Exception | None, int, str]] = [
    (None, 0, ""),
    (ConfigError("x at https:/me:hunter2@host"), 2, "error: x at https:/***@host"),
    (OSError("x"), 1, "error while running: x"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), 1, "out of memory (CUDA out of memory."),
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] closed"), 1, "another process of this run"),
]


@pytest.mark.parametrize(("error", "status", "said"), ENDS)
def test_the_exit_status_says_who_is_at_fault_and_the_group_of_processes_is_left(
    tmp_path: Path,
    error: Exception | None,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Failing, "group", f"file://{tmp_path / 'group'}")
    monkeypatch.setattr(Failing, "error", error)
    assert Failing("", (Work,)).run([]) == status
    printed = capsys.readouterr().err.splitlines()
    assert [line.startswith((said, f"error while running: {said}")) for line in printed] == [
        True
    ] * bool(status)
    assert not distributed.is_initialized()


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "error", ValueError("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        Failing("", (Work,)).run([])
