"""Processes under a launcher, and jobs under SLURM, stop with a checkpoint and go on from it.

A head is trained by two processes: to the end, interrupted by a signal to the launcher, and in a
job that is queued again when its time is nearly up.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.command import LAUNCH, RECIPES
from tests.support.slurm import running_slurm, until, why_not
from tests.support.two_processes import launch
from tests.support.word_pair import with_train_and_dev

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((LAUNCH / "slurm").iterdir())
STEPS = 152
SAVED = 50


@pytest.fixture(scope="module")
def labelled(word_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pair.yaml whose rollouts and labels are made; its head is not."""
    folder = tmp_path_factory.mktemp("labelled")
    config = with_train_and_dev(word_pair, folder)
    # 32 rows
    config["head"] = {"depth": 1, "epochs": STEPS // 4, "batch_size": 8, "save_steps": SAVED}
    (folder / "pair.yaml").write_text(yaml.safe_dump(config))
    given = ["--config", str(folder / "pair.yaml"), "--output", str(folder / "out")]
    assert RECIPES["make-rollouts"].run(given) == 0
    assert RECIPES["train-head"].run([*given, "--head.epochs", "1"]) == 0
    shutil.rmtree(folder / "out" / "head")
    return folder


def start(labelled: Path, folder: Path) -> subprocess.Popen[str]:
    """Train the head in two processes, in a folder of its own."""
    if not (folder / "out").exists():
        shutil.copytree(labelled / "out", folder / "out")
    return launch(folder, "cpu-2", "train-head", "--config", str(labelled / "pair.yaml"))


@pytest.fixture(scope="module")
def uninterrupted(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start(labelled, folder)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return folder


def checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; 0 before there is one."""
    paths = (folder / "out" / "head" / "model" / "checkpoints").glob("checkpoint-*/complete.json")
    return max((int(path.parent.name.partition("-")[2]) for path in paths), default=0)


def assert_same_head(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "config.json", "metrics.json"):
        mine, other = (folder / "out" / "head" / "model" / name for folder in (ours, theirs))
        assert mine.read_bytes() == other.read_bytes(), name


@pytest.mark.exhaustive
def test_a_launcher_that_is_interrupted_leaves_a_checkpoint_of_all_processes(
    labelled: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    process = start(labelled, tmp_path)
    until(lambda: checkpoint(tmp_path) or process.poll() is not None, "a checkpoint", seconds=120)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    for rank in (0, 1):
        assert f"rank {rank}: SIGTERM: stopping at the next checkpoint" in said
        assert f"rank {rank}: interrupted: run the same command again to continue" in said
    assert SAVED <= checkpoint(tmp_path) < STEPS
    again = start(labelled, tmp_path)
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert_same_head(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck_has_nothing_to_say_about_the_scripts() -> None:
    assert len(SCRIPTS) == 6
    done = subprocess.run(
        ["shellcheck", "--external-sources", "--severity=style", *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_each_stage_has_a_script_that_is_queued_again_with_a_checkpoint() -> None:
    scripts = {path.stem: path.read_text() for path in SCRIPTS if path.suffix == ".sbatch"}
    recipes = {name: text.split("run_recipe ")[1].split() for name, text in scripts.items()}
    assert {name: recipe for name, (_, recipe, *_) in recipes.items()} == {
        "rollouts": "make-rollouts",
        "draft": "train-draft",
        "head": "train-head",
        "eval": "run-eval",
        "pipeline": "pipeline",
    }
    for name, text in scripts.items():
        assert (LAUNCH / f"{recipes[name][0]}.yaml").is_file()
        for line in ("--signal=B:USR1@300", "--requeue", "--open-mode=append"):
            assert f"#SBATCH {line}\n" in text


@pytest.mark.exhaustive
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_slurm_job_is_queued_again_with_a_checkpoint_and_ends_with_the_bytes_of_a_whole_run(
    labelled: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(labelled / "out", tmp_path / "out")
    programs = tmp_path / "bin"
    programs.mkdir()
    command = programs / "draftsmith"  # where it is not installed
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m recipes.command "$@"\n')
    command.chmod(0o755)
    log = tmp_path / "job.log"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    with running_slurm() as slurm:
        job = slurm(
            "sbatch",
            "--parsable",
            # The script asks for GPUs, and for more CPUs than there may be.
            *("--gpus-per-node=0", "--cpus-per-task=1", "--time=10"),
            *("--chdir", str(tmp_path), "--output", str(log)),
            *(str(LAUNCH / "slurm" / "head.sbatch"), "--config", str(labelled / "pair.yaml")),
            PATH=f"{programs}:{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            DRAFTSMITH_PROFILE="cpu-2",
            DRAFTSMITH_PROCESSES="2",
        )
        until(lambda: checkpoint(tmp_path), "the first checkpoint", said, 120)
        slurm("scancel", "--batch", "--signal=USR1", job)  # as SLURM does when time is nearly up
        until(lambda: slurm.job(job)["Restarts"] == "1", "the job's second turn", said)
        assert f"queueing job {job} again" in said()
        assert SAVED <= checkpoint(tmp_path) < STEPS
        assert "rank 1: SIGTERM: stopping at the next checkpoint" in said()
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        until(lambda: slurm.job(job)["JobState"] in ends, "the job's end", said, 180)
        assert slurm.job(job)["JobState"] == "COMPLETED", said()
    assert "head: continuing in" in said()
    assert_same_head(tmp_path, uninterrupted)
