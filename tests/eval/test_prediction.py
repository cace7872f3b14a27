"""How well acceptance is predicted, by a head and what needs none, with intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.special import logit

from eval.analysis.prediction import GROUPS, Ids, Predictions, Reals, Scores, predictions, scores
from eval.analysis.traces import acceptance_traces
from eval.drafting.stopping.logistic import fit_calibration
from eval.measuring.intervals import interval, resamples
from eval.reporting.report import head_predictors
from heads import AcceptanceHead
from heads.loss import binary_kl, head_metrics, soft_auroc
from specdata.probability import SamplingConfig
from tests.support.acceptance import labeller, rollout
from tests.support.tiny import tiny_llama

PROMPTS, EACH = 40, 25
VOCABULARY, SAMPLING = 12, SamplingConfig()


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
    for name in ("kl", "auroc", "ece"):
        assert getattr(found, name).value == pytest.approx(getattr(known, name)), name
    for name in ("tokens", "mean_accept", "mean_predicted"):
        assert getattr(found, name) == pytest.approx(getattr(known, name)), name


@pytest.mark.parametrize("step", [0.02, 0.0], ids=["few scores", "more scores than groups"])
def test_intervals_are_those_of_resampled_prompts_judged_one_by_one(step: float) -> None:
    accept, prompt, predicted = drawn(1, step)
    assert (len(np.unique(predicted)) <= GROUPS) == bool(step)
    found = scores(accept, predicted, prompt)
    values = []
    for counts in resamples(PROMPTS)[1:, prompt].astype(int):
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
    for counts in resamples(PROMPTS)[1:, prompt].astype(int):
        x, a = (torch.from_numpy(np.repeat(each, counts)) for each in (odds, accept))
        values.append(float(binary_kl(x, a).mean()))
    assert (found.kl.low, found.kl.high) == pytest.approx(interval(np.array(values)))


def test_what_cannot_be_judged_is_undefined() -> None:
    all_accepted = scores(np.ones(10), np.full(10, 0.9), np.arange(10))
    assert all_accepted.auroc is None
    assert np.isfinite([all_accepted.kl.value, all_accepted.kl.high]).all()
    sure_and_wrong = scores(np.zeros(4), np.ones(4), np.arange(4))
    assert np.isfinite(sure_and_wrong.kl.value)


@pytest.fixture(scope="module")
def labels() -> Dataset:
    """Of a tiny pair: 6 dev rollouts of one prompt set, 8 test rollouts of two."""
    target, draft = (tiny_llama(seed, vocab=VOCABULARY).float() for seed in (0, 1))
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(14):
        ids = torch.randint(2, VOCABULARY, (14,), generator=generator).tolist()
        rows.append(rollout(number, ids[3:], prompt=tuple(ids[:3])))
        rows[-1]["dataset"] = "maths" if number % 2 and number > 5 else "code"
        rows[-1]["split"] = "test" if number > 5 else "dev"
    return Dataset.from_list([dict(row) for row in labeller(target, draft, SAMPLING)(rows)])


def of_split(labels: Dataset, split: str) -> Dataset:
    return labels.filter(lambda row: row["split"] == split)


def judged(labels: Dataset, head: AcceptanceHead) -> Predictions:
    return predictions(labels, tiny_llama(1, vocab=VOCABULARY).float(), head, SAMPLING)


def test_a_published_head_is_judged_after_the_token_and_against_rivals_fitted_on_dev(
    labels: Dataset,
) -> None:
    torch.manual_seed(0)
    head = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0).eval()
    made = judged(labels, head)
    assert (made.judged_on, made.rollouts) == ("test", {"dev": 6, "test": 8})
    found: dict[str, Scores] = {each.predictor: each.scores for each in made.predictors}
    assert made.predictors[0].lag == 1
    draft = tiny_llama(1, vocab=VOCABULARY).float()
    test = acceptance_traces(of_split(labels, "test"), draft=draft, sampling=SAMPLING, head=head)
    assert test.tokens.head is not None
    raw = test.tokens.head.logits
    known = head_metrics(
        torch.from_numpy(raw[test.inside]), torch.from_numpy(test.accept[test.inside]), 6.0
    )
    assert found["head"].tokens == known.tokens == 8 * 11
    assert found["head"].kl.value == pytest.approx(known.kl), "of the calibrated probability"
    assert found["head"].auroc is not None
    assert found["head"].auroc.value == pytest.approx(known.auroc)
    # Rivals know dev alone.
    dev = acceptance_traces(of_split(labels, "dev"))
    assert found["constant"].mean_predicted == pytest.approx(dev.mean_accept())
    assert found["constant"].mean_accept != pytest.approx(dev.mean_accept())
    fitted = fit_calibration(dev.accept[dev.inside], dev.tokens.q_max[dev.inside])
    by_logit = [fitted.accept(float(q_max)) for q_max in test.tokens.q_max[test.inside]]
    assert found["logit"].mean_predicted == pytest.approx(np.mean(by_logit))
    expected = test.tokens.q[test.inside].mean()
    assert found["cumulative"].mean_predicted == pytest.approx(expected)
    table = head_predictors(made)
    assert table is not None
    assert table.table.rows[0][0] == "head (one drafted token later)"


def test_without_dev_nothing_is_judged_and_without_test_it_is_said(labels: Dataset) -> None:
    head = AcceptanceHead(hidden_size=16, depth=0).eval()
    section = head_predictors(judged(of_split(labels, "test"), head))
    assert section is not None
    assert section.sentence.startswith("Not measured: there are no held-out labels of split dev")
    assert not section.table.rows
    made = judged(of_split(labels, "dev"), head)
    assert (made.judged_on, made.rollouts) == ("dev", {"dev": 6})
    section = head_predictors(made)
    assert section is not None
    assert "they look better than they are" in section.sentence
