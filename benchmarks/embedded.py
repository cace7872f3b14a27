"""The embedded pair, for the other benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIG = "recipes/configs/toy-full.yaml"
DEMO = Path("runs/toy-full")
"""Its output."""


def make_demo() -> None:
    """Make the pair and its distilled draft, as `CONFIG` says."""
    print(f"part of {DEMO} is not there: making it (some minutes)", file=sys.stderr)
    for recipe in ("make_rollouts", "train_draft"):
        command = [sys.executable, f"recipes/{recipe}.py", "--config", CONFIG]
        subprocess.run(command, check=True)
