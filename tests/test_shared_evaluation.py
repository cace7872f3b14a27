"""Evaluations over several processes: shared out, killed, and the same as those of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eval.measuring.results import Results, read_results
from eval.measuring.sharing import is_measuring, who_measures
from recipes.run_eval import RECIPE
from tests.random_pair import random_pair

ROOT = Path(__file__).parent.parent
TIMED = "eval-timed"
RUNS = {
    "eval-sampled": ["--eval.batch", "2"],
    TIMED: ["--eval.max_new_tokens", "6"],
}
PROMPTS = 32
PLAIN = {"name": "plain", "decoder": "plain"}
METHODS = [
    PLAIN,
    {"name": "logit", "stop": "logit", "threshold": 0.5},
    {"name": "tree", "verifier": "traversal", "drafter": "tree", "widths": [2, 2]},
]


@pytest.mark.parametrize(
    ("devices", "timing"),
    [(0, [0]), (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])],
)
def test_times_are_measured_by_one_process_a_device_of_one_machine_and_counts_by_all(
    devices: int, timing: list[int]
) -> None:
    """Two machines of four processes each."""
    places = [(rank, rank % 4) for rank in range(8)]
    for timed, expected in ((True, timing), (False, list(range(8)))):
        assert expected == [
            rank
            for rank, local in places
            if is_measuring(timed=timed, rank=rank, local_rank=local, devices=devices)
        ]
    said = who_measures(timed=True, processes=8, local_processes=4, devices=devices)
    assert f"by {len(timing)} of 8 processes" in said
    assert ("each on a GPU of its own" if devices else "they share the CPU") in said


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair and its configuration."""
    folder = tmp_path_factory.mktemp("pair")
    random_pair(folder)
    sets = [{"name": name, "split": "test", "count": PROMPTS // 2} for name in ("maths", "code")]
    config = {
        "output": "out",
        "models": {"target": str(folder / "target"), "draft": str(folder / "draft")},
        "toy": None,
        "draft": None,
        "head": None,
        "rollouts": {"sets": [{"name": "maths", "split": "train", "count": 4}]},
        "eval": {
            "sets": sets,
            "methods": METHODS,
            "max_new_tokens": 24,
            "verifiers": 0,
        },
    }
    (folder / "pair.yaml").write_text(yaml.safe_dump(config))
    return folder


def arguments(pair: Path, folder: Path, name: str) -> list[str]:
    """The command line of one of `RUNS`."""
    whole = ["--config", str(pair / "pair.yaml"), "--output", str(folder / "out")]
    return [*whole, "--eval.folder", name, *RUNS[name]]


@pytest.fixture(scope="module")
def alone(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evaluations of counts, made by one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name in RUNS:
        if name != TIMED:
            assert RECIPE.run(arguments(pair, folder, name)) == 0
    return folder


@pytest.fixture(scope="module")
def launched(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All of `RUNS`, by two processes of a launcher; their folder, and what they printed."""
    folder = tmp_path_factory.mktemp("launched")
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", "launch/cpu-2.yaml", "tests/drive_eval.py"]
    lines = json.dumps([arguments(pair, folder, name) for name in RUNS])
    done = subprocess.run(
        [*launcher, lines], cwd=ROOT, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def records(folder: Path, name: str) -> dict[str, bytes]:
    """The stored prompts of an evaluation, and the texts of some."""
    here = folder / "out" / name
    return {path.name: path.read_bytes() for path in [*here.glob("prompts/*"), *here.glob("sam*")]}


def results_of(folder: Path, name: str) -> Results:
    return read_results(folder / "out" / name / "results.json")


@pytest.mark.exhaustive
def test_several_processes_store_the_bytes_of_one(alone: Path, launched: tuple[Path, str]) -> None:
    (folder, shown), name = launched, "eval-sampled"
    assert len(records(folder, name)) == PROMPTS + 1
    assert records(folder, name) == records(alone, name)
    ours, theirs = results_of(folder, name), results_of(alone, name)
    assert ours.runs == theirs.runs, "intervals too"
    # On a busy machine one process may have done all before the other began.
    assert {*ours.environment.devices} == {*theirs.environment.devices} == {"cpu"}
    assert shown.count("prompts are shared out among 2 processes") == 1
    assert not (folder / "out" / name / ".progress").exists()


@pytest.mark.exhaustive
def test_on_a_shared_cpu_times_are_measured_by_one_process_and_it_is_said(
    launched: tuple[Path, str],
) -> None:
    folder, shown = launched
    results = results_of(folder, TIMED)
    assert results.timed
    assert results.environment.devices == ["cpu"]
    assert "times are measured by 1 of 2 processes, because they share the CPU" in shown
