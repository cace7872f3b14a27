"""Every stage keeps one contract: plan, run, rerun, refuse, go on."""

import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from eval.measuring.results import read_results
from recipes.command import RECIPES
from recipes.config import build
from recipes.pipeline import RECIPE, STAGES
from recipes.publish import Release
from recipes.recipe import show_plan
from recipes.releases import head_release
from recipes.run import KEYS, Stage, run_stage
from recipes.sizes import in_bytes
from recipes.train_head import Labels
from specdata.config import PromptSet
from specdata.errors import ConfigError, ManifestError, OtherSettingsError
from specdata.prompts.forms import RawPrompt
from specdata.prompts.reading import raw_prompts
from specdata.storage import files
from specdata.storage.files import fingerprint, write_json
from tests.support.hub import COMMIT, Server
from tests.support.stages import CONFIG, configuration, result

OTHER = ["--seed", "1", "--publish.license", "mit", "--logits.top_logits", "8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run, in the current folder, with a plan of every stage before it."""
    here = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        (here / "pair.yaml").write_text(yaml.safe_dump(CONFIG))
        assert RECIPE.run(["--config", "pair.yaml"]) == 0
        yield here


@pytest.fixture
def copy(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run, in the current folder."""
    shutil.copytree(whole, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_a_plan_names_what_is_read_and_written_and_writes_nothing(
    kind: type[Stage],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pair.yaml").write_text(yaml.safe_dump(CONFIG))
    stage = kind(configuration())
    show_plan({"output": "out"}, [stage])
    said = capsys.readouterr().out
    assert f"{stage.name} (would be made)" in said
    assert f"writes {stage.folder}: {stage.size}" in said
    for name, source in stage.inputs.items():
        assert f"reads {name}: {source} (not made yet)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["pair.yaml"]
    if stage.inputs:
        recipe = "train_draft" if stage.name in ("head", "release") else "make_rollouts"
        with pytest.raises(ConfigError, match=rf"run recipes/{recipe}\.py first"):
            run_stage(stage)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_what_is_made_is_not_made_again_and_other_settings_or_inputs_are_refused(
    kind: type[Stage], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that was moved, and is written otherwise."""
    Path("out").rename("run 2")
    here = ["--output", str(copy / "run 2"), "--models.target", "./run 2/pair/target"]
    here += ["--models.draft", "run 2/../run 2/pair/draft"]
    stage = kind(configuration(*here))
    assert result(stage) or stage.name == "eval"
    before = {path: path.stat().st_mtime_ns for path in stage.folder.rglob("*") if path.is_file()}
    run_stage(stage)
    assert f"{stage.name}: already done" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in stage.folder.rglob("*") if path.is_file()}
    assert after == before
    others = configuration(*here, *OTHER)
    with pytest.raises(OtherSettingsError, match="-> "):
        kind(others).check_settings()
    own = next((Path(source) for source in stage.inputs.values() if Path(source).exists()), None)
    if stage.is_copy:  # which is made again, of what was measured
        run_stage(kind(others))
        assert "making it again" in capsys.readouterr().out
    else:
        with pytest.raises(ConfigError, match="made with other settings"):
            run_stage(kind(others))
    if own is not None:
        (own / "more.json").write_text("{}")
        with pytest.raises(ManifestError, match=r"(?s)changed since .*inputs\.|contents diff"):
            run_stage(stage)


@pytest.mark.slow
def test_an_upload_says_where_it_is_whether_private_and_which_commit(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish = ["--config", "pair.yaml", "--publish.draft_id", "acme/draft", "--publish.head_id"]
    with Server(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert RECIPES["publish"].run([*publish, "acme/head"]) == 0
        # The draft's repository stays what it is.
        assert RECIPES["publish"].run([*publish, "acme/open", "--publish.private", "false"]) == 0
    said = capsys.readouterr().out
    for name, seen in (("draft", "private"), ("head", "private"), ("open", "public")):
        sent = [path for path in (tmp_path / "hub/acme" / name).rglob("*") if path.is_file()]
        size = in_bytes(sum(path.stat().st_size for path in sent))
        line = f"uploaded to {server.url}/acme/{name} ({seen}, {size}, commit {COMMIT})"
        assert said.count(line) == (2 if name == "draft" else 1)


@pytest.mark.slow
def test_a_release_stays_whole_until_all_of_another_is_there(copy: Path) -> None:
    stage = Release(configuration())
    parts = ("draft", "head")
    before = {part: fingerprint(str(stage.folder / part)) for part in parts}
    with pytest.raises(OfflineModeIsEnabled):  # of the draft that is made before
        run_stage(Release(configuration(*OTHER, "--publish.head_id", "acme/head")))
    assert (stage.folder / ".progress" / "draft").is_dir()
    assert before == {part: fingerprint(str(stage.folder / part)) for part in parts}
    run_stage(Release(configuration(*OTHER)))
    card = stage.folder / "head" / "README.md"
    assert "mit" in card.read_text()
    card.write_text("as I edited it")
    run_stage(Release(configuration(*OTHER)))
    assert card.read_text() == "as I edited it"
    run_stage(Release(configuration("--publish.license", "apache-2.0")))
    assert "apache" in card.read_text()
    kept = [path.read_text() for path in stage.folder.glob("head.README-*.md")]
    assert "as I edited it" in kept


@pytest.mark.slow
@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_a_changed_or_missing_file_is_named_by_whoever_reads_it_and_the_advice_mends_it(
    kind: type[Stage], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, command = kind(configuration()), ["--config", "pair.yaml"]
    expected = result(stage)
    made_files = (stage.folder / name for name in files.digests(stage.folder))
    file = max(made_files, key=lambda each: each.stat().st_size)
    for page in (*stage.folder.rglob("*.md"), *stage.folder.rglob("*.html")):
        page.write_text("as people edit them")
    readers = [reader(configuration()) for reader in STAGES]
    for damage in (lambda: flip(file), file.unlink):
        damage()
        for reader in readers:
            if any(Path(source).is_relative_to(stage.folder) for source in reader.inputs.values()):
                with pytest.raises(ManifestError, match=re.escape(str(file))):
                    run_stage(reader)
        capsys.readouterr()
        show_plan({}, [stage])
        assert ("made again" if stage.is_copy else str(file)) in capsys.readouterr().out
    if not stage.is_copy:
        assert RECIPE.run(command) == 2
        advice = re.search(r"remove (\S+) and run recipes/(\w+)\.py", capsys.readouterr().err)
        assert advice is not None
        shutil.rmtree(advice[1])
        assert import_module(f"recipes.{advice[2]}").RECIPE.run(command) == 0
    assert RECIPE.run(command) == 0
    assert result(stage) == expected


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_another_head_is_one_flag_and_leaves_the_first_with_its_evaluation(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", "pair.yaml", "--head.epochs", "1"]
    before = files.digests(Path("out"))
    assert RECIPE.run(command) == 2
    advice = re.search(
        r"with (--head\.folder) (head-2) \(.* into eval-2\)", capsys.readouterr().err
    )
    assert advice is not None
    assert RECIPE.run([*command, *advice.groups()]) == 0
    after = files.digests(Path("out"))
    assert {name for name in after if before.get(name) != after[name]} >= {
        "head-2/model/model.safetensors",
        "eval-2/results.json",
        "release/head/model.safetensors",
    }
    made_before = {name for name in before if not name.startswith("release")}
    assert {name: after[name] for name in made_before} == {
        name: before[name] for name in made_before
    }
    released, measured = (
        [run.generations for run in read_results(Path(folder) / "results.json").runs]
        for folder in ("out/release/head", "out/eval-2")
    )
    assert released == measured


IMMEDIATE = {"kind": "immediate", "epochs": 2}


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        ({}, "16 rollouts of instruct with 1 drafted token a position"),  # of kind specdec++
        ({"head": IMMEDIATE}, "2 drafted tokens a position"),  # one in each of two passes
        ({"head": {**IMMEDIATE, "draws": 2}}, "3 drafted tokens a position"),
        ({"head": IMMEDIATE, "sampling": {"temperature": 0}}, "1 drafted token a position"),
        ({"labels": {"draws": 3, "logits": "out/logits"}}, "16 rollouts or parts of them of"),
        ({"labels": {"logits": "out/logits", "bound": True}}, "by upper bounds of acceptance"),
    ],
)
def test_a_heads_card_says_what_it_learned_from_and_not_what_is_asked_for_now(
    trained: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    then = {**CONFIG, "output": str(tmp_path), "labels": {"draws": 3}, **trained}
    made: dict[str, Any] = {key: {} for key in KEYS}
    made |= {"config": build(then).model_dump(mode="json")}
    made["results"] = {"train_rows": 16, "epochs": 2, "after": {}}
    write_json(tmp_path / "head" / "run.json", made)
    sets = [{"name": "code", "split": "train", "count": 1}]
    asked = {"labels": {"draws": 5}, "rollouts": {"sets": sets}}
    is_bound = trained.get("labels", {}).get("bound", False)
    Labels(build(then)).show({"acceptance": {"instruct/dev": 0.5}})
    assert ("(upper bounds where not exact)" in capsys.readouterr().out) == is_bound
    card = head_release(build({**then, **asked})).keywords
    assert words in card["trained"]
    assert card["about"].datasets == ["instruct"]


def test_prompts_that_were_trained_on_are_not_measured_on(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = list(raw_prompts(PromptSet("instruct", "train", 2), 0, has_template=False))
    rows = [{"prompt": each.text} for each in learnt if isinstance(each, RawPrompt)]
    lines = map(json.dumps, [*rows, {"prompt": "Say something else."}])
    Path("mine.jsonl").write_text("\n".join(lines))
    own = ["--eval.sets", "[{name: mine.jsonl, count: 3}]", "--eval.folder", "eval-mine"]
    own += ["--method", "plain"]
    assert RECIPES["run-eval"].run(["--config", "pair.yaml", *own]) == 0
    assert "1 of 3 kept; 2 trained_on" in capsys.readouterr().out
    (run,) = read_results(Path("out/eval-mine/results.json")).runs
    assert run.prompts == 1
    shutil.rmtree("out/rollouts")
    own[3] = "eval-all"
    assert RECIPES["run-eval"].run(["--config", "pair.yaml", *own]) == 0
    assert "prompts that the run learnt from cannot be left out" in capsys.readouterr().out


def test_rollouts_of_another_target_are_refused_by_all_that_read_them(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("out/pair/target", "other")
    Path("other/more.json").write_text("{}")
    for made in ("initial", "draft", "logits", "labels", "head"):
        shutil.rmtree(f"out/{made}")
    for recipe, more in (("make-logits", ""), ("train-draft", ""), ("train-head", "--draft=null")):
        command = ["--config", "pair.yaml", "--models.target", "other", *more.split()]
        assert RECIPES[recipe].run(command) == 2
        assert "is of another target" in capsys.readouterr().err


def test_each_entry_of_the_sets_is_a_block_of_the_report(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"{{name: maths, split: {split}, count: 1}}" for split in ("train", "test")]
    given = ["pair.yaml", "--eval.folder", "eval-parts", "--method", "plain", "--eval.sets"]
    assert RECIPES["run-eval"].run([*given, f"[{', '.join(sets)}]"]) == 0
    runs = read_results(Path("out/eval-parts/results.json")).runs
    assert [(run.dataset, run.split) for run in runs] == [
        ("maths-train", "train"),
        ("maths-test", "test"),
    ]
    assert RECIPES["run-eval"].run([*given, f"[{sets[0]}, {sets[0]}]"]) == 2
    assert "maths, split train, is named twice" in capsys.readouterr().err


class Killed(BaseException):
    """Ends a stage at one of its files, as a signal would."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_a_stage_that_ended_at_any_of_its_files_goes_on_to_the_same_result(
    kind: type[Stage], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = kind(configuration())
    expected = result(stage)
    replace, count, last = Path.replace, 0, 0

    def replaced(source: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == last:
            raise Killed
        return replace(source, target)

    shutil.rmtree(stage.folder)
    for number in (2, 3, 5, 8):  # counted anew each time; the first file is run.json
        last, count = number, 0
        with monkeypatch.context() as patch:
            patch.setattr(files.Path, "replace", replaced)
            try:
                run_stage(stage)
            except Killed:
                continue
        break
    run_stage(stage)
    assert result(stage) == expected
