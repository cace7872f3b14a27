"""Verdict on a head: settings chosen on dev, judged on test rollouts and by the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from eval.analysis.expectation import Counts, Times, expected_counts
from eval.analysis.head_verdict import (
    HeadVerdict,
    Prediction,
    Rival,
    by_clock,
    compare,
    expected_seconds,
    head_verdict,
    judge_head,
    measured_times,
    status_of,
)
from eval.analysis.replay import RuleResult, replayed, saving
from eval.analysis.traces import acceptance_traces
from eval.decode_config import Method
from eval.drafting.stopping import STOPPING_RULES
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.logistic import fit_calibration
from eval.drafting.stopping.recorded import recorded_lengths
from eval.drafting.stopping.thresholds import Fixed
from eval.measuring.intervals import Interval
from eval.measuring.results import Results, Run
from eval.reporting import recommendation as words
from heads import AcceptanceHead, ImmediateHead
from heads.loss import head_metrics
from specdata.errors import ManifestError
from specdata.probability import SamplingConfig
from tests.synthetic_results import synthetic_results
from tests.synthetic_verdict import synthetic_verdict, traces
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama

VOCABULARY = 12
SAMPLING = SamplingConfig()


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


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


def judged(labels: Dataset, head: AcceptanceHead | ImmediateHead) -> HeadVerdict:
    draft = tiny_llama(1, vocab=VOCABULARY).float()
    return head_verdict(synthetic_results(datasets=("d",)), labels, draft, head, sampling=SAMPLING)


def one(made: HeadVerdict, predictor: str) -> Prediction:
    (prediction,) = [p for p in made.predictions if p.predictor == predictor]
    return prediction


def test_a_published_head_is_judged_after_the_token_and_against_rivals_fitted_on_dev(
    labels: Dataset,
) -> None:
    torch.manual_seed(0)
    head = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0).eval()
    made = judged(labels, head)
    assert (made.judged_on, made.rollouts) == ("test", {"dev": 6, "test": 8})
    assert one(made, "head").lag == 1
    draft = tiny_llama(1, vocab=VOCABULARY).float()
    rows = {s: labels.filter(lambda row, s=s: row["split"] == s) for s in ("dev", "test")}
    test = acceptance_traces(rows["test"], draft=draft, sampling=SAMPLING, head=head)
    assert test.tokens.head is not None
    raw = test.tokens.head.logits
    known = head_metrics(
        torch.from_numpy(raw[test.inside]), torch.from_numpy(test.accept[test.inside]), 6.0
    )
    found = one(made, "head").scores
    assert found.tokens == known.tokens == 8 * 11
    assert found.kl.value == pytest.approx(known.kl), "of the calibrated probability"
    assert found.auroc is not None
    assert found.auroc.value == pytest.approx(known.auroc)
    # Rivals know dev alone.
    dev = acceptance_traces(rows["dev"])
    constant = one(made, "constant").scores
    assert constant.mean_predicted == pytest.approx(dev.mean_accept())
    assert constant.mean_accept != pytest.approx(dev.mean_accept())
    fitted = fit_calibration(dev.accept[dev.inside], dev.tokens.q_max[dev.inside])
    logit = [fitted.accept(float(q_max)) for q_max in test.tokens.q_max[test.inside]]
    assert one(made, "logit").scores.mean_predicted == pytest.approx(np.mean(logit))
    cumulative = one(made, "cumulative").scores
    assert cumulative.mean_predicted == pytest.approx(test.tokens.q[test.inside].mean())


def test_without_times_nothing_is_replayed_and_why_is_said() -> None:
    test = traces(1)
    made = judge_head(
        synthetic_results(datasets=("d",), timed=False),
        traces(0),
        test,
        prompts=[str(i) for i in range(len(test.accept))],
        questions={},
    )
    assert one(made, "head").scores.mean_accept > 0.5
    assert (made.status, made.replay, made.clock) == ("not measured", [], [])
    assert words.head_sentence(made).endswith("was not measured: speeds were not measured.")


def test_a_head_that_knows_more_is_found_better_and_saves_more() -> None:
    good, poor = synthetic_verdict(), synthetic_verdict(skill=0.3)
    ours, theirs = (one(made, "head").scores.auroc for made in (good, poor))
    assert ours is not None
    assert theirs is not None
    assert ours.low > theirs.high
    assert good.replay[0].saved.value > poor.replay[0].saved.value
    assert good.replay[0].rule == "fixed"


def test_a_head_that_costs_more_to_ask_saves_less() -> None:
    test = traces(1)
    made = [
        judge_head(
            synthetic_results(datasets=("alpaca", "gsm8k")),
            traces(0),
            test,
            prompts=[str(i) for i in range(len(test.accept))],
            questions={"head": question},
        )
        for question in (0.0, 0.002)
    ]
    free, dear = (each.replay[0].saved.value for each in made)
    assert dear < free - 0.05, "as much as a draft step"
    assert "2000 of head microseconds" in words.head_basis(made[1])


def test_without_dev_nothing_is_judged_and_without_test_it_is_said(labels: Dataset) -> None:
    head = AcceptanceHead(hidden_size=16, depth=0).eval()
    made = judged(labels.filter(lambda row: row["split"] == "test"), head)
    assert made.status == "not measured"
    assert "no held-out labels to choose the threshold on" in words.head_sentence(made)
    made = judged(labels.filter(lambda row: row["split"] == "dev"), head)
    assert (made.judged_on, made.rollouts) == ("dev", {"dev": 6})
    assert "look better than they are" in words.head_basis(made)


def test_a_stored_verdict_is_read_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    made, path = synthetic_verdict(), tmp_path / "verdict.json"
    assert HeadVerdict.read(path) is None
    made.write(path)
    assert HeadVerdict.read(path) == made
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ManifestError, match="damaged: remove"):
        HeadVerdict.read(path)


def test_measured_settings_are_ranked_by_their_expected_time(results: Results) -> None:
    times, dev = measured_times(results), traces(0)
    assert times is not None
    assert times.draft_seconds == pytest.approx(0.002, rel=0.2)
    assert times.target_seconds == pytest.approx(0.0114, rel=0.2)
    expected = expected_seconds(results, dev, times)
    known = {"fixed-4", "head-0.5", "confidence-0.4", "logit-0.7", "entropy-1.5", "transformers"}
    assert known <= set(expected)
    assert {"tree-4x2x1", "plain", "biased-0.05"}.isdisjoint(expected)
    lengths = recorded_lengths(Fixed(length=4), dev.tokens)
    assert lengths is not None
    assert expected["fixed-4"] == expected_counts(dev, lengths).seconds_per_token(times)
    assert measured_times(synthetic_results(datasets=("alpaca",), timed=False)) is None


def test_a_cost_rule_that_measured_its_costs_is_replayed_with_those_of_the_evaluation(
    results: Results,
) -> None:
    rule = STOPPING_RULES["cost"].model_validate({"calibration": (4.0, 1.2)})
    assert isinstance(rule, Cost)
    assert rule.measured
    base = next(run for run in results.runs if run.name == "fixed-4")
    runs = [
        base.model_copy(
            update={
                "head": asked,
                "method": Method(
                    name=name, stop=rule.model_copy(update={"head": asked is not None})
                ),
            }
        )
        for name, asked in (("with the head", "head"), ("without", None))
    ]
    both = results.model_copy(update={"runs": [*results.runs, *runs]})
    times, dev = measured_times(both), traces(0)
    assert times is not None
    expected = expected_seconds(both, dev, times)
    for method, asked in (("with the head", True), ("without", False)):
        counts = replayed(rule.model_copy(update={"head": asked}), dev, times)
        assert counts is not None
        assert expected[method] == pytest.approx(counts.seconds_per_token(times))
    assert expected["with the head"] != expected["without"]


PROMPTS = ["a", "a", "b", "c", "d", "e"]
TIMES = Times(draft_seconds=0.1, target_seconds=1.0)


def result(family: str, setting: str, seconds: float, seed: int = 0) -> RuleResult:
    """A rule whose rollouts take about `seconds` each."""
    noise = np.random.default_rng(seed).uniform(-0.05, 0.05, len(PROMPTS))
    tokens, nothing = np.full(len(PROMPTS), 40.0), np.zeros(len(PROMPTS))
    return RuleResult(family, setting, Counts(tokens, seconds * (1.0 + noise), nothing, nothing))


# On test another threshold of the head, and another length, would have been best.
DEV = [
    result("oracle", "", 5.0),
    result("fixed", "K=4", 10.0),
    result("fixed", "K=6", 9.0),
    result("head", "h=0.5", 8.0),
    result("head", "h=0.7", 7.0),
    result("logit", "h=0.7", 9.0),
    result("perfect head", "h=0.5", 6.0),
    result("cost with head", "", 6.0),
    result("entropy", "1", 11.0),
]
TEST = [
    result("oracle", "", 5.0),
    result("fixed", "K=4", 9.0, seed=1),
    result("fixed", "K=6", 10.0, seed=2),
    result("head", "h=0.5", 7.0, seed=3),
    result("head", "h=0.7", 8.0, seed=4),
    result("logit", "h=0.7", 8.5, seed=5),
    result("perfect head", "h=0.5", 6.0, seed=6),
    result("cost with head", "", 8.2, seed=7),
]


def test_settings_are_chosen_on_dev_and_judged_on_test() -> None:
    found = compare(DEV, TEST, PROMPTS, TIMES)
    assert found["replay_setting"] == "h=0.7"
    # Entropy was not replayed on test; the oracle and a perfect head are no rivals.
    rivals = found["replay"]
    assert [(r.rule, r.setting) for r in rivals] == [("fixed", "K=6"), ("logit", "logit h=0.7")]
    head, fixed = TEST[4].counts, TEST[2].counts
    assert rivals[0].saved == saving(head, fixed, TIMES, PROMPTS)
    for left_out in ("head", "fixed"):
        dev = [r for r in DEV if r.family != left_out]
        assert compare(dev, TEST, PROMPTS, TIMES) == {}


def runs_of(results: Results, name: str) -> list[Run]:
    return [run for run in results.runs if run.name == name]


EXPECTED = {
    **{f"fixed-{k}": float(s) for k, s in ((2, 5), (4, 3), (6, 4), (8, 6), (12, 9))},
    **{f"head-{h}": s for h, s in ((0.3, 4.0), (0.5, 2.5), (0.7, 3.0), (0.9, 5.0))},
    "block-6": 1.0,
    "confidence-0.4": 3.5,
    "logit-0.7": 3.6,
}


def test_the_clock_judges_on_the_prompts_what_was_chosen_on_dev(results: Results) -> None:
    found = by_clock(results, EXPECTED)
    # Not the fastest on the prompts: the one that is expected to cost least.
    chosen = [found[name] for name in ("method", "threshold", "candidates")]
    assert chosen == ["head-0.5", 0.5, 4]
    settings = {rival.rule: rival.setting for rival in found["clock"]}
    assert sorted(settings) == ["assisted", "confidence", "entropy", "fixed", "logit"]
    assert settings["fixed"] == "fixed-4"  # block-6 verifies otherwise
    saved = found["clock"][0].saved
    seconds = [  # of a token, each set counting alike
        sum(run.seconds["total"] / run.tokens for run in runs_of(results, name))
        for name in ("head-0.5", "fixed-4")
    ]
    assert saved.value == pytest.approx(1 - seconds[0] / seconds[1])
    assert saved.low < saved.value < saved.high


@pytest.mark.parametrize(
    ("factors", "status"),
    [
        ((0.5, 0.5), "pays"),
        ((1.0, 1.0), "cannot tell"),
        ((0.6, 1.6), "cannot tell"),  # slower by 9 %, but on every other prompt only
        ((2.0, 2.0), "does not pay"),
    ],
)
def test_by_the_clock_a_head_pays_only_if_its_interval_says_so_against_every_rival(
    results: Results, factors: tuple[float, float], status: str
) -> None:
    def timed_as(run: Run) -> Run:
        """A head's run as the fixed length's, at another speed: equal means not told apart."""
        if not run.name.startswith("head-"):
            return run
        (fixed,) = [r for r in results.of(run.dataset) if r.name == "fixed-4"]
        records = [
            replace(g, seconds=g.seconds * factors[number % 2])
            for number, g in enumerate(fixed.generations)
        ]
        return run.model_copy(update={"generations": records})

    kept = [run for run in results.runs if run.method.stop.name in ("fixed", "head")]
    changed = results.model_copy(update={"runs": [timed_as(run) for run in kept]})
    clock = by_clock(changed, EXPECTED)["clock"]
    assert status_of([], clock) == status
    assert clock[0].saved.value == pytest.approx(1 - sum(factors) / 2, abs=0.05)


def test_what_is_missing_is_said_and_never_guessed(results: Results) -> None:
    no_fixed = [
        run for run in results.runs if not run.method.fixed_length or run.method.verifier == "block"
    ]
    without = results.model_copy(update={"runs": no_fixed})
    assert "no fixed length" in by_clock(without, EXPECTED)["reason"]
    assert "no threshold was measured" in by_clock(results, {"fixed-4": 1.0})["reason"]
    # Two settings and no way to choose between them: left out, not picked by the test set.
    second = [
        run.model_copy(update={"method": run.method.replace(name="entropy-2", threshold=2.0)})
        for run in runs_of(results, "entropy-1.5")
    ]
    own = [
        run.model_copy(
            update={"method": run.method.replace(name="transformers K=9", stop="fixed", length=9)}
        )
        for run in runs_of(results, "transformers")
    ]
    more = results.model_copy(update={"runs": [*results.runs, *second, *own]})
    found = by_clock(more, EXPECTED)
    assert sorted(found["left_out"]) == ["assisted", "entropy"]
    assert {"entropy", "assisted"}.isdisjoint(rival.rule for rival in found["clock"])
    # Transformers' loop has no verifier's name, and is a rival whatever verifies the head.
    ranked = by_clock(more, {**EXPECTED, "transformers": 2.0, "transformers K=9": 1.0})
    (assisted,) = [rival for rival in ranked["clock"] if rival.rule == "assisted"]
    assert assisted.setting == "transformers K=9"


SAVES, LOSES = Interval(0.06, 0.05, 0.07), Interval(-0.03, -0.04, -0.02)
MAYBE_SAVES, MAYBE_LOSES = Interval(0.01, -0.01, 0.02), Interval(-0.01, -0.02, 0.01)


def rivals(fixed: Interval, logit: Interval, *names: str) -> list[Rival]:
    return [
        Rival(rule=rule, setting=setting, saved=saved)
        for rule, setting, saved in zip(("fixed", "logit"), names, (fixed, logit), strict=True)
    ]


def on_rollouts(fixed: Interval, logit: Interval) -> list[Rival]:
    return rivals(fixed, logit, "K=6", "logit h=.7")


def clocked(fixed: Interval, logit: Interval) -> list[Rival]:
    return rivals(fixed, logit, "K=4", "logit .5")


PAYS, NOT = "The head pays: it saves 6.0 % [5.0, 7.0] over ", "The head does not pay: it saves "
FEW = "So few prompts cannot tell whether the head pays: it saves "


@pytest.mark.parametrize(
    ("replay", "clock", "begins"),
    [
        (
            on_rollouts(SAVES, SAVES),
            clocked(MAYBE_SAVES, SAVES),
            f"{PAYS}K=6 on held-out rollouts and {MAYBE_SAVES} over K=4 by the clock.",
        ),
        ([], clocked(SAVES, SAVES), f"{PAYS}K=4 by the clock."),
        (on_rollouts(SAVES, SAVES), [], f"{PAYS}K=6 on held-out rollouts (by the clock: not"),
        (
            on_rollouts(SAVES, SAVES),
            clocked(SAVES, LOSES),
            f"{NOT}6.0 % [5.0, 7.0] over K=6 on held-out rollouts and {LOSES} over logit .5 by",
        ),
        (on_rollouts(LOSES, LOSES), clocked(SAVES, SAVES), f"{NOT}{LOSES} over K=6 on held-out"),
        (
            on_rollouts(SAVES, SAVES),
            clocked(MAYBE_LOSES, SAVES),
            f"{FEW}6.0 % [5.0, 7.0] over K=6 on held-out rollouts and {MAYBE_LOSES} over K=4 by",
        ),
        (
            on_rollouts(SAVES, MAYBE_SAVES),
            clocked(SAVES, SAVES),
            f"{FEW}{MAYBE_SAVES} over logit h=.7 on held-out rollouts and 6.0 % [5.0",
        ),
        ([], clocked(SAVES, MAYBE_SAVES), f"{FEW}{MAYBE_SAVES} over logit .5 by the clock."),
        ([], [], "Whether the head pays was not measured: no labels."),
    ],
)
def test_one_sentence_says_whether_the_head_pays_or_why_not(
    replay: list[Rival], clock: list[Rival], begins: str
) -> None:
    status = status_of(replay, clock)
    verdict = HeadVerdict(
        status=status, reason="" if clock else "no labels", replay=replay, clock=clock
    )
    sentence = words.head_sentence(verdict)
    assert sentence.startswith(begins)
    assert (status == "pays") == sentence.startswith("The head pays")
    assert ("negative means that it takes longer" in sentence) == (
        "saves -" in sentence or " and -" in sentence
    )
    assert bool(replay and not clock) == sentence.endswith(
        "(by the clock: not measured, no labels)."
    )


def test_one_table_has_both_judgements_of_every_rule_positive_where_the_head_is_faster() -> None:
    made = synthetic_verdict().model_copy(
        update={"replay": on_rollouts(SAVES, SAVES), "clock": clocked(SAVES, LOSES)[:1]}
    )
    table, quality = words.head_rivals(made), words.head_predictors(made)
    assert table is not None
    assert quality is not None
    columns = [name for name, _ in table.columns]
    assert columns == ["saved on held-out rollouts", "saved by the clock"]
    assert table.rows == [
        ("fixed length", ("6.0 % [5.0, 7.0] (K=6)", "6.0 % [5.0, 7.0] (K=4)")),
        ("logit", ("6.0 % [5.0, 7.0] (logit h=.7)", "-")),
    ]
    assert table.wins == ["fixed length", "logit"]
    basis = table.note
    assert "24 test rollouts, which neither draft nor head was trained on" in basis
    assert "All settings were chosen on 24 dev rollouts." in basis
    rows = dict(quality.rows)
    assert rows["head (as soon as the token is drawn)"][0].startswith(
        f"{one(made, 'head').scores.auroc.value:.3f} ["  # type: ignore[union-attr]
    )
    assert len(rows) == 4
