"""The logistic model of acceptance on logit(max q)."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from scipy.optimize import check_grad
from scipy.special import expit, logit

from eval.calibration import Calibration, calibrate, confidences, fit_calibration
from recipes import run_eval
from recipes.config import parse
from specdata.acceptance import label
from specdata.probability import SamplingConfig, probabilities
from specdata.schema import LABELS
from specdata.tables import fill_table
from tests.tiny import tiny_llama

ROW = {
    "example_id": "a",
    "dataset": "d",
    "split": "train",
    "sample": 0,
    "prompt_ids": [2, 3],
    "completion_ids": [5, 7, 4, 9, 2],
    "finish": "length",
}


def test_the_fit_finds_the_coefficients_that_made_the_labels() -> None:
    chance = np.random.default_rng(0)
    q_max = chance.uniform(0.05, 0.999, 40_000)
    odds = 1.5 + 0.4 * logit(q_max)
    soft = fit_calibration(expit(odds), q_max)
    assert (soft.intercept, soft.slope) == (pytest.approx(1.5, abs=1e-3), pytest.approx(0.4, 1e-2))
    coins = (chance.random(len(odds)) < expit(odds)).astype(np.float64)
    hard = fit_calibration(coins, q_max)
    assert (hard.intercept, hard.slope) == pytest.approx((1.5, 0.4), abs=0.1)


def test_the_fit_is_where_the_penalised_likelihood_is_flat() -> None:
    chance = np.random.default_rng(1)
    q_max, accept = chance.uniform(0.1, 0.9, 60), chance.uniform(size=60)
    z = logit(q_max)

    def loss(w: np.ndarray) -> float:
        odds = w[0] + w[1] * z
        fit = -(accept * np.log(expit(odds)) + (1 - accept) * np.log(expit(-odds))).sum()
        return float(fit + ((w - np.array([0.0, 1.0])) ** 2).sum() / 2)

    found = fit_calibration(accept, q_max)
    best = np.array([found.intercept, found.slope])
    # check_grad compares a gradient, here none, with finite differences.
    assert check_grad(loss, lambda w: np.zeros(2), best) < 1e-3
    assert all(loss(best) < loss(best + step) for step in 0.05 * np.eye(2))


@pytest.mark.parametrize("accept", [0.0, 1.0])
@pytest.mark.parametrize("q_max", [1.0, 0.3])
def test_labels_or_laws_that_are_all_alike_give_finite_coefficients(
    accept: float, q_max: float
) -> None:
    found = fit_calibration(np.full(500, accept), np.full(500, q_max))
    assert np.isfinite([found.intercept, found.slope]).all()
    assert abs(found.accept(q_max) - accept) < 0.1


def test_nothing_to_fit_gives_the_prior() -> None:
    assert fit_calibration(np.zeros(0), np.zeros(0)) == Calibration(0.0, 1.0)
    prior = Calibration(0.7, 0.3)
    found = fit_calibration(np.zeros(0), np.zeros(0), prior)
    assert (found.intercept, found.slope) == pytest.approx((0.7, 0.3))


def test_a_probability_stays_one_for_any_coefficients_and_any_law() -> None:
    for calibration in (Calibration(), Calibration(-900.0, 3.0), Calibration(900.0, 50.0)):
        for q_max in (0.0, 1e-9, 0.5, 1.0 - 1e-12, 1.0):
            assert 0.0 <= calibration.accept(q_max) <= 1.0
    assert Calibration().accept(0.3) == pytest.approx(0.3)


def test_what_are_no_probabilities_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must both be \(n,\)"):
        fit_calibration(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="accept must hold probabilities"):
        fit_calibration(np.array([1.5]), np.array([0.5]))
    with pytest.raises(ValueError, match="q_max must hold probabilities"):
        fit_calibration(np.array([0.5]), np.array([float("nan")]))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.7, 3, 0.9)])
def test_confidences_are_the_largest_probabilities_of_the_laws_that_labels_are_drawn_from(
    sampling: SamplingConfig,
) -> None:
    draft = tiny_llama(1, vocab=12)
    found = confidences(draft, ROW, sampling)
    text = ROW["prompt_ids"] + ROW["completion_ids"]  # type: ignore[operator]
    for place in range(5):
        with torch.no_grad():
            logits = draft(input_ids=torch.tensor([text[: 2 + place]])).logits[0, -1]
        assert found[place] == pytest.approx(float(probabilities(logits, sampling).max()))


def test_stored_and_recomputed_confidences_give_the_same_coefficients() -> None:
    target, draft = tiny_llama(0, vocab=12), tiny_llama(1, vocab=12)
    sampling = SamplingConfig()
    rows = [dict(label(target, draft, {**ROW, "sample": n}, sampling, seed=0)) for n in range(4)]  # type: ignore[typeddict-item]
    needed = ("prompt_ids", "completion_ids", "accept_prob")
    table = datasets.Dataset.from_list([{name: row[name] for name in needed} for row in rows])
    stored = [
        {**row, "log_q_max": np.log(confidences(draft, row, sampling)).tolist()} for row in rows
    ]
    one = calibrate(draft, table, sampling)
    other = calibrate(draft, datasets.Dataset.from_list(stored), sampling)
    assert (one.intercept, one.slope) == pytest.approx((other.intercept, other.slope), rel=1e-5)
    assert one != Calibration()


def test_an_evaluation_fits_on_held_out_labels_once_and_says_so_without_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny_llama(0, vocab=12), tiny_llama(1, vocab=12)
    sampling = SamplingConfig()
    rows = [
        dict(label(target, draft, {**ROW, "sample": n, "split": split}, sampling, seed=0))  # type: ignore[typeddict-item]
        for n, split in enumerate(("train", "dev", "dev"))
    ]
    fill_table(tmp_path / "labels", LABELS, {}, [lambda: rows], lambda done: None)
    config = parse([f"--output={tmp_path}"], "").config
    path = tmp_path / "calibration.json"
    found = run_eval._calibration(config, draft, path)
    expected = calibrate(draft, datasets.Dataset.from_list(rows[1:]), sampling)
    # Stored labels are float32.
    fitted = {"intercept": expected.intercept, "slope": expected.slope, "rows": 2}
    assert found == pytest.approx(fitted, rel=1e-5)
    # A resumed evaluation must not fit again: the last bits could differ.
    (tmp_path / "labels" / "shard-00000.parquet").unlink()
    assert run_eval._calibration(config, draft, path) == found
    alone = parse([f"--output={tmp_path}", "--head", "null"], "").config
    trusted = run_eval._calibration(alone, draft, tmp_path / "other.json")
    assert trusted == {"intercept": 0.0, "slope": 1.0, "rows": 0}
    assert "no labels" in capsys.readouterr().out
