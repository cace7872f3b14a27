"""Run Python in a process of its own and look at what it imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = {
    "accelerate",
    "datasets",
    "deepspeed",
    "matplotlib",
    "peft",
    "pyarrow",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
}


def run_without_heavy_libraries(*arguments: str, cwd: Path = ROOT) -> str:
    """Run Python, which must succeed without importing any of HEAVY; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # import time: self [us] | cumulative | imported package
    names = [line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line]
    assert "recipes.config" in names, "importtime lists what was imported"
    assert not HEAVY & {name.split(".")[0] for name in names}
    return done.stdout
