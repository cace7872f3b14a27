"""SpecDec++'s grid of heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes.config import parse
from recipes.papers.measurements import ModelPair, replay
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset
from specdata.storage.files import fingerprint
from specdata.storage.resume import Settings
from specdata.storage.schema import LABELS
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama

SAMPLING = SamplingConfig()
SPLITS = ("train", "train", "dev", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft and labels of two prompt sets: 16 training rollouts, 8 dev and 8 test each."""
    root = tmp_path_factory.mktemp("sweep")
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(1, vocab=12).float()
    draft.save_pretrained(root / "draft")
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> object:
        ids = torch.randint(2, 12, (14,), generator=generator).tolist()
        made = {"example_id": f"e{number}", "dataset": "ab"[number % 2], "sample": 0, "turn": 0}
        made |= {"split": SPLITS[number // 2 % 4], "finish": "length"}
        return made | {"prompt_ids": ids[:3], "completion_ids": ids[3:]}

    settings: dict[str, object] = {"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}}
    settings["draft"] = {"name": "draft", "revision": fingerprint(str(root / "draft"))}
    rows = labeller(target, draft, SAMPLING)([row(number) for number in range(64)])  # type: ignore[misc]
    fill_dataset(root / "labels", LABELS, Settings(settings), [lambda: rows], lambda done: None)
    return root


@pytest.mark.slow
def test_each_head_of_the_grid_is_trained_once_on_few_rollouts_and_replayed_at_each_threshold(
    folder: Path, tmp_path: Path
) -> None:
    given = [f"--output={folder}", "--toy", "null", "--draft", "null"]
    given += ["--models.target", str(folder / "draft"), "--models.draft", str(folder / "draft")]
    pair = ModelPair(parse(given, "").config, {}, tmp_path)
    spec = {"depths": [0, 1], "weights": [1, 6], "epochs": 2, "thresholds": [0.3, 0.7], "rows": 4}
    spec |= {"judged_rows": 256, "head": "grid/heads/depth-1-weight-6", "rules": ["fixed", "head"]}
    spec |= {"draft_seconds": 0.1, "target_seconds": 1.0}
    records = replay(pair, spec, tmp_path / "grid")
    grid = [row for row in records if row.get("grid")]
    assert len(grid) == 4 * 3 * 2, "heads, sets with that of all, thresholds"
    assert sum(row["best"] for row in grid) == 4 * 3
    # The recommended head, as the grid has it and as it is replayed among the rules.
    for one in (row for row in grid if (row["depth"], row["weight"]) == (1, 6)):
        (same,) = [
            row
            for row in records
            if row.get("rule") == "head"
            and row["set"] == one["set"]
            and row["method"] == f"h={one['threshold']:g}"
        ]
        assert same["speedup"] == pytest.approx(one["speedup"])
    heads = tmp_path / "grid" / "heads"
    trained = [json.loads(path.read_text())["train_rows"] for path in heads.glob("*/m*.json")]
    assert trained == [8] * 4, "of two prompt sets"
    # Asked for again, it trains nothing.
    before = {path: path.stat().st_mtime_ns for path in heads.glob("*/model.safetensors")}
    assert len(before) == 4
    assert replay(pair, spec, tmp_path / "grid") == records
    assert {path: path.stat().st_mtime_ns for path in before} == before
