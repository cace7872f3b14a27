"""The benchmark of acceptance heads: what it trains, chooses and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.head_figures.data import DOMAINS
from benchmarks.head_figures.variants import ABLATION, KINDS, SHIPPED
from distill.toy import language_model, save_tokenizer, train_tokenizer
from specdata.toy.corpus import corpus

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.exhaustive  # the laboratory
REPORT = ROOT / "docs" / "heads.json"


def test_from_rollouts_to_figures_in_one_command(tmp_path: Path) -> None:
    """A random pair is enough; a second run uses what the first one made."""
    tokenizer = train_tokenizer(corpus(seed=0, examples_per_family=40), 300)
    for seed, name in enumerate(("pair/target", "draft")):
        model = language_model(tokenizer, layers=1, width=16, seed=seed)
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tokenizer, tmp_path / name)
    script = [sys.executable, "-m", "benchmarks.head_figures", "--run", "run"]
    script += ["--pair", "pair", "--draft", "draft", "--out", "out/heads.json"]
    small = "--train 6 5 4 --dev 4 --test 4 --draws 2 --epochs 1"
    script += [*small.split(), "--parts", "goals", "kinds"]
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
    kinds = report["kinds"]
    assert kinds.keys() == {variant.name for variant in KINDS}
    for domain in DOMAINS:
        judged_on = {(of[domain]["tokens"], of[domain]["kl_constant"]) for of in kinds.values()}
        assert len(judged_on) == 1, "the same labels judge all kinds"


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
    """What the head saves is what the rules' seconds a token say."""
    for domain in DOMAINS:
        found = report["domains"][domain]
        seconds = {name: row["seconds_per_token"] for name, row in found["rules"].items()}
        names = {"saving_over_best_k": "fixed", "saving_over_SpecDec++": "SpecDec++"}
        saved = {name: 1 - seconds["head"] / seconds[rival] for name, rival in names.items()}
        assert {name: found[name]["value"] for name in saved} == pytest.approx(saved)
    assert report["environment"]["git_commit"]


def test_the_committed_report_is_of_the_shipped_head() -> None:
    report = json.loads(REPORT.read_text())
    check(report)
    measured = report["settings"]["head"]  # of a commit with more settings
    shipped = SHIPPED.model_dump(mode="json", exclude={"mixing"})  # which this kind does not read
    assert all(measured[name] == value for name, value in shipped.items())
    assert all(report["domains"][domain]["prompts"] >= 500 for domain in DOMAINS)
    assert {*DOMAINS} == report["domains"].keys()
    named = [row["variant"] for row in report["ablation"]["rows"]]
    assert {variant.name for variant in ABLATION} <= {*named}
