"""SpecDec++'s grid of heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.config import parse
from recipes.papers.measurements import ModelPair, replay
from specdata.labels import make
from specdata.storage.dataset import load_stored

SETS = "[{name: instruct, split: train}, {name: maths, split: train}, {name: maths, split: dev}, "
SETS += "{name: instruct, split: dev}]"
SPEC = {
    "sampling": {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    "depths": [0, 1],
    "weights": [1.0, 6.0],
    "training": {"epochs": 2},
    "rows": 8,
    "judged_rows": 6,
    "lengths": [2, 6],
    "thresholds": [0.3, 0.7],
    "rules": ["entropy"],
    "draft_seconds": 0.0234,
    "target_seconds": 0.112,
    "alone_seconds": 0.108,
}


@pytest.mark.slow
def test_each_head_learns_once_of_one_set_under_its_sampling_and_is_judged_on_all(
    trained_pair: Path, tmp_path: Path
) -> None:
    given = [f"--output={tmp_path}", "--toy", "null", "--draft", "null", "--rollouts.sets", SETS]
    given += ["--models.target", str(trained_pair / "target"), "--rollouts.max_new_tokens", "12"]
    command = parse([*given, "--models.draft", str(trained_pair / "draft")])
    pair, folder = ModelPair(command.config, command.given, tmp_path), tmp_path / "grid"
    records = replay(pair, SPEC, folder)
    heads = [row for row in records if row.get("rule") == "head"]
    assert len(heads) == 4 * 3 * 2, "heads, sets with that of all, thresholds"
    assert sum(row["best_h"] for row in heads) == 4 * 3
    assert sum(row["best"] for row in records if "best" in row) == 4 * 3, "rules, sets"
    assert sum("eval_kl" in row for row in records) == 4
    labels = load_stored(folder / "run/labels")
    assert make.sampling_of(folder / "run/labels").top_k == 50
    rows = list(zip(labels["split"], labels["dataset"], strict=True))
    counted = {each: rows.count(each) for each in rows}
    dev = {("dev", "maths"): 6, ("dev", "instruct"): 6}
    assert counted == {("train", "instruct"): 8, **dev}
    for row in (row for row in records if "set" in row):  # by the paper's times, over its target
        counts, seconds = row["counts"], 1 / row["tokens_per_second"]["value"]
        spent = 0.0234 * counts["n_draft"] + 0.112 * counts["n_target"]
        assert spent / counts["tokens"] == pytest.approx(seconds)
        assert row["speedup"]["value"] == pytest.approx(0.108 / seconds)
    assert {r["gain"]["value"] for r in records if r.get("best") and r["rule"] == "fixed"} == {0.0}
    trained = [json.loads(path.read_text())["train_rows"] for path in folder.glob("depth*/m*.json")]
    assert trained == [8] * 4
    # Asked for again, it trains nothing.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("depth*/model.safetensors")}
    assert len(before) == 4
    assert replay(pair, SPEC, folder) == records
    assert {path: path.stat().st_mtime_ns for path in before} == before
