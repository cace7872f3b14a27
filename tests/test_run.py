"""A stage is done once, continued after an interruption, and never mixed with another run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from torch import distributed

from recipes.config import PipelineConfig, parse
from recipes.layout import by_content, eval_stage, rollouts_stage
from recipes.recipe import Recipe, _absent
from recipes.run import (
    KEYS,
    Stage,
    finished,
    made_as_asked,
    need,
    portable,
    remove_caches,
    run_stage,
    wait_for,
)
from specdata.errors import ConfigError, ManifestError
from specdata.storage.files import atomic_folder, fingerprint, try_locked
from specdata.storage.resume import Settings


def stage(folder: Path, seed: int = 0, source: str = "hub/model") -> Stage:
    settings = Settings({"seed": seed}, remedy="take another seed")
    return Stage("work", folder, settings, {"model": source}, "little")


@pytest.fixture
def config() -> PipelineConfig:
    return parse([], "").config


def test_a_stage_runs_once_and_remembers_what_it_found(
    tmp_path: Path, config: PipelineConfig
) -> None:
    calls: list[int] = []

    def work() -> dict[str, int]:
        calls.append(1)
        return {"rows": 3}

    for _ in range(2):
        assert run_stage(stage(tmp_path), config, work) == {"rows": 3}
    assert len(calls) == 1
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["finished"]
    assert record["wall_seconds"] >= 0
    assert record["config"]["seed"] == config.seed
    assert {"arguments", "environment", "inputs", "settings", "seed"} <= record.keys()


def test_an_interrupted_stage_is_unfinished_and_can_be_run_again(
    tmp_path: Path, config: PipelineConfig
) -> None:
    def fail() -> dict[str, int]:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_stage(stage(tmp_path), config, fail)
    assert not finished(tmp_path)
    with pytest.raises(ConfigError, match=r"run recipes/before\.py first"):
        need(tmp_path, "before.py")
    assert run_stage(stage(tmp_path), config, lambda: {"rows": 1}) == {"rows": 1}
    need(tmp_path, "before.py")


def test_the_folder_of_another_run_is_refused_with_the_difference(
    tmp_path: Path, config: PipelineConfig
) -> None:
    run_stage(stage(tmp_path), config, dict)
    with pytest.raises(ConfigError, match=r"(?s)take another seed.*settings\.seed: 0 -> 1$"):
        run_stage(stage(tmp_path, seed=1), config, dict)
    with pytest.raises(ConfigError, match=r"inputs\.model: 'hub/model' -> 'hub/other'"):
        run_stage(stage(tmp_path, source="hub/other"), config, dict)


def test_a_refused_evaluation_shows_the_methods_that_differ_and_names_eval_folder() -> None:
    stored = eval_stage(parse([], "").config)
    asked = eval_stage(parse(["--method", "K=2", "--method", "{name: mine, length: 3}"]).config)
    with pytest.raises(ConfigError, match=r"--eval\.folder NAME") as refusal:
        asked.settings.check(stored.settings.values, stored.folder)
    assert "--output" not in str(refusal.value)
    lines = str(refusal.value).splitlines()[1:]
    assert all(line.startswith("  eval.methods.") for line in lines)
    assert any(line.startswith("  eval.methods.mine: absent -> {") for line in lines)
    assert not any(
        line.startswith(("  eval.methods.K=2", "  eval.methods.plain")) for line in lines
    )


def test_a_folder_with_foreign_files_is_refused(tmp_path: Path, config: PipelineConfig) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not an output folder"):
        run_stage(stage(tmp_path), config, dict)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "run.json").write_text('{"who": "someone else"}')
    with pytest.raises(ManifestError, match="not written by this program"):
        run_stage(stage(tmp_path), config, dict)


def test_a_mistake_found_before_anything_is_made_leaves_the_folder_free(
    tmp_path: Path, config: PipelineConfig
) -> None:
    def refuse() -> dict[str, int]:
        raise ConfigError("no such prompt file")

    with pytest.raises(ConfigError, match="no such prompt file"):
        run_stage(stage(tmp_path), config, refuse)
    assert run_stage(stage(tmp_path, seed=1), config, dict) == {}


def test_two_runs_in_one_folder_do_not_meet(tmp_path: Path, config: PipelineConfig) -> None:
    def second() -> dict[str, int]:
        with pytest.raises(ConfigError, match="another process is working"):
            run_stage(stage(tmp_path), config, dict)
        return {"rows": 1}

    assert run_stage(stage(tmp_path), config, second) == {"rows": 1}


def test_a_process_that_waits_gives_up_when_no_main_process_is_at_work(
    tmp_path: Path, config: PipelineConfig
) -> None:
    with pytest.raises(TimeoutError, match="no main process has been at work"):
        wait_for(tmp_path, patience=0.1)

    def still_working() -> dict[str, int]:
        waiting = threading.Thread(target=wait_for, args=(tmp_path, 0.1))
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive(), "the main process holds the lock"
        return {"rows": 1}

    run_stage(stage(tmp_path), config, still_working)
    wait_for(tmp_path, patience=0.1)


def test_a_process_that_waits_says_what_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recipes.run.REMINDER", 0.1)
    monkeypatch.setattr("recipes.run.PAUSE", 0.05)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(TimeoutError, match="rank 0 ended, was lost, or never began, and rank 3"):
        wait_for(tmp_path, patience=0.5)
    line = f"rank 3 waits for rank 0, which is not at work in {tmp_path}\n"
    assert 2 <= capsys.readouterr().err.count(line) <= 5
    with try_locked(tmp_path / ".lock"):
        waiting = threading.Thread(target=wait_for, args=(tmp_path, 0.1), daemon=True)
        waiting.start()
        waiting.join(0.6)
        assert waiting.is_alive()
        assert capsys.readouterr().err.count("which is at work in") == 1, "that may take hours"
        (tmp_path / "run.json").write_text(json.dumps(dict.fromkeys(KEYS, True)))
        waiting.join()


def test_a_process_works_only_after_the_main_process_of_this_run_has_begun(
    tmp_path: Path, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json alone may be what an earlier run left, whose lock is free."""

    def fail() -> dict[str, int]:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_stage(stage(tmp_path), config, fail)
    monkeypatch.setattr("recipes.run.PATIENCE", 0.1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError, match="no main process"):
        run_stage(stage(tmp_path), config, lambda: pytest.fail("nobody keeps run.json"))


