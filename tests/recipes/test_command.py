"""The `draftsmith` command, what it imports and shows, and the wheel that brings it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eval.decode_config import Method
from eval.drafting.stopping import STOPPING_RULES
from eval.verifiers import VERIFIERS
from recipes.command import RECIPES, TOOLS, main
from specdata import __version__
from specdata.terminal import visible
from tests.support.light_imports import run_without_heavy_libraries

ROOT = Path(__file__).parents[2]


def command(*arguments: str, cwd: Path = ROOT) -> str:
    return run_without_heavy_libraries("-m", "recipes.command", *arguments, cwd=cwd)


# Of sections that the embedded pair's configuration does not have.
ASKED_FOR = {"make-logits": ["--logits", "{top_logits: 64}"]}


@pytest.mark.parametrize("name", RECIPES)
def test_help_and_plan_import_no_heavy_library(name: str, tmp_path: Path) -> None:
    shown = command(name, "--help")
    assert f"usage: draftsmith {name}" in shown
    assert f"draftsmith {name} my-pair.yaml --plan" in shown.split("options:")[0]
    assert "None" not in shown
    plan = ["--plan", *ASKED_FOR.get(name, [])]
    module = f"recipes.{name.replace('-', '_')}"
    assert "writes runs/toy/" in run_without_heavy_libraries("-m", module, *plan, cwd=tmp_path)


def test_the_list_of_commands_names_each_and_a_tool_has_help_without_heavy_libraries() -> None:
    assert "usage: draftsmith certify" in command("certify", "--help")
    listed = command("--help")
    for name in (*RECIPES, *TOOLS):
        assert re.search(rf"^  {name} +\w.*\.$", listed, re.MULTILINE), name


def test_help_of_an_evaluation_lists_what_a_method_holds() -> None:
    shown = command("run-eval", "--help")
    listed = shown.split("A method (of eval.methods or --method)")[1]
    for name in (*Method.model_fields, *STOPPING_RULES):
        assert re.search(rf"^ +{name}\b", listed, re.MULTILINE), name
    for name in VERIFIERS:
        assert re.search(rf"\b{name}\b", listed), name
    assert "A method" not in command("make-rollouts", "--help")


def test_a_mistake_is_answered_with_status_2_and_the_nearest_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what a launch tells its processes
    for arguments, hint in (
        (["trian-head"], "unknown command 'trian-head': did you mean 'train-head'?"),
        (["launch", "cpu-2", "--num_processes", "2"], "name a recipe after the profile"),
        (["launch", "cpu-2", "trian-head"], "did you mean 'train-head'?"),
        (["launch", "zero3.json", "train-head"], "invalid choice: 'zero3.json'"),
        (["certify", "--targte", "x"], "unknown option --targte: did you mean '--target'?"),
        (["certify", "--output", "x"], "did you mean '--out'?"),
        (["export", "--layout", "eagle3"], "unknown option --layout: a draft has the layout"),
        (["reproduce", "block"], "`make papers PAPER=NAME`"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert hint in capsys.readouterr().err
    for arguments, hint in (
        ([], "draftsmith init TARGET --prompts FILE"),
        (["train-head", "--layout", "x"], "did you mean 'draft.init.layout'?"),
        (["train-head", "--head.depht", "1"], "did you mean 'head.depth'?"),
        (["launch", "cpu-2", "--num_proceses", "2", "train-head"], "mean '--num_processes'?"),
        (["launch", "cpu-2", "--num_processes", "two", "train-head"], "invalid int value: 'two'"),
    ):
        assert main(arguments) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["none.yaml"], "configuration file none.yaml does not exist"),
        (["--sampling.temperature=-1"], "temperature must be 0 or larger"),
        ([], "the embedded pair is trained by one process"),
    ],
)
def test_a_launch_is_refused_once_before_it_starts_processes(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what it tells its processes
    assert main(["launch", "cpu-2", "pipeline", *given]) == 2
    said = capfd.readouterr().err
    assert said.count("error: ") == 1
    assert message in said


def test_a_launch_for_gpus_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Started(BaseException):
        """What takes the place of this process."""

    def start(*_: object) -> None:
        raise Started

    outside = dict(os.environ)
    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = ["make-rollouts", f"--output={tmp_path}"]
    recipe += [f"--models.{name}={tmp_path}/pair/{name}" for name in ("target", "draft")]
    own = tmp_path / "own.yaml"  # as `accelerate config` writes it
    own.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    for profile, says in (("multi_gpu", True), ("cpu", False), (str(own), False)):
        monkeypatch.setattr(os, "environ", dict(outside))
        with pytest.raises(Started):
            main(["launch", profile, "--num_processes=1", *recipe])
        assert ("no GPU is here" in capsys.readouterr().err) is says
    # accelerate starts one process of several, silently
    for profile, *options in ((str(own),), ("multi_gpu", "--cpu")):
        monkeypatch.setattr(os, "environ", dict(outside))
        assert main(["launch", profile, *options, *recipe, "--plan"]) == 0
        assert "this is one process" in capsys.readouterr().out


def test_control_characters_are_spelt_out_and_other_letters_stay() -> None:
    assert visible("a\x1b[2J\r\x07\x9b\udcff") == "a\\x1b[2J\\r\\x07\\x9b\\udcff"
    assert visible("ligne\n\tété ★ 龘 [bold]") == "ligne\n\tété ★ 龘 [bold]"


def test_the_wheel_holds_every_module_and_data_file_and_no_tests(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    ).stdout.splitlines()
    if not listed:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"
    present = [name for name in listed if (ROOT / name).is_file()]
    for name in present:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    build += ["--no-index", "--quiet", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(tmp_path / f"draftsmith-{__version__}-py3-none-any.whl")
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    folders = ("specdata/", "distill/", "heads/", "eval/", "recipes/", "launch/")
    assert inside == {name for name in present if name.startswith(folders)}
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"draftsmith = recipes.command:main" in wheel.read(entry_points)
    wheel.extractall(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-m", "recipes.command", "launch", "zero3.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=True,
    )
    assert done.stdout == f"{tmp_path}/installed/launch/zero3.json\n"
