"""The benchmark of acceptance heads: what it trains, chooses and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from benchmarks.head_figures.__main__ import RIVALS
from benchmarks.head_figures.data import DOMAINS, Data
from benchmarks.head_figures.replay import Recorded
from benchmarks.head_figures.variants import (
    ABLATION,
    SHIPPED,
)
from distill.toy import language_model
from eval.analysis.expectation import Times
from eval.analysis.traces import acceptance_traces
from heads import AcceptanceHead, BaseHead
from heads.immediate import ImmediateHead
from recipes.config import build
from specdata.probability import SamplingConfig
from specdata.toy.corpus import corpus
from specdata.toy.tokenizer import save_tokenizer, train_tokenizer
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.exhaustive  # the laboratory
SAMPLING = SamplingConfig(temperature=0.8)
TIMES = Times(0.2, 1.0)
REPORT = ROOT / "docs" / "heads.json"


def tiny_draft() -> LlamaForCausalLM:
    return tiny_llama(1, vocab=12).float()


@pytest.fixture(scope="module")
def rows() -> Dataset:
    """Labels with three draws a position of four rollouts a domain, of unequal lengths."""
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> dict[str, Any]:
        ids = torch.randint(2, 12, (17,), generator=generator).tolist()
        return {
            "example_id": f"{37 * number % 100:02}",
            "dataset": DOMAINS[number % 3],
            "split": "train",
            "sample": 0,
            "turn": 0,
            "finish": "length",
            "prompt_ids": ids[:3],
            "completion_ids": ids[3 : 9 + number % 7],
        }

    label = labeller(tiny_llama(0, vocab=12).float(), tiny_draft(), SAMPLING, draws=3)
    return Dataset.from_list([dict(each) for each in label([row(n) for n in range(12)])])  # type: ignore[misc]


def data_of(rows: Dataset) -> Data:
    sets = [{"name": "instruct", "split": "test", "count": 1}]
    config = build(
        {
            "output": "unused",
            "models": {"target": "t", "draft": "d"},
            "rollouts": {"sets": sets},
            "eval": {"sets": sets, "methods": [{"name": "plain", "decoder": "plain"}]},
        }
    )
    return Data(config, "t", tiny_draft(), SAMPLING, rows, rows, rows)


@pytest.mark.parametrize("kind", ["specdec++", "immediate"])
def test_features_that_are_computed_once_give_what_a_head_is_recorded_with(
    rows: Dataset, kind: str
) -> None:
    torch.manual_seed(0)
    head: BaseHead = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0)
    if kind == "immediate":
        decision_points = ("before", "drawn", "consumed")
        head = ImmediateHead(
            hidden_size=16, decision_points=decision_points, sampling=asdict(SAMPLING)
        )
    head.eval()
    ours = Recorded.of(data_of(rows), rows).with_head(head)
    theirs = acceptance_traces(rows, draft=tiny_draft(), sampling=SAMPLING, head=head)
    assert ours.tokens.head is not None
    assert theirs.tokens.head is not None
    for name in ("before", "drawn", "consumed"):
        mine, known = (getattr(each.tokens.head, name) for each in (ours, theirs))
        assert (mine is None) == (known is None)
        if mine is not None:
            np.testing.assert_allclose(mine, known, atol=1e-5)
    assert ours.tokens.head.rejection_weight == theirs.tokens.head.rejection_weight
    np.testing.assert_array_equal(ours.accept, theirs.accept)


def test_from_rollouts_to_figures_in_one_command(tmp_path: Path) -> None:
    """A random pair is enough; a second run uses what the first one made."""
    tokenizer = train_tokenizer(corpus(seed=0, examples_per_family=40), 300)
    for seed, name in enumerate(("pair/target", "draft")):
        model = language_model(tokenizer, layers=1, width=16, seed=seed)
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tokenizer, tmp_path / name)
    script = [sys.executable, "-m", "benchmarks.head_figures", "--run", "run"]
    script += ["--pair", "pair", "--draft", "draft", "--out", "out/heads.json"]
    script += [
        "--train",
        "6",
        "5",
        "4",
        "--dev",
        "4",
        "--test",
        "4",
        "--draws",
        "2",
        "--epochs",
        "1",
    ]
    script += ["--parts", "goals", "clock", "--prompts", "2"]
    for attempt in range(2):
        done = subprocess.run(
            script,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert ("rollouts: already done" in done.stdout) == bool(attempt)
    report = json.loads((tmp_path / "out" / "heads.json").read_text())
    check(report)
    for domain in DOMAINS:
        assert {"fixed", "head"} <= report["clock"][domain]["rules"].keys()


def test_the_committed_clock_report_holds_every_comparison_of_the_contract() -> None:
    report = json.loads((ROOT / "docs" / "heads_clock.json").read_text())
    for pair, compared in (
        ("demo", ("over_best_k", "over_best_rule")),
        ("smollm2", ("over_best_k", "over_best_rule", "over_dynamic_tree")),
    ):
        assert 0.0 < report[pair]["question_share"] < 1.0
        for name in compared:
            figure = report[pair][name]
            assert figure["low"] <= figure["value"] <= figure["high"]
            methods = [each["methods"] for each in report[pair]["evaluations"]]
            (speeds,) = [each for each in methods if {figure["method"], figure["rival"]} <= {*each}]
            head, rival = (speeds[figure[key]]["tokens_per_second"] for key in ("method", "rival"))
            assert figure["value"] == pytest.approx(1.0 - rival / head, abs=1e-6)


def check(report: dict[str, Any]) -> None:
    """The figures that are promised are there, each within its interval."""
    rivals = {f"saving_over_{rival}" for rival in RIVALS}
    keys = {"closes_logit_to_oracle", "saving_over_best_k", "auroc", "instructions_alone", *rivals}
    for domain in DOMAINS:
        for key in keys:
            figure = report["domains"][domain][key]
            assert figure["low"] <= figure["value"] <= figure["high"], (domain, key)
        assert report["domains"][domain]["best_k"] >= 1
    assert report["environment"]["git_commit"]


def test_the_committed_report_is_of_the_shipped_head() -> None:
    report = json.loads(REPORT.read_text())
    check(report)
    assert report["settings"]["head"] == SHIPPED.model_dump(mode="json")
    assert all(report["domains"][domain]["prompts"] >= 500 for domain in DOMAINS)
    assert {*DOMAINS} == report["domains"].keys()
    named = [row["variant"] for row in report["ablation"]["rows"]]
    # A run that is ended early leaves the first lines.
    assert named == [variant.name for variant in ABLATION][: len(named)]
    assert len(named) >= 12