def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, config: PipelineConfig
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into"):
        run_stage(stage(tmp_path / "file" / "work"), config, dict)


def test_prompt_files_are_inputs_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "a"}')
    sets = f"[{{name: {prompts}, count: 1}}]"
    flags = [f"--output={tmp_path}/out", "--rollouts.sets", sets, "--eval.sets", sets]
    changed = parse(flags).config
    assert str(prompts) in rollouts_stage(changed).inputs.values()
    described = eval_stage(changed)
    assert str(prompts) in described.inputs.values()
    alone = Stage("work", tmp_path / "work", Settings({}), {"prompts": str(prompts)}, "little")
    run_stage(alone, changed, dict)
    prompts.write_text('{"prompt": "b"}')
    with pytest.raises(ConfigError, match=r"inputs\.prompts"):
        run_stage(alone, changed, dict)


def test_a_fingerprint_follows_the_content_of_files_but_not_run_json(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = fingerprint(str(tmp_path))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".lock").write_text("")
    assert fingerprint(str(tmp_path)) == first
    (tmp_path / "a").write_text("2")
    assert fingerprint(str(tmp_path)) != first
    assert fingerprint("some/hub-id") == "some/hub-id"


def test_paths_in_the_output_are_compared_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"drafts": ["", "my run/pair/draft", "org/model"], "path draft my run/x": "f00"}
    expected = {"drafts": ["", "OUTPUT/pair/draft", "org/model"], "path draft OUTPUT/x": "f00"}
    assert portable(values, "my run") == expected
    assert portable(values, f"{tmp_path}/other/../my run/") == expected
    assert portable(expected, "my run") == expected
    assert portable(values, "other") == values
    assert portable(values, ".") == values, "every name would be a path in the current folder"


