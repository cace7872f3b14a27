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
    compare,
    expected_seconds,
    head_verdict,
    judge_head,
    measured_times,
    status_of,
)
from eval.analysis.replay import RuleResult, saving
from eval.analysis.traces import acceptance_traces
from eval.drafting.stopping.head import Head
from eval.drafting.stopping.logistic import fit_calibration
from eval.drafting.stopping.recorded import recorded_lengths
from eval.measuring.intervals import Interval
from eval.measuring.pooled import pool
from eval.measuring.question import price
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


def evaluated(results: Results, questions: dict[str, Interval] | None = None) -> HeadVerdict:
    """Of a head that pays on rollouts."""
    prompts = [str(number) for number in range(24)]
    return judge_head(results, traces(0), traces(1), prompts=prompts, questions=questions or {})


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


def priced(price: Interval) -> HeadVerdict:
    return evaluated(
        synthetic_results(datasets=("alpaca", "gsm8k")), questions={"head": price, "logit": price}
    )


def test_a_head_that_costs_more_to_ask_saves_less() -> None:
    made = [priced(Interval(*[question] * 3)) for question in (0.0, 0.002)]
    free, dear = (each.replay[0].saved.value for each in made)
    assert dear < free - 0.05, "as much as a draft step"
    assert "2000 to 2000 of head and" in words.head_basis(made[1])


def test_a_price_below_the_noise_of_its_measurement_is_an_interval_and_never_0() -> None:
    drawn = np.random.default_rng(0).normal(1e-3, 1e-4, (2, 50))
    noise = price(*drawn)
    assert noise.low == 0.0 < noise.value < noise.high < 1e-4
    assert price(drawn[1], drawn[0]).value > 0.0
    sure = price(drawn[0] + 1e-3, drawn[1])
    assert 0.0 < sure.low < sure.value < sure.high
    # A saving holds what prices hold: from the dearest head and the cheapest rival on.
    dear, cheap = (
        priced(Interval(*[each] * 3)).replay[0].saved for each in (noise.high, noise.low)
    )
    unknown = {rival.rule: rival.saved for rival in priced(noise).replay}
    assert (unknown["fixed"].low, unknown["fixed"].high) == (dear.low, cheap.high)
    made = evaluated(synthetic_results(datasets=("alpaca", "gsm8k")), questions={"head": noise})
    free = {rival.rule: rival.saved for rival in made.replay}
    assert unknown["logit"].low == free["logit"].low
    assert unknown["logit"].high > free["logit"].high


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


def test_measured_thresholds_are_ranked_by_their_expected_time(results: Results) -> None:
    times, dev = measured_times(results), traces(0)
    assert times is not None
    assert times.draft_seconds == pytest.approx(0.002, rel=0.2)
    assert times.target_seconds == pytest.approx(0.0114, rel=0.2)
    expected = expected_seconds(results, dev, times)
    assert set(expected) == {f"head-{threshold}" for threshold in (0.3, 0.5, 0.7, 0.9)}
    lengths = recorded_lengths(Head(threshold=0.5), dev.tokens)
    assert lengths is not None
    assert expected["head-0.5"] == expected_counts(dev, lengths).seconds_per_token(times)
    assert measured_times(synthetic_results(datasets=("alpaca",), timed=False)) is None


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


def test_a_rival_by_the_clock_is_the_fastest_of_its_kind_in_the_table(results: Results) -> None:
    made = evaluated(results)
    table = {row.name: row for row in pool(results)}
    expected = expected_seconds(results, traces(0), measured_times(results))  # type: ignore[arg-type]
    # The head's threshold is not the fastest by the clock: it is the one of dev rollouts.
    assert (made.method, made.candidates) == (min(expected, key=lambda n: expected[n]), 4)
    assert made.method is not None
    chosen = {rival.rule: rival.setting for rival in made.clock}
    of_kind = {
        "fixed": [f"fixed-{length}" for length in (2, 4, 6, 8, 12)] + ["block-6"],
        "tree": ["tree-4x2x1"],
        "assisted": ["transformers"],
        **{name.split("-")[0]: [name] for name in ("confidence-0.4", "entropy-1.5", "logit-0.7")},
    }
    assert chosen == {
        kind: max(names, key=lambda name: table[name].speed()) for kind, names in of_kind.items()
    }
    head = table[made.method].speed()
    for rival in made.clock:
        assert rival.saved.value == pytest.approx(1 - table[rival.setting].speed() / head)
        assert rival.saved.low < rival.saved.value < rival.saved.high
    best = min(made.clock, key=lambda rival: rival.saved.value).setting
    assert best == max(chosen.values(), key=lambda name: table[name].speed())
    assert f"over {best} by the clock" in words.answer(results, made).head


