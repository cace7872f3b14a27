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
    assert model.coefficients == pytest.approx(best, abs=0.01)
    assert model.coefficients == pytest.approx((-0.5, 0.4), abs=0.05)


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
        w, z = np.array(model.coefficients), np.array([1.0, x])
        error = accepted - sigmoid(float(w @ z))
        assert h @ (w - np.linalg.solve(h, hw)) == pytest.approx(error * z, abs=1e-6)
        chance = sigmoid(float(w @ z))
        fisher = chance * (1 - chance) * np.outer(z, z)
        added.append((fisher, (h + fisher) @ w - hw))


def test_old_outcomes_are_forgotten_and_silence_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "MEMORY", 300.0)
    model = OnlineLogistic((0.0, 0.5))
    for seed, truth in enumerate([(1.5, 0.1), (-3.0, 0.6)]):
        for each in zip(*outcomes(*truth, 3000, seed), strict=True):
            model.observe(*each)
        assert model.accept(4.0) == pytest.approx(sigmoid(truth[0] + 4.0 * truth[1]), abs=0.05)
    before = model.coefficients
    assert model.accept(2.0) == sigmoid(before[0] + 2.0 * before[1])
    assert model.coefficients == before
