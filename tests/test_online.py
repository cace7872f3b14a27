"""The logistic model that learns while decoding."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from eval.drafting.stopping import logistic
from eval.drafting.stopping.logistic import INFORMATION, OnlineLogistic, sigmoid


def outcomes(
    intercept: float, slope: float, count: int, seed: int
) -> tuple[list[float], list[bool]]:
    chance = np.random.default_rng(seed)
    x = chance.gamma(1.0, 3.0, count).clip(max=30.0)
    accepted = chance.random(count) < 1 / (1 + np.exp(-intercept - slope * x))
    return x.tolist(), accepted.tolist()


def test_without_forgetting_it_ends_near_the_maximum_of_the_whole_likelihood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "MEMORY", 1e12)
    x, accepted = outcomes(-0.5, 0.4, 4000, seed=0)
    model = OnlineLogistic((0.0, 1.0))
    for each in zip(x, accepted, strict=True):
        model.observe(*each)
    inputs, labels = np.array(x), np.array(accepted)

    def loss(w: np.ndarray) -> float:
        odds = w[0] + w[1] * inputs
        apart = INFORMATION[0] * w[0] ** 2 + INFORMATION[1] * (w[1] - 1.0) ** 2
        return float((np.logaddexp(0.0, odds) - labels * odds).sum() + 0.5 * apart)

    best = minimize(loss, np.zeros(2)).x
    assert model.coefficients == pytest.approx(best, abs=0.02)
    assert model.coefficients == pytest.approx((-0.5, 0.4), abs=0.15)


def test_one_outcome_moves_it_to_the_maximum_of_the_posterior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "MEMORY", 1e12)
    for x, accepted in ((2.0, False), (-8.0, True), (30.0, False), (0.0, True)):
        model = OnlineLogistic((0.3, 0.8))
        model.observe(x, accepted)
        (w, v), (a, d) = model.coefficients, INFORMATION
        error = accepted - sigmoid(w + v * x)
        # There the gradient vanishes: the pull of the first coefficients is that of the outcome.
        assert a * (w - 0.3) == pytest.approx(error, abs=1e-6)
        assert d * (v - 0.8) == pytest.approx(error * x, abs=1e-6)


def test_old_outcomes_are_forgotten_and_silence_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "MEMORY", 300.0)
    model = OnlineLogistic((0.0, 0.5))
    for seed, truth in enumerate([(1.5, 0.1), (-3.0, 0.6)]):
        for each in zip(*outcomes(*truth, 3000, seed), strict=True):
            model.observe(*each)
        assert model.accept(4.0) == pytest.approx(sigmoid(truth[0] + 4.0 * truth[1]), abs=0.12)
    before = model.coefficients
    assert model.accept(2.0) == sigmoid(before[0] + 2.0 * before[1])
    assert model.coefficients == before
