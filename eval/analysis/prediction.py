"""How well acceptance is predicted: metrics with intervals, over any set of drafted tokens.

Labels are probabilities, never 0/1, and metrics are those of `heads.loss`, of tokens that may count
differently often. Intervals are the 95 %
bootstrap of this project (`eval.measuring.metrics`): prompts are resampled, not tokens, and
predictors that are compared share the resamples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Interval, bootstrap_weights, interval
from eval.measuring.records import Strict

Reals = NDArray[np.float64]
Ids = NDArray[np.int64]

GROUPS = 256
"""Scores are told apart this finely in resamples, where ranking all tokens each time is slow; the
AUROC itself tells all of them apart."""
BINS = 15
"""Of equal width: those of the expected calibration error (`heads.loss.CALIBRATION_BINS`)."""
EDGE = 1e-6
"""Predictions are kept this far from 0 and 1, whose KL from another label is infinite."""


class Scores(Strict):
    """How well some tokens' acceptance is predicted.

    Attributes:
        tokens: how many; where they do not count once each, the sum of their counts, rounded.
        kl: mean binary KL(label || prediction) in nats; a perfect predictor scores 0.
        auroc: chance that an accepted token outscores a rejected one; None if one kind is absent.
        brier: mean squared difference between prediction and label.
        ece: expected calibration error. Resampling adds noise to every bin, so the interval of a
            well calibrated predictor lies too high.
        mean_accept: mean label.
        mean_predicted: mean prediction.
    """

    tokens: int
    kl: Interval
    auroc: Interval | None
    brier: Interval
    ece: Interval
    mean_accept: float
    mean_predicted: float


class Bin(Strict):
    """Tokens whose predictions fall into one bin: a point of a reliability diagram.

    Attributes:
        tokens: how many.
        predicted: their mean prediction.
        accepted: their mean label, with its interval.
    """

    tokens: int = Field(ge=1)
    predicted: float
    accepted: Interval


@dataclass(frozen=True, slots=True)
class Tokens:
    """Drafted tokens that predictors are compared on.

    Args:
        accept: (n,) labels in [0, 1].
        prompt: (n,) number of the prompt that a token comes from, from 0.
        counts: (n,) how often each token counts, such as the chance that it is drafted at all.
        weights: (B, P) how often each prompt occurs in each resample.
    """

    accept: Reals
    prompt: Ids
    counts: Reals
    weights: Reals

    @classmethod
    def of(cls, accept: Reals, prompt: Ids, counts: Reals | None = None) -> Tokens:
        """Tokens of any prompts, which are numbered anew; each counts once by default.

        Raises:
            ValueError: if there are none, or sizes differ.
        """
        counts = np.ones_like(accept) if counts is None else counts
        if accept.ndim != 1 or accept.shape != prompt.shape or accept.size == 0:
            raise ValueError(
                f"labels and prompts must both be (n,), n >= 1, got {accept.shape}, {prompt.shape}"
            )
        names, number = np.unique(prompt, return_inverse=True)
        return cls(accept, number, counts, _weights(len(names)))

    def sums(self, values: Reals, group: Ids | None = None, groups: int = 1) -> Reals:
        """(P, groups) sums of (n,) values over the tokens of each prompt in each group."""
        values = values * self.counts
        prompts = self.weights.shape[1]
        cell = self.prompt * groups + (0 if group is None else group)
        return _bincount(cell, values, prompts * groups).reshape(prompts, groups)

    def mean(self, values: Reals) -> Interval:
        """The mean of (n,) values."""
        sums = np.concatenate([self.sums(values), self.sums(np.ones_like(values))], axis=1)
        whole, resampled = sums.sum(axis=0), self.weights @ sums
        with np.errstate(invalid="ignore"):  # resamples may leave all of them out
            return _interval(float(whole[0] / whole[1]), resampled[:, 0] / resampled[:, 1])


@cache
def _weights(prompts: int) -> Reals:
    return bootstrap_weights(prompts)


def scores(tokens: Tokens, predicted: Reals) -> Scores:
    """Judge predictions.

    Args:
        tokens: what is predicted.
        predicted: (n,) probabilities.
    """
    import torch

    from heads.loss import binary_kl

    accept, counts = tokens.accept, tokens.counts
    odds = torch.logit(torch.from_numpy(predicted), eps=EDGE)
    return Scores(
        tokens=round(counts.sum()),
        kl=tokens.mean(binary_kl(odds, torch.from_numpy(accept)).numpy()),
        auroc=_auroc(tokens, predicted),
        brier=tokens.mean(np.square(predicted - accept)),
        ece=_calibration_error(tokens, predicted),
        mean_accept=float(np.average(accept, weights=counts)),
        mean_predicted=float(np.average(predicted, weights=counts)),
    )


def reliability(tokens: Tokens, predicted: Reals) -> list[Bin]:
    """The bins of a reliability diagram that hold tokens, by increasing prediction.

    Args:
        tokens: what is predicted.
        predicted: (n,) probabilities.
    """
    index = _bin_of(predicted)
    bins = []
    for i in np.unique(index):
        chosen = index == i
        some = replace(
            tokens,
            accept=tokens.accept[chosen],
            prompt=tokens.prompt[chosen],
            counts=tokens.counts[chosen],
        )
        mean = float(np.average(predicted[chosen], weights=some.counts))
        bins.append(Bin(tokens=int(chosen.sum()), predicted=mean, accepted=some.mean(some.accept)))
    return bins


def _bin_of(predicted: Reals) -> Ids:
    return np.asarray((predicted * BINS).astype(np.int64).clip(0, BINS - 1))


def _calibration_error(tokens: Tokens, predicted: Reals) -> Interval:
    gaps = tokens.sums(predicted - tokens.accept, _bin_of(predicted), BINS)
    counts = tokens.sums(np.ones_like(predicted))
    value = np.abs(gaps.sum(axis=0)).sum() / counts.sum()
    resampled = np.abs(tokens.weights @ gaps).sum(axis=1) / (tokens.weights @ counts)[:, 0]
    return _interval(float(value), resampled)


def _auroc(tokens: Tokens, predicted: Reals) -> Interval | None:
    labels = tokens.accept, 1.0 - tokens.accept
    _, rank = np.unique(predicted, return_inverse=True)
    value = _ranked(*(_bincount(rank, label * tokens.counts) for label in labels))
    if np.isnan(value):
        return None
    group = _grouped(predicted)
    groups = int(group.max()) + 1
    accepted, rejected = (tokens.sums(label, group, groups) for label in labels)
    # What ties within a group cost the whole, they cost the resamples, too.
    lost = float(value - _ranked(accepted.sum(axis=0), rejected.sum(axis=0)))
    resampled = _ranked(tokens.weights @ accepted, tokens.weights @ rejected)
    return _interval(float(value), lost + resampled)


def _ranked(accepted: Reals, rejected: Reals) -> Reals:
    """Soft AUROC of masses (..., G) in groups by increasing score: (...); NaN if undefined."""
    below = rejected.cumsum(axis=-1) - rejected
    pairs = accepted.sum(axis=-1) * rejected.sum(axis=-1)
    won = (accepted * (below + 0.5 * rejected)).sum(axis=-1)
    undefined = np.full_like(won, np.nan)
    return np.asarray(np.divide(won, pairs, out=undefined, where=pairs > 0.0))


def _grouped(scores: Reals) -> Ids:
    """At most `GROUPS` groups of about equal size in increasing order; ties stay together."""
    _, rank, counts = np.unique(scores, return_inverse=True, return_counts=True)
    if len(counts) <= GROUPS:
        return np.asarray(rank, dtype=np.int64)
    first = counts.cumsum() - counts  # of each score, in the order of all tokens
    return np.asarray((first * GROUPS // len(scores))[rank], dtype=np.int64)


def _bincount(index: Ids, values: Reals, length: int = 0) -> Reals:
    return np.asarray(np.bincount(index, weights=values, minlength=length), dtype=np.float64)


def _interval(value: float, resampled: Reals) -> Interval:
    low, high = interval(resampled)
    return Interval(value, low, high)
