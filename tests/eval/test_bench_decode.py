"""The benchmark of decoding on models of published shapes: its pair and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.shaped_pair import PROMPT, TEXT, shaped_pair
from specdata.probability import SamplingConfig, overlap, probabilities

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.exhaustive  # the laboratory


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_the_pair_agrees_as_often_as_asked(acceptance: float) -> None:
    """On other text than the noise was set with."""
    target, draft = shaped_pair("tiny", acceptance, seed=0)
    ids = torch.randint(3, 512, (1, PROMPT + TEXT), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        p, q = (
            probabilities(model(ids).logits[0, PROMPT:], SamplingConfig())
            for model in (target, draft)
        )
    assert abs(float(overlap(p, q).mean()) - acceptance) < 0.05


def test_a_tiny_pair_is_measured_against_transformers_and_the_limit(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    subprocess.run(
        [sys.executable, "benchmarks/decode.py", "--shapes", "tiny", "--engine", "captured",
         "--max-new-tokens", "12", "--repeats", "1", "--out", str(out)],
        cwd=ROOT, check=True, timeout=300, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    report = json.loads(out.read_text())
    for length in (4, 8):
        row = report["limit"]["lengths"][f"K={length}"]
        forwards = length * row["draft_step_ms"] + row["target_ms"]
        assert row["round_ms"] == pytest.approx(forwards)
        speed = report["speeds"][f"K={length}"]
        assert 1 < speed["tokens_per_round"] <= length + 1
        limit = 1e3 * speed["tokens_per_round"] / row["round_ms"]
        assert row["share"] == pytest.approx(speed["tokens_per_second"]["value"] / limit)
