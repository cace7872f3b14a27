"""Settings chosen on held-out rollouts, the best length of each engine, and the head's verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from transformers import LlamaForCausalLM

import eval.analysis.choice as choice_module
from eval.analysis.choice import DevChoice, choose_on_dev, rule_of
from eval.analysis.expectation import expected_counts
from eval.analysis.replay import cost_rule_counts
from eval.analysis.rivals import ALL
from eval.analysis.traces import acceptance_traces
from eval.drafting.stopping import STOPPING_RULES
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import constant_length
from eval.measuring.metrics import compute_metrics, speed_ratio_interval
from eval.measuring.results import Results, Run
from eval.reporting.lengths import longest_measured, measured_lengths
from eval.reporting.verdict import Ratio, judge
from heads import AcceptanceHead, ImmediateHead
from heads.probe import OtherSamplingWarning
from specdata.errors import ManifestError
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored
from specdata.storage.resume import Settings
from specdata.storage.schema import LABELS
from tests.synthetic_results import synthetic_results
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


COST = {
    "limit": 9,
    "draft_seconds": 0.1,
    "token_seconds": 1.0,
    "head": False,
    "calibration": (0.3, 1.2),
}


def measured(stop: str, **changes: object) -> Run:
    """What results hold of a chain with this rule."""
    base = next(run for run in synthetic_results(datasets=("d",)).runs if run.method == "fixed-4")
    return base.model_copy(update={"stop": stop, "length": 20, **changes})


def test_the_rule_of_a_measured_method_is_the_one_that_it_decoded_with() -> None:
    for stop, parameters in (
        ("confidence", {"threshold": 0.5, "limit": 5}),
        ("entropy", {"threshold": 1.5, "limit": 20}),
        ("cumulative", {"threshold": 0.6, "limit": 20}),
        ("logit", {"threshold": 0.4, "limit": 7, "calibration": (0.3, 1.2)}),
        ("head", {"threshold": 0.3, "limit": 20}),
        ("cost", COST),
        ("fixed", {"length": 4}),
    ):
        rule = STOPPING_RULES[stop].model_validate(parameters)
        run = measured(
            stop,
            length=parameters.get("limit", parameters.get("length")),
            threshold=parameters.get("threshold"),
            parameters={
                name: value
                for name, value in rule.reported().items()
                if name not in ("threshold", "limit", "length")
            },
        )
        assert rule_of(run) == rule
    assert rule_of(measured("patience")) is None


def labelled(folder: Path, sets: str = "dddddd") -> tuple[datasets.Dataset, LlamaForCausalLM]:
    """Labels of one rollout for each name of a prompt set, and the draft that made them."""
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(1, vocab=12).float()
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> object:
        ids = torch.randint(2, 12, (14,), generator=generator).tolist()
        made = {"example_id": f"e{number}", "dataset": sets[number], "sample": 0, "turn": 0}
        made |= {
            "split": "dev",
            "finish": "length",
            "prompt_ids": ids[:3],
            "completion_ids": ids[3:],
        }
        return made

    sampling = SamplingConfig()
    rows = labeller(target, draft, sampling)([row(number) for number in range(len(sets))])  # type: ignore[misc]
    settings = Settings({"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}})
    fill_dataset(folder, LABELS, settings, [lambda: rows], lambda done: None)
    return load_stored(folder), draft


def test_choosing_on_dev_ranks_settings_by_expected_time(results: Results, tmp_path: Path) -> None:
    labels, draft = labelled(tmp_path)
    head = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0).eval()
    choice = choose_on_dev(results, labels, draft, head)
    assert choice is not None
    assert (choice.rollouts, choice.datasets) == (6, ("d",))
    assert choice.draft_seconds == pytest.approx(0.002, rel=0.2)
    assert choice.target_seconds == pytest.approx(0.0114, rel=0.2)
    known = {"fixed-4", "head-0.5", "confidence-0.4", "logit-0.7", "entropy-1.5", "transformers"}
    assert known <= set(choice.expected)
    assert {"tree-4x2x1", "plain", "biased-0.05"}.isdisjoint(choice.expected)
    traces = acceptance_traces(labels)
    counts = expected_counts(traces, constant_length(traces.tokens, 4))
    by_hand = counts.seconds_per_token(choice.draft_seconds, choice.target_seconds)
    assert choice.expected["fixed-4"] == pytest.approx(by_hand)
    untimed = synthetic_results(datasets=("alpaca",), timed=False)
    assert choose_on_dev(untimed, labels, draft, head) is None


@pytest.mark.parametrize("kind", [AcceptanceHead, ImmediateHead])
def test_a_cost_rule_that_measured_its_costs_is_replayed_with_those_of_the_evaluation(
    kind: type[AcceptanceHead] | type[ImmediateHead], results: Results, tmp_path: Path
) -> None:
    """With a head of either kind, whose inputs come from the sampler that was decoded with."""
    labels, draft = labelled(tmp_path)
    torch.manual_seed(0)
    head = kind(hidden_size=16, depth=1, sampling={"temperature": 0.5}).eval()
    torch.nn.init.normal_(head.output.weight, std=2.0)
    rule = STOPPING_RULES["cost"].model_validate({"calibration": (4.0, 1.2)})
    assert isinstance(rule, Cost)
    assert rule.measured
    parameters = {k: v for k, v in rule.reported().items() if k not in ("limit", "threshold")}
    runs = [
        measured("cost", method=method, head=asked, parameters=parameters)
        for method, asked in (("with the head", "head"), ("without", None))
    ]
    both = results.model_copy(update={"runs": [*results.runs, *runs]})
    with pytest.warns(OtherSamplingWarning):
        choice = choose_on_dev(both, labels, draft, head)
    assert choice is not None
    sampling = SamplingConfig(1.0, 50, 1.0)
    with pytest.warns(OtherSamplingWarning):
        traces = acceptance_traces(labels, draft=draft, sampling=sampling, head=head)
    for method, asked in (("with the head", True), ("without", False)):
        counts = cost_rule_counts(
            rule.model_copy(update={"head": asked}),
            traces,
            draft_seconds=choice.draft_seconds,
            target_seconds=choice.target_seconds,
        )
        assert counts is not None
        expected = counts.seconds_per_token(choice.draft_seconds, choice.target_seconds)
        assert choice.expected[method] == pytest.approx(expected, rel=1e-3)
    assert choice.expected["with the head"] != choice.expected["without"]


def test_no_prompt_set_crowds_out_another_when_settings_are_chosen(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, draft = labelled(tmp_path, "aaaaabbc")
    monkeypatch.setattr(choice_module, "ROLLOUTS", 2)
    head = AcceptanceHead(hidden_size=16, depth=1).eval()
    choice = choose_on_dev(results, labels, draft, head)
    assert choice is not None
    assert (choice.rollouts, choice.datasets) == (5, ("a", "b", "c"))


CHOICE = DevChoice(
    48,
    ("alpaca",),
    0.002,
    0.011,
    {
        **{f"fixed-{k}": seconds for k, seconds in ((2, 5), (4, 3), (6, 4), (8, 6), (12, 9))},
        **{f"head-{h}": seconds for h, seconds in ((0.3, 4), (0.5, 2.5), (0.7, 3), (0.9, 5))},
        "block-6": 1.0,
        "confidence-0.4": 3.5,
        "logit-0.7": 3.6,
    },
)


def runs_of(results: Results, name: str) -> list[Run]:
    return [run for run in results.runs if run.method == name]


def test_the_verdict_judges_on_the_prompts_what_was_chosen_on_held_out_rollouts(
    results: Results,
) -> None:
    verdict = judge(results, CHOICE)
    # Not the fastest on the prompts: the one that cost least on held-out rollouts.
    assert (verdict.method, verdict.threshold, verdict.candidates) == ("head-0.5", 0.5, 4)
    chosen = {rival.rule: rival.method for rival in verdict.rivals}
    assert list(chosen) == ["fixed", "confidence", "entropy", "logit", "assisted"]
    assert chosen["fixed"] == "fixed-4"  # block-6 verifies otherwise
    assert chosen["assisted"] == "transformers"
    mine, other = (
        [record for run in runs_of(results, name) for record in run.generations]
        for name in ("head-0.5", "fixed-4")
    )
    speeds = [compute_metrics(records).tokens_per_second for records in (mine, other)]
    assert speeds[0] is not None
    assert speeds[1] is not None
    ratio = verdict.rivals[0].ratios[ALL]
    assert ratio.value == pytest.approx(speeds[0] / speeds[1])
    assert (ratio.low, ratio.high) == speed_ratio_interval(mine, other)
    assert set(verdict.rivals[0].ratios) == {ALL, "alpaca", "gsm8k"}
    # In hindsight: the fastest chain without a head, whatever verifies it and whoever drafts.
    drafters = ("chain", "transformers")
    names = {run.method for run in results.runs if run.drafter in drafters and run.lossless}
    speed = {
        name: compute_metrics(
            [record for run in runs_of(results, name) for record in run.generations]
        ).tokens_per_second
        or 0.0
        for name in names
        if runs_of(results, name)[0].head is None
    }
    assert verdict.fastest is not None
    assert speed[verdict.fastest.method] == max(speed.values())
    assert verdict.fastest.candidates == len(speed) > len(verdict.rivals)


@pytest.mark.parametrize(
    ("factors", "status"),
    [
        ((0.5, 0.5), "pays"),
        ((1.0, 1.0), "not shown to pay"),
        ((0.6, 1.6), "not shown to pay"),  # slower by 9 %, but on every other prompt only
        ((2.0, 2.0), "does not pay"),
    ],
)
def test_a_head_pays_only_if_its_interval_says_so_against_every_rival(
    results: Results, factors: tuple[float, float], status: str
) -> None:
    def timed_as(run: Run) -> Run:
        """A head's run as the fixed length's, at another speed: equal means not told apart."""
        if not run.method.startswith("head-"):
            return run
        (fixed,) = [r for r in results.of(run.dataset) if r.method == "fixed-4"]
        records = [
            replace(g, seconds=g.seconds * factors[number % 2])
            for number, g in enumerate(fixed.generations)
        ]
        return run.model_copy(update={"generations": records})

    kept = [r for r in results.runs if r.stop in (None, "fixed", "head")]
    changed = results.model_copy(update={"runs": [timed_as(run) for run in kept]})
    verdict = judge(changed, CHOICE)
    assert verdict.status == status
    ratio = verdict.rivals[0].ratios[ALL]
    assert ratio.value == pytest.approx(2 / sum(factors), rel=0.05)
    word = "slower" if sum(factors) > 2 else "faster"
    assert word in str(ratio)


def test_the_setting_of_transformers_own_loop_is_chosen_on_held_out_rollouts_too(
    results: Results,
) -> None:
    """It has no verifier's name, and is a rival of the head whatever verifies that."""
    other = [
        run.model_copy(update={"method": "transformers K=9", "length": 9, "stop": "fixed"})
        for run in runs_of(results, "transformers")
    ]
    both = results.model_copy(update={"runs": [*results.runs, *other]})
    expected = {**CHOICE.expected, "transformers": 2.0, "transformers K=9": 1.0}
    verdict = judge(both, replace(CHOICE, expected=expected))
    (assisted,) = [rival for rival in verdict.rivals if rival.rule == "assisted"]
    assert (assisted.method, assisted.candidates) == ("transformers K=9", 2)
    assert judge(both, CHOICE).left_out == ("assisted",)


