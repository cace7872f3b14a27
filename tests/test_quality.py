"""How good a head's probabilities are on held-out labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from eval.analysis.quality import QUALITY, Prediction, Quality, head_quality
from eval.analysis.rivals import ALL
from eval.analysis.traces import acceptance_traces
from eval.drafting.stopping.calibration import fit_calibration
from heads import AcceptanceHead, ImmediateHead
from heads.loss import head_metrics
from specdata.probability import SamplingConfig
from tests.synthetic_quality import MADE_OF, synthetic_quality, traces
from tests.synthetic_results import synthetic_results
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama

VOCABULARY = 12
SAMPLING = SamplingConfig()
RESULTS = synthetic_results(datasets=("d",))


@pytest.fixture(scope="module")
def labels() -> Dataset:
    """Of a tiny pair: 6 dev rollouts of one prompt set, 8 test rollouts of two."""
    target, draft = (tiny_llama(seed, vocab=VOCABULARY).float() for seed in (0, 1))
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> object:
        ids = torch.randint(2, VOCABULARY, (14,), generator=generator).tolist()
        made = {"example_id": f"e{number}", "sample": 0, "finish": "length", "turn": 0}
        made |= {"dataset": "maths" if number % 2 and number > 5 else "code"}
        made |= {"split": "test" if number > 5 else "dev"}
        return made | {"prompt_ids": ids[:3], "completion_ids": ids[3:]}

    rows = labeller(target, draft, SAMPLING)([row(number) for number in range(14)])  # type: ignore[misc]
    return Dataset.from_list([dict(each) for each in rows])


def quality(labels: Dataset, head: AcceptanceHead | ImmediateHead) -> Quality | None:
    draft = tiny_llama(1, vocab=VOCABULARY).float()
    return head_quality(labels, draft, head, sampling=SAMPLING, results=RESULTS, made_of=MADE_OF)


def one(made: Quality, domain: str, predictor: str, moment: str = "drawn") -> Prediction:
    (found,) = [p for p in made.of(domain) if (p.predictor, p.moment) == (predictor, moment)]
    return found


def test_a_published_head_is_judged_after_the_token_and_against_rivals_fitted_on_dev(
    labels: Dataset,
) -> None:
    torch.manual_seed(0)
    head = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0).eval()
    made = quality(labels, head)
    assert made is not None
    assert made.domains() == [ALL, "code", "maths"]
    assert (made.judged_on, made.rollouts) == ("test", {"dev": 6, "test": 8})
    heads = [p.moment for p in made.of("maths") if p.predictor == "head"]
    assert heads == ["consumed"]
    draft = tiny_llama(1, vocab=VOCABULARY).float()
    rows = {s: labels.filter(lambda row, s=s: row["split"] == s) for s in ("dev", "test")}
    test = acceptance_traces(rows["test"], draft=draft, sampling=SAMPLING, head=head)
    assert test.tokens.head is not None
    raw = test.tokens.head.consumed
    assert raw is not None
    known = head_metrics(
        torch.from_numpy(raw[test.inside]), torch.from_numpy(test.accept[test.inside]), 6.0
    )
    found = one(made, ALL, "head", "consumed").scores
    assert found.tokens == known.tokens == 8 * 11
    assert found.kl.value == pytest.approx(known.kl), "of the calibrated probability"
    assert found.auroc is not None
    assert found.auroc.value == pytest.approx(known.auroc)
    # Rivals know dev alone.
    dev = acceptance_traces(rows["dev"])
    constant = one(made, "maths", "constant").scores
    assert constant.mean_predicted == pytest.approx(dev.mean_accept())
    assert constant.mean_accept != pytest.approx(dev.mean_accept())
    fitted = fit_calibration(dev.accept[dev.inside], dev.tokens.q_max[dev.inside])
    logit = fitted.accept_all(test.tokens.q_max[test.inside])
    assert one(made, ALL, "logit").scores.mean_predicted == pytest.approx(logit.mean())
    assert one(made, ALL, "numbers").scores.tokens == one(made, ALL, "margin").scores.tokens == 88
    cumulative = one(made, ALL, "cumulative").scores
    assert cumulative.mean_predicted == pytest.approx(test.tokens.q[test.inside].mean())


def test_sets_and_positions_share_out_the_tokens() -> None:
    made = synthetic_quality()
    for predictor, moment in (("head", "drawn"), ("logit", "drawn"), ("head", "before")):
        whole, *parts = (one(made, name, predictor, moment) for name in made.domains())
        assert whole.scores.tokens == sum(part.scores.tokens for part in parts)
        assert whole.scores.tokens == sum(each.tokens for each in whole.reliability)
        assert whole.scores.tokens == sum(each.scores.tokens for each in whole.positions)
        places = [(each.first, each.last) for each in whole.positions]
        assert places == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 24)]


def test_in_a_draft_a_token_counts_with_the_chance_that_those_before_it_were_accepted() -> None:
    made, test = synthetic_quality(), traces(1)
    margin, head = one(made, ALL, "margin"), one(made, ALL, "head")
    assert [(part.first, part.last) for part in head.places] == [(k, k) for k in (1, 2, 4, 8, 16)]
    assert head.places[0].scores == head.scores, "a draft may begin anywhere"
    inside, accept = test.inside, test.accept
    # Of the second and the fourth token of a draft, by hand.
    for place, part in ((2, head.places[1]), (4, head.places[2])):
        total = weight = 0.0
        for row in range(len(accept)):
            for first in range(accept.shape[1] - place + 1):
                if inside[row, first + place - 1]:
                    chance = accept[row, first : first + place - 1].prod()
                    total += chance * accept[row, first + place - 1]
                    weight += chance
        assert part.scores.mean_accept == pytest.approx(total / weight)
        assert part.scores.tokens == round(weight)
    # The margin has a model for each of them, which is calibrated there.
    deep = margin.places[2].scores
    pooled = one(made, ALL, "logit").places[2].scores
    assert abs(deep.mean_predicted - deep.mean_accept) < 0.05
    assert deep.mean_predicted != pytest.approx(margin.scores.mean_predicted, abs=1e-4)
    assert pooled.mean_accept == pytest.approx(deep.mean_accept)


def test_before_a_token_is_drawn_its_mean_acceptance_is_predicted() -> None:
    test = traces(1)
    overlap = np.full_like(test.accept, 0.25)
    from eval.analysis.quality import judged_quality

    made = judged_quality(
        traces(0),
        type(test)(test.tokens, test.accept, overlap),
        prompts=[str(i) for i in range(len(test.accept))],
        names=["d"] * len(test.accept),
        choice=None,
        made_of={},
    )
    assert made.domains() == ["d"]
    assert one(made, "d", "head", "before").scores.mean_accept == pytest.approx(0.25)
    assert one(made, "d", "head").scores.mean_accept > 0.5
    early = {p.predictor for p in made.of("d", "before")}
    assert "cumulative" not in early, "q of the token needs the token"
    assert {"head", "logit", "constant"} <= early
    assert made.replay is None


def test_a_head_that_knows_more_is_found_better_and_saves_more() -> None:
    good, poor = synthetic_quality(), synthetic_quality(skill=0.3)
    aurocs = []
    for made in (good, poor):
        auroc = one(made, ALL, "head").scores.auroc
        assert auroc is not None
        aurocs.append(auroc)
    assert aurocs[0].low > aurocs[1].high
    assert good.replay is not None
    assert poor.replay is not None
    assert good.replay.rivals[0].overall.value > poor.replay.rivals[0].overall.value
    assert good.replay.rivals[0].rule == "fixed"


def test_a_head_without_lag_is_judged_at_each_of_its_moments(labels: Dataset) -> None:
    torch.manual_seed(0)
    made = quality(labels, ImmediateHead(hidden_size=16, width=8, depth=1).eval())
    assert made is not None
    heads = [p.moment for p in made.of(ALL) if p.predictor == "head"]
    assert heads == ["drawn", "consumed", "before"]


def test_without_dev_there_is_none_and_without_test_it_is_said(labels: Dataset) -> None:
    head = AcceptanceHead(hidden_size=16, depth=0).eval()
    assert quality(labels.filter(lambda row: row["split"] == "test"), head) is None
    made = quality(labels.filter(lambda row: row["split"] == "dev"), head)
    assert made is not None
    assert (made.judged_on, made.rollouts) == ("dev", {"dev": 6})


def test_what_is_kept_is_read_again_unless_it_is_of_something_else(tmp_path: Path) -> None:
    made, path = synthetic_quality(), tmp_path / QUALITY
    assert Quality.read(path, MADE_OF) is None
    made.write(path)
    assert Quality.read(path, MADE_OF) == made
    assert Quality.read(path, {**MADE_OF, "labels": "other"}) is None
    path.write_bytes(path.read_bytes()[:-20])
    assert Quality.read(path, MADE_OF) is None
