"""Evaluations over several processes: shared out, killed, and the same as those of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval.measuring.environment import who_measures
from eval.measuring.results import read_results
from recipes.config import build
from recipes.run_eval import RECIPE, Eval
from tests.support.random_pair import measured_only
from tests.support.stages import CONFIG

ROOT = Path(__file__).parents[2]
PROMPTS = 32
ON_CPU = {"target": {"device_map": "cpu"}}
METHODS = [
    {"name": "plain", "decoder": "plain"},
    {"name": "logit", "stop": "logit", "threshold": 0.5},
    {"name": "tree", "verifier": "traversal", "drafter": "tree", "widths": [2, 2]},
]


@pytest.mark.parametrize(
    ("devices", "timing"), [(0, [0]), (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])]
)
def test_times_are_measured_by_one_process_a_device_of_one_machine_and_counts_by_all(
    devices: int, timing: list[int]
) -> None:
    """Two machines of four processes each."""
    for timed, expected in ((True, timing), (False, list(range(8)))):
        found = [
            who_measures(
                timed=timed,
                rank=rank,
                local_rank=rank % 4,
                processes=8,
                local_processes=4,
                devices=devices,
            )
            for rank in range(8)
        ]
        assert [rank for rank, (joins, _) in enumerate(found) if joins] == expected
        (message,) = {message for _, message in found}
        if timed:
            assert f"by {len(timing)} of 8 processes" in message
            assert ("each on a GPU of its own" if devices else "they share the CPU") in message


def test_a_target_that_stays_on_the_cpu_is_timed_by_one_process_whatever_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = build(CONFIG | {"models": {**CONFIG["models"], "load": ON_CPU}})
    assert Eval(config).run() == {}  # what loads nothing measures nothing


def records(folder: Path) -> dict[str, bytes]:
    """The stored prompts of an evaluation."""
    return {path.name: path.read_bytes() for path in folder.glob("out/eval/prompts/*")}


@pytest.mark.exhaustive
def test_several_processes_store_the_bytes_of_one(tiny_pair: Path, tmp_path: Path) -> None:
    given = [*measured_only(tiny_pair, tmp_path), "--eval.methods", json.dumps(METHODS)]
    sets = [{"name": name, "split": "test", "count": PROMPTS // 2} for name in ("maths", "code")]
    given += ["--eval.sets", json.dumps(sets), "--eval.max_new_tokens", "24"]
    given += ["--eval.engine", "eager", "--eval.batch", "2", "--output"]
    assert RECIPE.run([*given, str(tmp_path / "alone" / "out")]) == 0
    launcher = [sys.executable, "-m", "recipes.command", "launch", "cpu-2", "run-eval"]
    done = subprocess.run(
        [*launcher, *given, str(tmp_path / "launched" / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert len(records(tmp_path / "alone")) == PROMPTS
    assert records(tmp_path / "launched") == records(tmp_path / "alone")
    ours, theirs = (
        read_results(tmp_path / name / "out" / "eval" / "results.json")
        for name in ("launched", "alone")
    )
    assert ours.runs == theirs.runs, "intervals too"
    # On a busy machine one process may have done all before the other began.
    assert {*ours.environment.devices} == {*theirs.environment.devices} == {"cpu"}
    assert done.stdout.count("prompts are shared out among 2 processes") == 1
    assert not (tmp_path / "launched" / "out" / "eval" / ".progress").exists()