def test_a_stage_that_was_moved_is_done_whatever_its_output_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: PipelineConfig
) -> None:
    monkeypatch.chdir(tmp_path)

    def drafting(output: str) -> tuple[Stage, PipelineConfig]:
        source = Path(output) / "draft"
        settings = Settings({"drafts": [str(source)]}, remedy="take another output")
        inputs = {f"path draft {source}": str(source)}
        stage = Stage("work", Path(output) / "work", settings, inputs, "little")
        return stage, config.model_copy(update={"output": output})

    (tmp_path / "old" / "draft").mkdir(parents=True)
    (tmp_path / "old" / "draft" / "weights").write_text("1")
    assert run_stage(*drafting("old"), lambda: {"rows": 1}) == {"rows": 1}
    (tmp_path / "old").rename(tmp_path / "new")
    for output in ("new", str(tmp_path / "new")):
        assert made_as_asked(drafting(output)[0])
        assert run_stage(*drafting(output), dict) == {"rows": 1}
    (tmp_path / "new" / "draft" / "weights").write_text("2")
    with pytest.raises(ConfigError, match="inputs"):
        run_stage(*drafting("new"), dict)


def test_a_dataset_is_continued_wherever_its_models_are_and_refused_for_other_models() -> None:
    def made_by(name: str, revision: str) -> Settings:
        return by_content(Settings({"draft": {"name": name, "revision": revision}, "seed": 0}))

    stored = made_by("runs/a/draft/model", "f00").values
    made_by("/moved/draft/model", "f00").check(stored, "labels")
    with pytest.raises(ConfigError, match=r"draft\.revision: 'f00' -> 'bad'"):
        made_by("runs/a/draft/model", "bad").check(stored, "labels")


def test_caches_are_removed_unless_another_process_works_on_the_run(
    tmp_path: Path, config: PipelineConfig
) -> None:
    config = config.model_copy(update={"output": str(tmp_path)})
    cache = tmp_path / "labels" / ".cache"
    cache.mkdir(parents=True)

    def work() -> dict[str, int]:
        remove_caches(config)
        assert cache.exists()
        return {}

    run_stage(stage(tmp_path / "work"), config, work)
    remove_caches(config)
    assert not cache.exists()


def test_names_are_printed_as_they_are_but_for_control_characters(
    tmp_path: Path, config: PipelineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a [bold]:smile:\x1b[2J"
    run_stage(stage(folder), config, dict)
    run_stage(stage(folder), config, dict)
    printed = capsys.readouterr().out
    assert printed.count("a [bold]:smile:\\x1b[2J") == 2
    assert "\x1b" not in printed


def test_exit_status_is_1_for_trouble_outside_and_2_for_unusable_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> int:
        def main(_config: PipelineConfig) -> None:
            raise error

        return Recipe(main, lambda _config: [], "", ()).run([])

    assert fail(OSError("No space left on device")) == 1
    assert "No space left" in capsys.readouterr().err
    assert fail(ConfigError("wrong")) == 2
    assert capsys.readouterr().err == "error: wrong\n"
    with pytest.raises(ValueError, match="a defect"):
        fail(ValueError("a defect"))


@pytest.mark.parametrize(("error", "status"), [(None, 0), (ConfigError("x"), 2), (OSError("x"), 1)])
def test_a_recipe_leaves_the_group_of_its_processes_however_it_ends(
    tmp_path: Path, error: Exception | None, status: int
) -> None:
    def main(_config: PipelineConfig) -> None:
        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
        )
        if error is not None:
            raise error

    assert Recipe(main, lambda _config: [], "", ()).run([]) == status
    assert not distributed.is_initialized()


def test_a_folder_in_the_place_of_run_json_is_refused_with_what_to_remove(
    tmp_path: Path, config: PipelineConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "out" / "work"
    (here / "run.json").mkdir(parents=True)

    def work(given: PipelineConfig) -> None:
        run_stage(stage(here), given, dict)

    recipe = Recipe(work, lambda given: [stage(here)], "Work.", ())
    for more in ([], ["--plan"]):
        assert recipe.run(more) == 2
        error = capsys.readouterr().err
        assert "run.json must be a file and is a folder: choose another --output" in error
        assert f"or remove {here}" in error


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("owner/name", "from the Hub"),
        ("gpt2", "from the Hub"),
        ("owner/name@refs/pr/1", "from the Hub"),
        ("https://example.org/a/b.jsonl", "from the Hub"),
        ("runs/pair/target", "not made yet"),
        ("./target", "not made yet"),
        ("/target", "not made yet"),
        ("out/draft", "not made yet"),
        (".", ""),
    ],
)
def test_a_plan_tells_paths_that_are_not_there_from_what_is_fetched(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _absent(source, "out") == (f" ({said})" if said else "")