def test_a_ratio_says_its_percent_and_interval() -> None:
    assert str(Ratio(0.979, 0.95, 1.012)) == "2.1 % slower (95 % interval -5.0 to +1.2 %)"
    assert str(Ratio(1.061, 1.049, 1.072)) == "6.1 % faster (95 % interval +4.9 to +7.2 %)"


def test_what_is_missing_is_said_and_never_guessed(results: Results) -> None:
    assert judge(results, None).reason == "no held-out labels to choose the threshold on"
    untimed = synthetic_results(datasets=("alpaca",), timed=False)
    assert judge(untimed, CHOICE).reason == "speeds were not measured"
    no_fixed = [run for run in results.runs if run.stop != "fixed" or run.verifier == "block"]
    without = results.model_copy(update={"runs": no_fixed})
    assert "no fixed length" in judge(without, CHOICE).reason
    few = DevChoice(48, ("alpaca",), 0.002, 0.011, {"fixed-4": 1.0})
    assert judge(results, few).status == "not measured"
    # Two entropies and no way to choose between them: left out, not picked by the test set.
    second = [
        run.model_copy(update={"method": "entropy-2", "threshold": 2.0})
        for run in runs_of(results, "entropy-1.5")
    ]
    more = results.model_copy(update={"runs": [*results.runs, *second]})
    verdict = judge(more, CHOICE)
    assert verdict.left_out == ("entropy",)
    assert "entropy" not in {rival.rule for rival in verdict.rivals}


