"""Each program of the laboratory still runs, at its smallest size.

Those that other files run are not repeated: table, real_target and papers by their tests, engines
and real_engines in `make test-engines`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("forwards", ["--seconds", "1", "--threads", "1"]),
        ("growth", ["--base", "none", "--works", "^(decode|generate|train)", "--most", "2048"]),
        ("growth", ["--base", "none", "--works", "^(prompts|rollouts)", "--most", "20000"]),
    ],
    ids=["forwards", "growth of lengths", "growth of rows"],
)
def test_a_program_of_the_laboratory_measures_everything(
    program: str, options: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, f"benchmarks/{program}.py", *options, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=580)
    measured = json.loads(out.read_text())
    assert "target" in measured or measured["rows"]
    assert None not in [row["now"] for row in measured.get("rows", [])]  # ended by an error
