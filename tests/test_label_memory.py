"""Labelling long rows over a large vocabulary fits, whatever the length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "label_memory.py"


@pytest.mark.slow
def test_memory_does_not_grow_with_length_times_vocabulary() -> None:
    case = {"length": 1536, "top_p": 1.0, "top": 8}
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--case", json.dumps(case)],
        capture_output=True,
        text=True,
        check=True,
    )
    # The logits of one model alone would be 768 MiB in float32, with V = 131072.
    assert json.loads(done.stdout)["peak_mib"] < 512
