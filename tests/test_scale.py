"""The benchmark of one process and two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale import GOALS, lines, scaled
from tests.random_pair import random_pair

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "scale.json"


def test_a_gain_is_the_median_of_the_ratios_of_neighbours() -> None:
    """So a machine that slows down meanwhile slows both: medians of each alone would say 1.5."""
    found = scaled({1: [100.0, 50.0, 10.0], 2: [200.0, 75.0, 20.0]})
    assert found["gain"] == {"median": 2.0, "low": 1.5, "high": 2.0}
    assert found["processes_1"] == {"median": 50.0, "low": 10.0, "high": 100.0}


def test_the_figures_of_two_processes_in_the_documents_are_those_of_their_file() -> None:
    document = (ROOT / "launch" / "README.md").read_text()
    block = re.search(r"```\n(rollouts .*?)\n```", document, re.DOTALL)
    if not FIGURES.is_file():
        assert block is None, f"figures without {FIGURES.name}"
        return
    assert block is not None, "launch/README.md must have what `scale.py --show` prints"
    assert block[1].splitlines() == lines(json.loads(FIGURES.read_text()))


@pytest.mark.slow
def test_one_process_and_two_work_in_turns(tmp_path: Path) -> None:
    random_pair(tmp_path / "pair")
    script = [sys.executable, ROOT / "benchmarks" / "scale.py", "--small", "--repeats", "1"]
    script += ["--pair", tmp_path / "pair", "--stages", "rollouts", "draft", "--profiles"]
    out = tmp_path / "scale.json"
    done = subprocess.run([*script, "--out", out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["goals"] == GOALS
    assert len(report["speed"]["startup_seconds"]) == 2
    for stage in ("rollouts", "draft"):
        found = report["speed"][stage]
        assert found["tokens"] > 0
        assert all(found[f"processes_{count}"]["median"] > 0 for count in (1, 2))
    shown = subprocess.run([*script[:2], "--show", out], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == lines(report)
    assert set(shown.stdout.splitlines()) <= set(done.stdout.splitlines())