@pytest.mark.parametrize(
    ("rival", "factors", "says"),
    [
        ("fixed-4", (0.5, 0.5), "The head pays"),
        ("fixed-4", (1.0, 1.0), "So few prompts cannot tell whether the head pays"),
        ("fixed-4", (0.6, 1.3), "So few prompts cannot tell whether the head pays"),
        ("fixed-4", (2.0, 2.0), "The head does not pay"),
        # Replay prefers K = 4, and it is another one that is fast.
        ("fixed-12", (0.5, 0.5), "The head pays"),
        ("fixed-12", (1.3, 1.3), "The head does not pay"),
        ("block-6", (0.6, 1.3), "So few prompts cannot tell whether the head pays"),
        ("tree-4x2x1", (1.3, 1.3), "The head does not pay"),
    ],
)
def test_a_head_pays_only_if_its_intervals_say_so_against_every_rival_of_the_table(
    results: Results, rival: str, factors: tuple[float, float], says: str
) -> None:
    def timed_as(run: Run) -> Run:
        """All others take three times as long; a head as long as the rival, times a factor."""
        heads = run.name.startswith("head-")
        name = rival if heads else run.name
        (timed,) = [each for each in results.of(run.dataset) if each.name == name]
        factor = factors if heads else (1.0, 1.0) if name == rival else (3.0, 3.0)
        records = [
            replace(g, seconds=g.seconds * factor[number % 2])
            for number, g in enumerate(timed.generations)
        ]
        return run.model_copy(update={"generations": records})

    changed = results.model_copy(update={"runs": [timed_as(run) for run in results.runs]})
    made = evaluated(changed)
    assert min(each.saved.low for each in made.replay) > 0.0, "the clock decides here"
    sentence = words.answer(changed, made).head
    assert sentence.startswith(f"{says}: ")
    assert f"over {rival} by the clock" in sentence
    by_clock = {each.setting: each.saved for each in made.clock}
    assert (by_clock[rival].low > 0.0) == sentence.startswith("The head pays")
    assert by_clock[rival].value == pytest.approx(1 - sum(factors) / 2, abs=0.05)


def test_of_a_threshold_under_two_verifiers_the_faster_is_judged(results: Results) -> None:
    blocks = [
        run.model_copy(
            update={
                "method": run.method.replace(name="block head", verifier="block"),
                "generations": [replace(g, seconds=g.seconds / 2) for g in run.generations],
            }
        )
        for run in runs_of(results, str(evaluated(results).method))
    ]
    made = evaluated(results.model_copy(update={"runs": [*results.runs, *blocks]}))
    assert (made.method, made.verifier, made.candidates) == ("block head", "block", 5)


@pytest.mark.parametrize(
    ("left", "reason"),
    [("fixed", "no threshold of a head was measured"), ("head", "no fixed length was measured")],
)
def test_what_was_not_measured_by_the_clock_is_said(
    results: Results, left: str, reason: str
) -> None:
    kept = [run for run in results.runs if run.method.stop.name == left]
    made = evaluated(results.model_copy(update={"runs": kept}))
    assert (made.clock, made.reason) == ([], reason)


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
            clocked(SAVES, SAVES),
            f"{PAYS}K=6 on held-out rollouts and {SAVES} over K=4 by the clock.",
        ),
        (
            on_rollouts(SAVES, SAVES),
            clocked(MAYBE_SAVES, SAVES),
            f"{FEW}6.0 % [5.0, 7.0] over K=6 on held-out rollouts and {MAYBE_SAVES} over K=4 by",
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
    assert ("negative: slower" in sentence) == ("saves -" in sentence or " and -" in sentence)
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
    assert "Other settings were chosen on 24 dev rollouts." in basis
    rows = dict(quality.rows)
    assert rows["head (as soon as the token is drawn)"][0].startswith(
        f"{one(made, 'head').scores.auroc.value:.3f} ["  # type: ignore[union-attr]
    )
    assert len(rows) == 4
