"""Metrics of predicted acceptance, with intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logit

from eval.analysis.prediction import BINS, GROUPS, Ids, Reals, scores
from eval.measuring.intervals import bootstrap_weights, interval
from heads.loss import CALIBRATION_BINS, binary_kl, head_metrics, soft_auroc

PROMPTS, EACH = 40, 25


def drawn(seed: int, step: float = 0.0) -> tuple[Reals, Ids, Reals]:
    """Labels, prompts and predictions of tokens, these rounded to multiples of `step`."""
    generator = np.random.default_rng(seed)
    ease = np.repeat(generator.normal(1.0, 1.0, PROMPTS), EACH)
    odds = ease + generator.normal(0.0, 1.5, PROMPTS * EACH)
    predicted = 1.0 / (1.0 + np.exp(-odds))
    if step:
        predicted = (predicted / step).round() * step
    accept = np.clip(predicted + generator.normal(0.0, 0.25, len(predicted)), 0.0, 1.0)
    return accept, np.repeat(np.arange(PROMPTS), EACH), predicted


def test_figures_are_those_of_head_training() -> None:
    accept, prompt, predicted = drawn(0)
    found = scores(accept, predicted, prompt)
    odds = torch.logit(torch.from_numpy(predicted))
    known = head_metrics(odds, torch.from_numpy(accept), rejection_weight=1.0)
    assert BINS == CALIBRATION_BINS
    assert found.tokens == known.tokens
    assert found.kl.value == pytest.approx(known.kl)
    assert found.auroc is not None
    assert found.auroc.value == pytest.approx(known.auroc)
    assert found.ece.value == pytest.approx(known.ece)
    assert found.mean_accept == pytest.approx(known.mean_accept)
    assert found.mean_predicted == pytest.approx(known.mean_predicted)


@pytest.mark.parametrize("step", [0.02, 0.0], ids=["few scores", "more scores than groups"])
def test_intervals_are_those_of_resampled_prompts_judged_one_by_one(step: float) -> None:
    accept, prompt, predicted = drawn(1, step)
    assert (len(np.unique(predicted)) <= GROUPS) == bool(step)
    found = scores(accept, predicted, prompt)
    values = []
    for counts in bootstrap_weights(PROMPTS)[:, prompt].astype(int):
        a, p = (torch.from_numpy(np.repeat(x, counts)) for x in (accept, predicted))
        values.append(soft_auroc(p, a) or np.nan)
    assert found.auroc is not None
    by_hand = interval(np.array(values))
    width = by_hand[1] - by_hand[0]
    assert (found.auroc.low, found.auroc.high) == pytest.approx(by_hand, abs=0.02 * width)
    if step:  # nothing is grouped
        assert (found.auroc.low, found.auroc.high) == pytest.approx(by_hand, abs=1e-12)
    values = []
    odds = logit(predicted.clip(1e-6, 1 - 1e-6))
    for counts in bootstrap_weights(PROMPTS)[:, prompt].astype(int):
        x, a = (torch.from_numpy(np.repeat(each, counts)) for each in (odds, accept))
        values.append(float(binary_kl(x, a).mean()))
    assert (found.kl.low, found.kl.high) == pytest.approx(interval(np.array(values)))


def test_more_tokens_of_the_same_prompts_do_not_narrow_an_interval() -> None:
    accept, prompt, predicted = drawn(2)
    once = scores(accept, predicted, prompt)
    again, twice = (np.tile(values, 2) for values in (accept, predicted))
    same = scores(again, twice, np.tile(prompt, 2))
    others = scores(again, twice, np.concatenate([prompt, prompt + PROMPTS]))
    assert once.auroc is not None
    assert same.auroc is not None
    assert others.auroc is not None
    assert (same.auroc.low, same.auroc.high) == pytest.approx((once.auroc.low, once.auroc.high))
    assert others.auroc.high - others.auroc.low < 0.9 * (once.auroc.high - once.auroc.low)
    assert (same.kl.low, same.kl.high) == pytest.approx((once.kl.low, once.kl.high))


def test_what_cannot_be_judged_is_undefined_or_refused() -> None:
    all_accepted = scores(np.ones(4), np.full(4, 0.9), np.arange(4))
    assert all_accepted.auroc is None
    assert np.isfinite([all_accepted.kl.value, all_accepted.kl.high]).all()
    sure_and_wrong = scores(np.zeros(4), np.ones(4), np.arange(4))
    assert np.isfinite(sure_and_wrong.kl.value)
    with pytest.raises(ValueError, match="n >= 1"):
        scores(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="must all be"):
        scores(np.zeros(3), np.zeros(3), np.zeros(2, dtype=np.int64))
