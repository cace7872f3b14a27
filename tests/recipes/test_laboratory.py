"""Each program of the laboratory still runs, at its smallest size.

Those that other files run are not repeated: table, real_target and papers by their tests, engines
and real_engines in `make test-engines`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specdata.models import load_model
from specdata.target_heads import find_head
from tests.support.stages import CONFIG

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("forwards", ["--seconds", "1", "--threads", "1"]),
        ("growth", ["--works", "^(decode|generate|train)", "--most", "2048"]),
        ("growth", ["--works", "^(prompts|rollouts)", "--most", "20000"]),
        ("peers", ["--works", "first pass", "--repeats", "1"]),
    ],
    ids=["forwards", "growth of lengths", "growth of rows", "peers"],
)
def test_a_program_of_the_laboratory_measures_everything(
    program: str, options: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, f"benchmarks/{program}.py", *options, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=580)
    measured = json.loads(out.read_text())
    assert "target" in measured or measured["rows"]
    rows = measured.get("rows", [])
    assert None not in [row.get("now", row) for row in rows]  # ended by an error


@pytest.mark.exhaustive
def test_the_program_that_makes_a_target_with_a_head_feeds_the_one_that_compares_trainings(
    tmp_path: Path,
) -> None:
    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=580)

    pair = {"target": str(tmp_path / "pair/target"), "draft": str(tmp_path / "pair/draft")}
    config = tmp_path / "pair.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"output": str(tmp_path), "models": pair}))
    run("recipes/make_rollouts.py", "--config", str(config))
    target, out = tmp_path / "target", tmp_path / "out.json"
    smallest = ["--steps", "2", "--width", "32"]
    run("benchmarks/mtp_target.py", str(tmp_path), "--out", str(target), *smallest)
    assert load_model(str(target)).config.num_hidden_layers == find_head(str(target)).layers == 2
    smallest = ["--seconds", "1", "--rollouts", "8", "--prompts", "2"]
    run("benchmarks/mtp_training.py", str(target), *smallest, "--out", str(out))
    compared = json.loads(out.read_text())["compared"]
    assert all(figures["ours"]["tokens_per_call"]["value"] >= 1 for figures in compared.values())
