"""Memory that does not grow with positions times vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("work", "mib"),
    [
        ("labels", 512),  # the logits of one model alone would be 768 MiB in float32
        ("distillation", 1536),  # all logits, and what autograd makes of them, would be 3.3 GiB
    ],
)
def test_memory_does_not_grow_with_positions_times_vocabulary(work: str, mib: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.drive_memory", work],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) < mib
