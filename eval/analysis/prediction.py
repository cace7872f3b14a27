"""The quality of a head's predictions on held-out rollouts, beside what needs no head.

Labels are probabilities, never 0/1, and metrics are those of `heads.loss`. Prompts are resampled,
not tokens, and predictors that are compared share the resamples.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Interval, resamples
from eval.measuring.records import Strict
from specdata.errors import ConfigError

if TYPE_CHECKING:  # what is stored is read without torch
    from collections.abc import Sequence
    from pathlib import Path

    import datasets
    from transformers import PreTrainedModel

    from eval.drafting.stopping.rule import StoppingRule
    from heads import BaseHead
    from specdata.sampling import SamplingConfig

Reals = NDArray[np.float64]
Ids = NDArray[np.int64]

GROUPS = 256
"""Groups that scores are told apart into in resamples, where ranking all tokens each time is slow;
the AUROC itself tells all of them apart."""
EDGE = 1e-6
"""Predictions are kept this far from 0 and 1, whose KL from another label is infinite."""
ROLLOUTS = 256
"""Most rollouts of a prompt set and split that are read."""


class Scores(Strict):
    """Quality of the predictions of some tokens' acceptance.

    Attributes:
        kl: mean binary KL(label || prediction) in nats; a perfect predictor scores 0.
        auroc: chance that an accepted token outscores a rejected one; None if one kind is absent.
        ece: expected calibration error. Resampling adds noise to every bin, so the interval of a
            well calibrated predictor lies too high.
    """

    tokens: int
    kl: Interval
    auroc: Interval | None
    ece: Interval
    mean_accept: float
    mean_predicted: float


class Prediction(Strict):
    """A predictor of acceptance, judged on rollouts of every prompt set.

    Attributes:
        predictor: "head"; or "constant" (the mean label), "logit" (the logistic model of max q) or
            "cumulative" (q of the token itself), each fitted on dev.
        lag: tokens that are drafted before it can tell.
        scores: of its calibrated probabilities, against min(1, p/q).
    """

    predictor: str
    lag: int = 0
    scores: Scores


class Predictions(Strict):
    """The predictors of acceptance that were judged.

    Attributes:
        judged_on: the split that figures are of: test, or dev where labels have no test rollouts,
            so that rivals look better than they are.
        rollouts: split -> how many were read.
    """

    reason: str = ""
    judged_on: Literal["test", "dev"] | None = None
    rollouts: dict[str, int] = Field(default_factory=dict)
    predictors: list[Prediction] = Field(default_factory=list)


def predictions(
    labels: datasets.Dataset, draft: PreTrainedModel, head: BaseHead, sampling: SamplingConfig
) -> Predictions:
    """Judge a head, and rivals that are fitted on dev, on labelled rollouts of its draft.

    Of each prompt set in dev and test the first `ROLLOUTS` are read.
    """
    from scipy.special import expit

    from eval.analysis.traces import acceptance_traces, first_rows
    from eval.drafting.stopping.logistic import fit_calibration

    rows = {split: first_rows(labels, split, ROLLOUTS) for split in ("dev", "test")}
    rows = {split: of_split for split, of_split in rows.items() if len(of_split)}
    if "dev" not in rows:
        return Predictions(reason="there are no held-out labels of split dev to fit rivals on")
    judged_on: Literal["test", "dev"] = "test" if "test" in rows else "dev"
    dev = acceptance_traces(rows["dev"])
    try:
        judged = acceptance_traces(rows[judged_on], draft=draft, sampling=sampling, head=head)
    except ConfigError as error:
        return Predictions(reason=str(error))
    tokens, inside, recorded = judged.tokens, judged.inside, judged.tokens.head
    assert recorded is not None
    number = np.unique(rows[judged_on]["example_id"][:], return_inverse=True)[1].astype(np.int64)
    prompt = np.broadcast_to(number[:, None], inside.shape)
    fitted = fit_calibration(dev.accept[dev.inside], dev.tokens.q_max[dev.inside])
    predicted: list[tuple[str, int, Any]] = [
        ("head", head.lag, expit(recorded.logits + math.log(head.rejection_weight))),
        ("logit", 0, fitted.accept(cast(Any, tokens.q_max))),
        ("cumulative", 0, tokens.q),
        ("constant", 0, np.full_like(judged.accept, dev.mean_accept())),
    ]
    predictors = []
    for name, lag, chances in predicted:
        found = scores(judged.accept[inside], chances[inside], prompt[inside])
        predictors.append(Prediction(predictor=name, lag=lag, scores=found))
    return Predictions(
        judged_on=judged_on,
        rollouts={split: len(each) for split, each in rows.items()},
        predictors=predictors,
    )


def predictions_on(
    folder: Path, draft: PreTrainedModel, head: BaseHead, sampling: SamplingConfig
) -> Predictions:
    """Judge a head on the labels in a folder, if they are of what this sampler draws."""
    from specdata.labels.make import are_greedy, load_labels, sampling_of

    if sampling_of(folder) != sampling:
        return Predictions(reason="labels were made under another sampler than the evaluation's")
    if are_greedy(folder):
        return Predictions(reason="labels are of likeliest tokens, and an evaluation draws")
    return predictions(load_labels(folder, sampling), draft, head, sampling)


def fitted_on(
    folder: Path, rules: Sequence[StoppingRule], draft: PreTrainedModel, sampling: SamplingConfig
) -> dict[str, Any]:
    """Parameters of stopping rules that fit the labels in a folder, if these are of drawn tokens.

    Beside them the number of labelled `rows` that were read: of split dev, because the draft was
    distilled on the others, where it is accepted more often.
    """
    from eval.analysis.traces import acceptance_traces
    from eval.drafting.stopping import fit_rules
    from specdata.labels.make import are_greedy, load_labels
    from specdata.storage.dataset import of_split

    if are_greedy(folder):
        return {"rows": 0}
    labels = of_split(load_labels(folder, sampling), "dev", folder)
    traces = acceptance_traces(labels, draft=draft, sampling=sampling)
    return {**fit_rules(rules, traces.tokens, traces.accept), "rows": len(labels)}


def scores(accept: Reals, predicted: Reals, prompt: Ids) -> Scores:
    """Judge (n,) predicted probabilities by (n,) labels in [0, 1].

    `prompt` is (n,) any number of the prompt that a token comes from; n is at least 1.
    """
    import torch

    from heads.loss import CALIBRATION_BINS, auroc_of_groups, binary_kl, soft_auroc

    names, number = np.unique(prompt, return_inverse=True)
    weights = resamples(len(names))  # (1 + B, P)

    def sums(values: Reals, group: Ids | int = 0, groups: int = 1) -> Reals:
        """Sum over the tokens of each group in each resample: (1 + B, groups)."""
        cells = np.bincount(number * groups + group, values, len(names) * groups)
        return np.asarray(weights @ cells.reshape(len(names), groups))

    count = sums(np.ones_like(accept))[:, 0]
    odds = torch.logit(torch.from_numpy(predicted), eps=EDGE)
    kl = sums(binary_kl(odds, torch.from_numpy(accept)).numpy())[:, 0]
    bins = (predicted * CALIBRATION_BINS).astype(np.int64).clip(0, CALIBRATION_BINS - 1)
    gaps = np.abs(sums(predicted - accept, bins, CALIBRATION_BINS)).sum(axis=1)
    exact = soft_auroc(torch.from_numpy(predicted), torch.from_numpy(accept))
    _, rank = np.unique(predicted, return_inverse=True)
    group = rank * GROUPS // (int(rank.max()) + 1)  # ties stay together
    masses = (torch.from_numpy(sums(label, group, GROUPS)) for label in (accept, 1.0 - accept))
    grouped = auroc_of_groups(*masses).numpy()
    return Scores(
        tokens=len(accept),
        kl=Interval.of(kl / count),
        # What ties within a group cost the whole, they cost the resamples, too.
        auroc=None if exact is None else Interval.of(grouped + (exact - grouped[0])),
        ece=Interval.of(gaps / count),
        mean_accept=float(accept.mean()),
        mean_predicted=float(predicted.mean()),
    )
