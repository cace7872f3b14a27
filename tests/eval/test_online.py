"""The logistic model that learns while decoding."""

from __future__ import annotations

import numpy as np
import pytest

from eval.drafting.stopping import logistic
from eval.drafting.stopping.logistic import INFORMATION, OnlineLogistic, sigmoid


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
