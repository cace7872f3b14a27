"""The whole pipeline as a user runs it: real processes, real models, real interruptions."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from eval.measuring.results import check_metrics, read_results
from eval.reporting.verdict import verdict
from recipes.command import RECIPES
from specdata.storage.dataset import load_stored, read_manifest
from specdata.storage.files import digests
from tests.support import stages
from tests.support.documents import blocks
from tests.support.light_imports import run_without_heavy_libraries
from tests.support.trainings import assert_trained_alike
from tests.support.two_processes import free_port, launch

ROOT = Path(__file__).parents[2]
FINETUNE = {"epochs": 1, "max_length": 64}
CONFIG = {
    **stages.CONFIG,
    "toy": stages.CONFIG["toy"]
    | {"examples_per_family": 60, "target_steps": 40, "draft_steps": 30},
    "logits": None,
    "rollouts": {
        "max_new_tokens": 24,
        "shard_size": 8,
        "sets": [
            {"name": "instruct", "split": "train", "count": 24},
            {"name": "instruct", "split": "dev", "count": 8},
            {"name": "code", "split": "test", "count": 4},
        ],
    },
    "draft": {"epochs": 2, "save_steps": 2, "batch_size": 4, "finetune": FINETUNE},
    "labels": {"shard_size": 8},
    "head": {"depth": 1, "epochs": 12, "batch_size": 8, "save_steps": 2},
    "eval": {
        "max_new_tokens": 16,
        "sets": [
            {"name": "instruct", "split": "test", "count": 3},
            {"name": "maths", "split": "test", "count": 2},
        ],
        "methods": [
            {"name": "plain", "decoder": "plain"},
            {"name": "K=3", "length": 3},
            {"name": "confidence", "stop": "confidence", "threshold": 0.4},
            {"name": "head", "stop": "head", "threshold": 0.5},
            {"name": "transformers", "decoder": "assisted", "length": 3},
        ],
    },
}
pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive


def command(folder: Path, recipe: str, *arguments: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pair.yaml").write_text(yaml.safe_dump(CONFIG))
    script = str(ROOT / "recipes" / recipe)
    return [sys.executable, script, "--config", "pair.yaml", *arguments]


def run(folder: Path, recipe: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call a recipe in this process, in a folder."""
    given = command(folder, recipe, *arguments)[2:]
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "12")
    with chdir(folder), redirect_stdout(out), redirect_stderr(error):
        status = RECIPES[recipe.removesuffix(".py").replace("_", "-")].run(given)
    said = [stream.buffer.getvalue().decode() for stream in (out, error)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(given, status, *said)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(
        command(folder, "pipeline.py"),
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        encoding="ascii",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for noise in ("Warning", "WARNING", "deprecated"):
        assert noise not in done.stderr + done.stdout
    for stage in ("pair", "rollouts", "draft", "labels", "head", "eval", "release"):
        assert f"{stage}: done in" in done.stdout
    assert "\r" not in done.stderr + done.stdout, "progress in a file is lines"
    return folder


def made(folder: Path, *stages: str) -> dict[str, str]:
    """The digests of all files that some stages made, times left out."""
    found = digests(folder / "out").items()
    return {name: digest for name, digest in found if name.partition("/")[0] in stages}


def result(folder: Path) -> dict[str, object]:
    """Everything that a run decides, times left out."""
    counts = [
        (run.dataset, run.name, run.tokens, run.n_target, run.n_draft, run.n_discarded)
        for run in read_results(folder / "out" / "eval" / "results.json").runs
    ]
    return {**made(folder, "pair", "rollouts", "draft", "labels", "head"), "counts": counts}


def with_pair(finished: Path, folder: Path) -> Path:
    """A folder in which only the pair is made: one process trains it."""
    shutil.copytree(finished / "out" / "pair", folder / "out" / "pair")
    return folder


@pytest.mark.smoke
def test_every_stage_leaves_what_the_next_one_needs(finished: Path) -> None:
    out = finished / "out"
    rollouts = load_stored(out / "rollouts")
    assert len(rollouts) == 36
    assert set(rollouts["dataset"]) == {"instruct", "code"}
    labels = load_stored(out / "labels")
    assert labels["example_id"][:] == rollouts["example_id"][:]
    draft = json.loads((out / "draft" / "run.json").read_text())["results"]
    assert draft["acceptance_after"] > draft["acceptance_before"]
    for name in ("draft", "head"):
        assert load_file(out / "release" / name / "model.safetensors")
    results = read_results(out / "eval" / "results.json")
    check_metrics(results)
    assert (results.datasets(), len(results.runs)) == (["instruct", "maths"], 10)
    sentence = verdict(results)
    assert sentence.startswith("No verdict, for too few prompts (instruct ")
    page = (out / "eval" / "report.html").read_text()
    cards = [(out / "release" / name / "README.md").read_text() for name in ("head", "draft")]
    for text in (page, *cards):
        assert sentence in text
    for stage in ("pair", "rollouts", "draft", "labels", "head", "eval", "release"):
        assert json.loads((out / stage / "run.json").read_text())["finished"]


def test_the_python_example_of_the_documents_runs(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for example in blocks("docs/python.md", "python"):  # each alone
        assert "runs/toy" in example
        exec(compile(example.replace("runs/toy", f"{finished}/out"), "python.md", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_a_warm_run_does_nothing_again(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (finished / "out").rglob("*")}
    script = str(ROOT / "recipes" / "pipeline.py")
    shown = run_without_heavy_libraries(script, "--config", "pair.yaml", cwd=finished)
    assert shown.count("already done") == 8
    steps = [line.split(maxsplit=1)[0] for line in shown.splitlines()[-3:]]
    assert steps == ["look", "serve", "upload"]
    assert {path: path.stat().st_mtime_ns for path in (finished / "out").rglob("*")} == before


# --- launched

# Counts of one method, which the main process makes in a few seconds.
QUICK = ["--eval.batch", "4", "--method", "K=3", "--method", "head"]
# Seconds within which docs/launching.md says that a lost node's peers end, for a busy machine.
SOON = 180


def start(folder: Path, profile: str, *options: str) -> subprocess.Popen[str]:
    arguments = command(folder, "pipeline.py", *QUICK)[2:]
    return launch(folder, profile, *options, "pipeline", *arguments)


def start_nodes(folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Two launchers that meet over the loopback, as on two machines."""
    meet = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [start(folder, "multi_node", *meet, "--machine_rank", rank) for rank in "01"]


def finish(launchers: list[subprocess.Popen[str]]) -> None:
    for said in [launcher.communicate()[1] for launcher in launchers]:
        assert all(launcher.returncode == 0 for launcher in launchers), said


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def two_nodes(finished: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_pair(finished, tmp_path_factory.mktemp("two_nodes"))
    finish(start_nodes(folder, port))
    return folder


@pytest.mark.parametrize(
    "form",
    ["cpu-2", *(pytest.param(form, marks=EXHAUSTIVE) for form in ("zero2", "zero3", "two nodes"))],
)
def test_every_launch_makes_what_one_process_makes(
    form: str, finished: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rollouts and labels byte for byte, draft and head up to rounding.

    The draft's rounding is in its labels, so one process makes labels and head of that draft again.
    """
    if form == "two nodes":
        launched = request.getfixturevalue("two_nodes")
    else:
        launched = with_pair(finished, tmp_path / "launched")
        finish([start(launched, form)])
    for stage in ("rollouts", "draft", "labels", "head"):
        assert json.loads((launched / "out" / stage / "run.json").read_text())["processes"] == 2
    assert made(launched, "rollouts") == made(finished, "rollouts")
    drafts = (each / "out/draft/model" for each in (launched, finished))
    assert_trained_alike(*drafts, finished / "out/pair/draft")
    shutil.copytree(launched / "out", tmp_path / "out")
    for stage in ("labels", "head"):
        shutil.rmtree(tmp_path / "out" / stage)
    done = run(tmp_path, "train_head.py")
    assert done.returncode == 0, done.stderr
    assert made(launched, "labels") == made(tmp_path, "labels")
    both, alone = (
        load_file(folder / "out/head/model/model.safetensors") for folder in (launched, tmp_path)
    )
    for name, value in alone.items():
        assert (both[name] - value).abs().max() < 1e-4, name


@EXHAUSTIVE
def test_after_lost_nodes_the_same_command_ends_with_the_same_bytes(
    finished: Path, two_nodes: Path, port: int, tmp_path: Path
) -> None:
    """The second while they train, then the first while they label, each for itself."""
    folder = with_pair(finished, tmp_path)
    for lost, pattern in (
        (1, "draft/model.training/checkpoint-*/complete.json"),
        (0, "labels/shard-*.parquet"),  # once the second has seen the first at work
    ):
        nodes = start_nodes(folder, port)
        while not list((folder / "out").glob(pattern)):
            assert all(node.poll() is None for node in nodes), "it ended before it could be killed"
            time.sleep(0.005)
        launcher = psutil.Process(nodes[lost].pid)
        workers = launcher.children(recursive=True)
        if lost == 0:  # not between two stages, where the second would wait for it for ten minutes
            for process in workers:
                process.suspend()
            time.sleep(2)  # the second looks twice a second
        for process in (launcher, *workers):
            process.kill()
        nodes[1 - lost].communicate(timeout=SOON)
        assert nodes[1 - lost].returncode == 1
        nodes[lost].communicate()
        if lost == 0:  # what can be made without the first is made
            assert read_manifest(folder / "out" / "labels")["finished"]
    finish(start_nodes(folder, port))
    assert result(folder) == result(two_nodes)
