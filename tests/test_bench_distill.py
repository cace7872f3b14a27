"""The benchmark of distillation: what it computes without drawing, trains and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.distill_figures.judge import (
    VERIFIERS,
    expected_rounds,
    prefix_acceptance,
)
from distill.toy import language_model, save_tokenizer, train_tokenizer
from eval.verifiers import VERIFIERS as RULES_OF_DECODING
from specdata.toy.corpus import corpus
from tests.oracles import (
    TabularModel,
    chain_drafts,
    conditioned,
    continuations,
    random_model,
)

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.exhaustive  # the laboratory
DOMAINS = ("instruct", "maths", "code")


def enumerated_rounds(p: TabularModel, q: TabularModel, tokens: int, k: int, name: str) -> float:
    """Expected rounds of decoding so many tokens: every draft, every outcome, every next token."""
    verifier = RULES_OF_DECODING[name].make()

    def rounds_after(prefix: tuple[int, ...]) -> float:
        left = tokens - len(prefix)
        if left == 0:
            return 0.0
        length, total = min(k, left - 1), 1.0
        target, draft = (conditioned(model, prefix, length) for model in (p, q))
        for weight, tree in chain_drafts(draft, length):
            drafted = tuple(tree.token_list)
            rows = torch.stack([target[drafted[:depth]] for depth in range(length + 1)])
            verdict = verifier(tree, rows)
            for node, stop in enumerate(verdict.stop.tolist()):
                for token, mass in enumerate(verdict.bonus[node].tolist()):
                    if stop * mass > 0:
                        further = rounds_after((*prefix, *drafted[:node], token))
                        total += weight * stop * mass * further
        return total

    return rounds_after(())


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("k", [1, 2])
def test_expected_rounds_along_the_targets_texts_are_those_of_decoding(
    verifier: str, k: int
) -> None:
    tokens = 4
    p, q = (random_model(2, tokens, seed, zeros=0.2) for seed in (3, 4))
    texts = continuations(p, tokens)
    ratios = [
        [float(q[text[:i]][x] / p[text[:i]][x]) for i, x in enumerate(text)] for _, text in texts
    ]
    lengths = [tokens] * len(texts)
    rounds, drafted = expected_rounds(
        prefix_acceptance(np.array(ratios), lengths, tokens, verifier), lengths, k
    )
    weights = np.array([weight for weight, _ in texts])
    assert weights @ rounds == pytest.approx(enumerated_rounds(p, q, tokens, k, verifier))
    assert ((rounds <= drafted + 1) & (drafted <= k * rounds)).all()


def test_from_a_pair_to_figures_in_one_command(tmp_path: Path) -> None:
    """A random pair is enough; a second run adds a part and uses what the first one made."""
    tokenizer = train_tokenizer(corpus(seed=0, examples_per_family=40), 600)
    for seed, name in enumerate(("target", "draft")):
        model = language_model(tokenizer, layers=2 - seed, width=16, seed=seed)
        model.save_pretrained(tmp_path / "pair" / name)
        save_tokenizer(tokenizer, tmp_path / "pair" / name)
    settings = {
        "--run": "run",
        "--pair": "pair",
        "--out": "out/distill.json",
        "--train": "6 5 4",
        "--dev": "2",
        "--test-made": "3",
        "--test": "2",
        "--rollouts": "2",
        "--seeds": "1",
        "--objectives": "tv",
        "--counts": "1 2",
        "--passes": "1",
        "--timed": "1",
    }
    given = [word for name, values in settings.items() for word in (name, *values.split())]
    script = [sys.executable, "-m", "benchmarks.distill_figures", *given]
    script += ["--starts", "2 of the target's layers, even", "1 x 128, 512 tokens"]

    def report(*parts: str) -> dict[str, Any]:
        done = subprocess.run(
            [*script, "--parts", *parts],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        read: dict[str, Any] = json.loads((tmp_path / "out/distill.json").read_text("utf-8"))
        return read

    first = report("objectives", "size")
    assert len(first["objectives"]["rows"]) == 2 * 2
    check(*first["objectives"]["rows"].values(), *first["size"]["rows"].values())
    for row in first["objectives"]["rows"].values():
        assert row["made"]["cpu_seconds"] > 0
    for row in first["size"]["rows"].values():
        assert row["cost"] == pytest.approx(0.182 * row["relative"])
    drafts = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/drafts").rglob("*")}
    second = report("data")
    assert second["objectives"] == first["objectives"]
    assert {path: path.stat().st_mtime_ns for path in drafts} == drafts
    check(second["data"]["mixes"]["maths alone"])
    assert (tmp_path / "out/distill.png").read_bytes().startswith(b"\x89PNG")


def check(*rows: dict[str, Any]) -> None:
    """Gains are over one base, means are of the seeds, and token verification emits no more."""
    for domain in DOMAINS:
        found = [row["domains"][domain] for row in rows]
        bases = [each["acceptance"]["value"] - each["gain"]["value"] for each in found]
        assert bases == pytest.approx([bases[0]] * len(bases))
        for row, each in zip(rows, found, strict=True):
            of_seeds = row["acceptance_of_seeds"][domain]
            assert each["acceptance"]["value"] == pytest.approx(np.mean(of_seeds))
            for k in ("4", "8"):
                token, block = (each["tokens_per_round"][name][k]["value"] for name in VERIFIERS)
                assert 1.0 <= token <= block + 1e-9
                assert block <= int(k) + 1