def test_the_best_length_of_each_engine_is_the_fastest_of_all_that_was_measured(
    results: Results,
) -> None:
    best = measured_lengths(results)
    assert [engine for engine, found in best.items() if found is None] == [
        "transformers",  # its method here stops by confidence
        "vLLM",
        "SGLang",
        "llama.cpp",
    ]
    ours = best["draftsmith"]
    assert ours is not None
    speeds = {}
    for name in ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6"):
        runs = runs_of(results, name)
        speeds[name] = sum(r.tokens for r in runs) / sum(r.seconds["total"] for r in runs)
    first, second = sorted(speeds, key=speeds.__getitem__, reverse=True)[:2]
    assert (ours.method, ours.runner_up) == (first, second)
    assert ours.speed == pytest.approx(speeds[first])
    assert ours.interval[0] < ours.speed < ours.interval[1]
    assert ours.measured == (2, 4, 6, 8, 12)
    assert ours.ratio == pytest.approx(speeds[first] / speeds[second])
    pooled = [
        [g for run in runs_of(results, name) for g in run.generations] for name in (first, second)
    ]
    assert ours.ratio_interval == speed_ratio_interval(*pooled)


def test_transformers_has_the_best_of_its_own_lengths(results: Results) -> None:
    own = [
        run.model_copy(update={"drafter": "transformers", "method": f"hf {run.method}"})
        for run in results.runs
        if run.method in ("fixed-2", "fixed-12")
    ]
    both = results.model_copy(update={"runs": [*results.runs, *own]})
    best = measured_lengths(both)["transformers"]
    assert best is not None
    assert best.measured == (2, 12)
    assert best.length in (2, 12)
    assert measured_lengths(both)["draftsmith"] == measured_lengths(results)["draftsmith"]


def test_a_length_measured_on_some_prompt_sets_only_is_no_best_length(results: Results) -> None:
    ours = measured_lengths(results)["draftsmith"]
    assert ours is not None
    fewer = [r for r in results.runs if (r.method, r.dataset) != (ours.method, "gsm8k")]
    left = measured_lengths(results.model_copy(update={"runs": fewer}))["draftsmith"]
    assert left is not None
    assert left.method == ours.runner_up
    none = [r for r in results.runs if r.stop != "fixed"]
    with pytest.raises(ManifestError, match="fixed length"):
        longest_measured(results.model_copy(update={"runs": none}))
