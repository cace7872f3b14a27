"""Metrics of predicted acceptance, with intervals over prompts.

Labels are probabilities, never 0/1, and metrics are those of `heads.loss`. Prompts are resampled,
not tokens, and predictors that are compared share the resamples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eval.measuring.intervals import Interval, resamples
from eval.measuring.records import Strict

Reals = NDArray[np.float64]
Ids = NDArray[np.int64]

GROUPS = 256
"""Into so many groups scores are told apart in resamples, where ranking all tokens each time is
slow; the AUROC itself tells all of them apart."""
BINS = 15
"""Of equal width: those of the expected calibration error (`heads.loss.CALIBRATION_BINS`)."""
EDGE = 1e-6
"""Predictions are kept this far from 0 and 1, whose KL from another label is infinite."""


class Scores(Strict):
    """Quality of the predictions of some tokens' acceptance.

    Attributes:
        tokens: number of tokens.
        kl: mean binary KL(label || prediction) in nats; a perfect predictor scores 0.
        auroc: chance that an accepted token outscores a rejected one; None if one kind is absent.
        ece: expected calibration error. Resampling adds noise to every bin, so the interval of a
            well calibrated predictor lies too high.
        mean_accept: mean label.
        mean_predicted: mean prediction.
    """

    tokens: int
    kl: Interval
    auroc: Interval | None
    ece: Interval
    mean_accept: float
    mean_predicted: float


def scores(accept: Reals, predicted: Reals, prompt: Ids) -> Scores:
    """Judge predictions.

    Args:
        accept: (n,) labels in [0, 1].
        predicted: (n,) probabilities.
        prompt: (n,) any number of the prompt that a token comes from.

    Raises:
        ValueError: if there are no tokens, or sizes differ.
    """
    import torch

    from heads.loss import binary_kl

    if accept.ndim != 1 or not accept.shape == prompt.shape == predicted.shape or not accept.size:
        raise ValueError(
            "labels, predictions and prompts must all be (n,), n >= 1, got"
            f" {accept.shape}, {predicted.shape}, {prompt.shape}"
        )
    names, number = np.unique(prompt, return_inverse=True)
    weights = resamples(len(names))  # (1 + B, P)

    def sums(values: Reals, group: Ids | int = 0, groups: int = 1) -> Reals:
        """Of the tokens of each group in each resample: (1 + B, groups)."""
        cells = np.bincount(number * groups + group, values, len(names) * groups)
        return np.asarray(weights @ cells.reshape(len(names), groups))

    count = sums(np.ones_like(accept))[:, 0]
    odds = torch.logit(torch.from_numpy(predicted), eps=EDGE)
    kl = sums(binary_kl(odds, torch.from_numpy(accept)).numpy())[:, 0]
    bins = (predicted * BINS).astype(np.int64).clip(0, BINS - 1)
    gaps = np.abs(sums(predicted - accept, bins, BINS)).sum(axis=1)
    labels = accept, 1.0 - accept
    _, rank = np.unique(predicted, return_inverse=True)
    exact = _auroc(*(np.bincount(rank, label).astype(np.float64) for label in labels))
    group = rank * GROUPS // (int(rank.max()) + 1)  # ties stay together
    grouped = _auroc(*(sums(label, group, GROUPS) for label in labels))
    return Scores(
        tokens=len(accept),
        kl=Interval.of(kl / count),
        # What ties within a group cost the whole, they cost the resamples, too.
        auroc=None if np.isnan(exact) else Interval.of(grouped + (exact - grouped[0])),
        ece=Interval.of(gaps / count),
        mean_accept=float(accept.mean()),
        mean_predicted=float(predicted.mean()),
    )


def _auroc(accepted: Reals, rejected: Reals) -> Reals:
    """Soft AUROC of masses (..., G) in groups by increasing score: (...); NaN if undefined."""
    below = rejected.cumsum(axis=-1) - rejected
    pairs = accepted.sum(axis=-1) * rejected.sum(axis=-1)
    won = (accepted * (below + 0.5 * rejected)).sum(axis=-1)
    undefined = np.full_like(won, np.nan)
    return np.asarray(np.divide(won, pairs, out=undefined, where=pairs > 0.0))
