"""The sweep command: published heads, ours without each ingredient, and less data, in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import heads.together
from eval.analysis.sweep import (
    Material,
    data_heads,
    feature_heads,
    main,
    paper_heads,
    train_all,
)
from heads.config import HeadConfig
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored, of_split
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
def test_the_sweep_compares_every_head_and_rival_on_every_prompt_set(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(folder / "labels"), "--draft", str(folder / "draft"), "--out", str(tmp_path)]
    command += ["--rows", "16", "--epochs", "2", "--depths", "0", "1", "--weights", "1", "6"]
    assert main(command) == 0
    stored = json.loads((tmp_path / "sweep.json").read_text())
    printed = capsys.readouterr().out
    expected = {f"paper: w={w} D={d}" for w in (1, 6) for d in (0, 1)}
    expected |= {"features: ours", "features: without hidden", "features: numbers alone"}
    expected |= {"features: one stage", "data: 4 rollouts a set", "data: a alone"}
    rivals = {"fixed", "confidence", "entropy", "cumulative", "logit", "margin", "numbers"}
    bounds = {"oracle", "perfect head", "perfect, no lag", "perfect, ex ante"}
    rows = {row["rule"]: row for row in stored["table"]}
    assert rows.keys() >= expected | rivals | bounds
    for name in expected:
        assert name in printed
        assert rows[name]["kl"] > 0
        assert rows[name]["sets"].keys() == {"all", "a", "b"}
    assert rows["fixed"]["kl"] is None
    # The published heads are replayed at the paper's thresholds, and nothing beats the oracle.
    settings = {r["setting"] for r in stored["sets"]["a"] if r["rule"] == "paper: w=6 D=1"}
    assert settings == {"h=0.1", "h=0.3", "h=0.5", "h=0.7", "h=0.9", "cost rule"}
    for name in ("all", "a", "b"):
        speeds = {rule: row["sets"][name]["speed"] for rule, row in rows.items()}
        assert max(speeds, key=speeds.__getitem__) == "oracle"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    ours = stored["heads"]["features: ours"]
    assert ours["dev"].keys() == set(HeadConfig.model_validate({"kind": "immediate"}).moments)
    assert ours["train_rows"] == 32
    # A head of two sweeps is one head.
    assert (tmp_path / "immediate-16" / "ours" / "metrics.json").is_file()
    assert not (tmp_path / "immediate-16" / "16-rollouts-a-set").exists()


def test_a_sweep_that_is_asked_for_again_trains_only_what_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = load_stored(folder / "labels")
    splits = (of_split(labels, split, folder) for split in ("train", "dev", "test"))
    draft = LlamaForCausalLM.from_pretrained(folder / "draft")
    material = Material(draft, SAMPLING, *splits, seed=0)
    trained = []
    step = heads.together._Group._step

    def counted(self: Any, pupils: Any, rows: Any) -> None:
        trained.append({pupil.name for pupil in pupils})
        step(self, pupils, rows)

    monkeypatch.setattr(heads.together._Group, "_step", counted)
    first = train_all(paper_heads([0, 1], [6.0], 16, 2), material, tmp_path)
    assert {frozenset(names) for names in trained} == {frozenset({"w=6-D=0", "w=6-D=1"})}
    trained.clear()
    assert train_all(paper_heads([0, 1], [6.0], 16, 2), material, tmp_path) == first
    assert not trained
    more = train_all(paper_heads([0, 1], [6.0, 12.0], 16, 2), material, tmp_path)
    assert {frozenset(names) for names in trained} == {frozenset({"w=12-D=0", "w=12-D=1"})}
    assert {name: more[name] for name in first} == first


def test_sweeps_name_what_they_vary() -> None:
    published = paper_heads([0, 1, 2, 3, 4], [1.0, 3.0, 6.0, 12.0], 512, None)
    assert len({swept.folder for swept in published}) == 20
    assert {swept.group for swept in published} == {"specdec++-512"}
    ours = {swept.name: swept.config for swept in feature_heads(512, None, 2)}
    whole = HeadConfig.model_validate({"kind": "immediate", "draws": 2})
    assert ours.pop("ours") == whole
    changed: Mapping[str, HeadConfig] = ours
    for name, config in changed.items():
        different = {
            key for key, value in config.model_dump().items() if value != getattr(whole, key)
        }
        assert different == ({"moments"} if name == "one stage" else {"features"}), name
    data = data_heads([128, 512], 512, ["maths", "code"], None, 2)
    assert [swept.group for swept in data] == [
        "immediate-128",
        "immediate-512",
        "immediate-512-maths",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-seconds", "0"], "must be positive"),
        (["--rows", "0"], "at least one rollout"),
        (["--depths", "-1"], "depth"),
    ],
)
def test_unusable_arguments_end_with_status_2(
    flags: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(folder / "labels"), "--draft", str(folder / "draft"), "--out", str(tmp_path)]
    assert main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
