"""The logistic model of acceptance on logit(max q): fitted on labels, learning from rounds."""

import json
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import pytest
from scipy.optimize import check_grad
from scipy.special import expit, logit

from benchmarks.papers.traces import acceptance_traces
from eval.drafting.stopping import logistic
from eval.drafting.stopping.logistic import (
    INFORMATION,
    Calibration,
    Logit,
    OnlineLogistic,
    fit_calibration,
    sigmoid,
)
from eval.drafting.stopping.recorded import RecordedTokens
from recipes.config import PipelineConfig, parse
from recipes.experiment import CALIBRATION, fitted_values
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset
from specdata.storage.files import write_json
from specdata.storage.resume import Settings
from specdata.storage.schema import LABELS
from tests.support.acceptance import labeller, rollouts
from tests.support.tiny import tiny_llama


def test_the_fit_is_where_the_penalised_likelihood_is_flat() -> None:
    chance = np.random.default_rng(1)
    q_max, accept = chance.uniform(0.1, 0.9, 60), chance.uniform(size=60)
    z = logit(q_max)

    def loss(w: np.ndarray) -> float:
        odds = w[0] + w[1] * z
        fit = -(accept * np.log(expit(odds)) + (1 - accept) * np.log(expit(-odds))).sum()
        return float(fit + ((w - np.array([0.0, 1.0])) ** 2).sum() / 2)

    calibration = fit_calibration(accept, q_max)
    best = np.array([calibration.intercept, calibration.slope])
    # check_grad compares a gradient, here none, with finite differences.
    assert check_grad(loss, lambda w: np.zeros(2), best) < 1e-3
    assert all(loss(best) < loss(best + step) for step in 0.05 * np.eye(2))


@pytest.mark.parametrize("accept", [0.0, 1.0])
@pytest.mark.parametrize("q_max", [1.0, 0.3])
def test_labels_or_distributions_that_are_all_alike_give_finite_coefficients(
    accept: float, q_max: float
) -> None:
    calibration = fit_calibration(np.full(500, accept), np.full(500, q_max))
    assert np.isfinite([calibration.intercept, calibration.slope]).all()
    assert abs(calibration.accept(q_max) - accept) < 0.1


def test_nothing_to_fit_takes_max_q_itself() -> None:
    assert fit_calibration(np.zeros(0), np.zeros(0)) == Calibration()


def test_a_rule_is_fitted_on_all_positions_and_on_no_padding() -> None:
    q_max = np.array([[0.9, 0.6, 0.3], [0.8, 0.7, 0.0]])
    accept = np.array([[1.0, 0.4, 0.1], [0.9, 0.2, 0.0]])
    tokens = RecordedTokens(lengths=np.array([3, 2]), q=q_max, q_max=q_max)
    expected = fit_calibration(
        np.array([1.0, 0.4, 0.1, 0.9, 0.2]), np.array([0.9, 0.6, 0.3, 0.8, 0.7])
    )
    fitted = Logit().with_fit(Logit.fit(tokens, accept))
    assert fitted.model == expected != Calibration()
    given = Logit(calibration=(1.0, 2.0))
    assert given.with_fit(Logit.fit(tokens, accept)) == given


def evaluated(folder: Path, *flags: str) -> PipelineConfig:
    methods = "[{name: plain, decoder: plain}, {name: a, stop: logit}]"
    return parse([f"--output={folder}", "--eval.methods", methods, *flags], "").config


def test_an_evaluation_fits_on_held_out_labels_once_and_says_so_without_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, draft = evaluated(tmp_path), tiny_llama(1, vocab=8)
    rows = labeller(tiny_llama(0, vocab=8), draft, SamplingConfig())(rollouts(3, vocab=8))
    for row, split in zip(rows, ("train", "dev", "dev"), strict=True):
        row["split"] = split
    settings = {"sampling": asdict(SamplingConfig())}
    fill_dataset(tmp_path / "labels", LABELS, Settings(settings), [lambda: rows], lambda done: None)
    fitted = fitted_values(config)
    write_json(config.eval_folder / CALIBRATION, fitted)
    dev = datasets.Dataset.from_list(rows[1:])
    traces = acceptance_traces(dev, draft=draft, sampling=config.sampling)
    # Stored labels are float32.
    expected = Logit.fit(traces.tokens, traces.accept)["calibration"]
    assert fitted["calibration"] == pytest.approx(expected, rel=1e-5)
    assert fitted.keys() == {"calibration", "rows"}
    assert fitted["rows"] == 2
    # A resumed evaluation must not fit again: the last bits could differ.
    (tmp_path / "labels" / "shard-00000.parquet").unlink()
    assert fitted_values(config) == json.loads(json.dumps(fitted))
    alone = evaluated(tmp_path, "--head", "null", "--eval.folder", "eval-other")
    assert fitted_values(alone) == {"rows": 0}
    assert "no labels" in capsys.readouterr().out


def test_each_outcome_moves_it_to_the_maximum_of_its_likelihood_and_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the gradient vanishes: the pull of what is remembered is that of the outcome.

    Remembered are the first coefficients, and each outcome's H and H w, the less the older it is.
    """
    monkeypatch.setattr(logistic, "MEMORY", 5.0)
    first, prior = np.array([0.3, 0.8]), np.diag(INFORMATION)
    model, added = OnlineLogistic((0.3, 0.8)), list[tuple[np.ndarray, np.ndarray]]()
    for x, accepted in [(2.0, False), (-8.0, True), (30.0, False), (0.0, True)] * 3:
        ages = 0.8 ** np.arange(len(added), 0, -1)
        h = prior + sum(age * each for age, (each, _) in zip(ages, added, strict=True))
        hw = prior @ first + sum(age * each for age, (_, each) in zip(ages, added, strict=True))
        model.observe(x, accepted)
        w, z = np.array([model.intercept, model.slope]), np.array([1.0, x])
        assert model.accept(x) == sigmoid(float(w @ z))
        assert (model.intercept, model.slope) == tuple(w), "asking changes nothing"
        error = accepted - sigmoid(float(w @ z))
        assert h @ (w - np.linalg.solve(h, hw)) == pytest.approx(error * z, abs=1e-6)
        chance = sigmoid(float(w @ z))
        fisher = chance * (1 - chance) * np.outer(z, z)
        added.append((fisher, (h + fisher) @ w - hw))
