"""A head's loss and the metrics it is judged by. Labels are probabilities, never 0/1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

CALIBRATION_BINS = 15


def loss_mass(accept: Tensor, rejection_weight: float) -> Tensor:
    """Return sum a + w(1 - a), float64, of labels a: what the loss of a whole batch is divided by.

    It depends on the labels alone, so the mass of a global batch is known before any forward pass
    and the loss does not change with accumulation or with the number of processes.
    """
    accept = accept.double()
    return (accept + rejection_weight * (1.0 - accept)).sum()


def weighted_bce(logits: Tensor, accept: Tensor, mask: Tensor, rejection_weight: float) -> Tensor:
    """Return the numerator of the class-weighted cross-entropy with soft labels, all (...).

    sum over the mask of -a log phat - w (1 - a) log(1 - phat), phat = sigmoid(logit). Divide it by
    the `loss_mass` of the *global* batch. Its minimum is at phat = a / (a + w (1 - a)). Positions
    outside the mask get no gradient.
    Source: SpecDec++ (2405.19715), weighted BCE with w_acc = 1 and w_rej = w.
    """
    terms = accept * softplus(-logits) + rejection_weight * (1.0 - accept) * softplus(logits)
    return terms.masked_fill(~mask, 0.0).sum()


@dataclass(frozen=True, slots=True)
class HeadMetrics:
    """The quality of predicted acceptance, over held-out drafted tokens.

    Probabilities are the calibrated ones, w phat/(1 - phat + w phat), unless said otherwise.

    Attributes:
        kl: mean binary KL(label || prediction) in nats; a perfect predictor scores 0.
        kl_raw: the same for the raw output of the weighted loss, as in the paper's Table 3.
        kl_constant: the same for the best constant, the mean label; a useful head is below it.
        auroc: chance that an accepted token outscores a rejected one, each token counting as
            accepted with weight a and as rejected with weight 1 - a; None if one kind is absent.
        ece: expected calibration error, 15 bins of equal width.
        brier: mean squared difference between prediction and label, so without the noise
            a(1 - a) of acceptance itself; a perfect predictor scores 0.
    """

    tokens: int
    kl: float
    kl_raw: float
    kl_constant: float
    auroc: float | None
    ece: float
    brier: float
    mean_accept: float
    mean_predicted: float


def binary_kl(logits: Tensor, accept: Tensor) -> Tensor:
    """Return KL(Bernoulli(a) || Bernoulli(sigmoid(logit))) in nats: (...), (...) -> (...)."""
    cross_entropy = accept * softplus(-logits) + (1.0 - accept) * softplus(logits)
    label_entropy = torch.special.entr(accept) + torch.special.entr(1.0 - accept)
    divergence: Tensor = cross_entropy - label_entropy
    return divergence.clamp(min=0.0)  # rounding may leave -1e-17


def soft_auroc(scores: Tensor, accept: Tensor) -> float | None:
    """Area under the ROC curve with soft labels; ties count one half; None if undefined.

    (N,) scores, any increasing function of the predicted acceptance, and (N,) labels in [0, 1].
    """
    accept = accept.double()
    _, group = torch.unique(scores, return_inverse=True)  # groups in increasing order of score
    groups = int(group.max()) + 1 if group.numel() else 0
    accepted = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, accept)
    rejected = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, 1.0 - accept)
    below = rejected.cumsum(-1) - rejected
    won = (accepted * (below + 0.5 * rejected)).sum()
    area = float(won / (accepted.sum() * rejected.sum()))
    return None if math.isnan(area) else area


def calibration_error(predicted: Tensor, accept: Tensor, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: mean |prediction - label| of bin averages, weighted by size."""
    index = (predicted * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(
        0, index, predicted.double() - accept.double()
    )
    return float(gap.abs().sum() / predicted.numel())


def head_metrics(logits: Tensor, accept: Tensor, rejection_weight: float) -> HeadMetrics:
    """Judge (N,) raw acceptance logits of drafted tokens against their (N,) labels.

    `rejection_weight` is w of the loss they were trained with. Raises ValueError if there is no
    token to judge by.
    """
    if logits.numel() == 0:
        raise ValueError("there is no drafted token to evaluate the head on; check dev and mixing")
    raw, label = logits.detach().cpu().double(), accept.detach().cpu().double()
    calibrated = raw + math.log(rejection_weight)
    predicted = torch.sigmoid(calibrated)
    mean = label.mean().expand_as(label)
    return HeadMetrics(
        tokens=label.numel(),
        kl=float(binary_kl(calibrated, label).mean()),
        kl_raw=float(binary_kl(raw, label).mean()),
        kl_constant=float(binary_kl(torch.logit(mean, eps=1e-12), label).mean()),
        auroc=soft_auroc(calibrated, label),
        ece=calibration_error(predicted, label),
        brier=float((predicted - label).square().mean()),
        mean_accept=float(label.mean()),
        mean_predicted=float(predicted.mean()),
    )
