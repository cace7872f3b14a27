"""The sweep command: SpecDec++'s grid on few rollouts, its winner on all."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from eval.analysis.sweep import main
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
def test_the_grid_is_trained_on_few_rollouts_and_its_fastest_head_on_all(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(folder / "labels"), "--draft", str(folder / "draft"), "--out", str(tmp_path)]
    command += ["--rows", "4", "--epochs", "2", "--depths", "0", "1", "--weights", "1", "6"]
    assert main(command) == 0
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert {(row["depth"], row["weight"]) for row in stored["grid"]} == {*product((0, 1), (1, 6))}
    for row in stored["grid"]:
        assert [point["h"] for point in row["points"]] == [0.1, 0.3, 0.5, 0.7, 0.9]
        assert row["speed"] == max(point["speed"] for point in row["points"])
        assert row["kl"] == row["head"]["kl_raw"] > 0
    won, best = max(stored["grid"], key=lambda row: float(row["speed"])), stored["best"]
    assert (best["depth"], best["weight"]) == (won["depth"], won["weight"])
    trained = {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/m*.json")
    }
    assert {name: each["train_rows"] for name, each in trained.items()} == {
        **{f"depth-{depth}-weight-{weight}": 8 for depth in (0, 1) for weight in (1, 6)},
        best["folder"]: 32,
    }
    # Asked for again, it trains nothing.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/model.safetensors")}
    printed = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == printed
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_times_that_are_not_positive_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path / "labels"), "--draft", "d", "--out", str(tmp_path / "out")]
    assert main([*command, "--draft-seconds", "0"]) == 2
    assert "must be positive" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
