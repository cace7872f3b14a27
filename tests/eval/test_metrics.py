"""Figures are ratios of sums of counts, with intervals over prompts, and are recomputed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtri, stdtr

from eval.measuring.intervals import coverage, interval, prompts_needed
from eval.measuring.metrics import compute_metrics
from eval.measuring.records import record_prompt
from eval.measuring.results import Results, check_metrics, read_results, write_results
from specdata.errors import ManifestError
from tests.support.synthetic_results import by_hand, one_round, simulate


def test_a_record_sums_its_rounds_and_counts_positions() -> None:
    record = by_hand()[0]
    assert (record.tokens, record.rounds, record.n_draft, record.n_discarded) == (7, 3, 8, 4)
    assert record.drafted_by_position == [3, 3, 2]
    assert record.accepted_by_position == [2, 1, 1]
    assert record.draft_seconds == pytest.approx(0.8)
    assert record.overhead_seconds == pytest.approx(0.03)


def test_figures_equal_the_hand_computed_ratios_of_sums() -> None:
    plain = [
        record_prompt(name, [one_round(0, 0)] * n, seconds=n * 1.0, finish="length")
        for name, n in (("a", 7), ("b", 1))
    ]
    metrics = compute_metrics(by_hand(), plain)
    assert (metrics.prompts, metrics.tokens, metrics.rounds, metrics.n_target) == (2, 8, 4, 4)
    assert (metrics.n_draft, metrics.n_discarded) == (9, 4)
    assert metrics.block_efficiency == 8 / 4
    assert metrics.acceptance_rate == 5 / 9
    assert metrics.acceptance_by_position == [3 / 4, 1 / 3, 1 / 2]
    assert metrics.discard_rate == 4 / 8
    assert metrics.verification_rate == 4 / 8
    assert metrics.tokens_per_second == 8 / 5
    assert metrics.speedup == (8 / 5) / (8 / 8)
    assert metrics.seconds["total"] == 5.0


def test_plain_decoding_has_no_acceptance_and_a_speedup_of_one() -> None:
    plain = [
        record_prompt(f"{n}", [one_round(0, 0)] * 5, seconds=2.5, finish="length")
        for n in range(10)
    ]
    metrics = compute_metrics(plain, plain)
    assert metrics.acceptance_rate is None
    assert "acceptance_rate" not in metrics.intervals
    assert metrics.acceptance_by_position == []
    assert metrics.block_efficiency == 1.0
    assert (metrics.discard_rate, metrics.verification_rate) == (0.0, 1.0)
    assert metrics.speedup == 1.0
    assert metrics.intervals["speedup"] == (1.0, 1.0)


def test_tree_acceptance_counts_depth_not_nodes() -> None:
    rounds = [one_round(28, 2, depth=3), one_round(28, 1, depth=3)]
    metrics = compute_metrics([record_prompt("a", rounds, seconds=1.0, finish="length")])
    assert metrics.acceptance_rate == 3 / 6
    assert metrics.n_discarded == 56 - 3
    assert metrics.acceptance_by_position == [1.0, 0.5, 0.0]


def test_several_generations_of_a_prompt_are_resampled_together() -> None:
    rng = np.random.default_rng(0)
    records = [simulate(rng, f"{n}", lengths=(3, 3), ease=0.7) for n in range(10)]
    once, often = compute_metrics(records), compute_metrics(records * 4)
    assert (often.prompts, often.tokens) == (10, 4 * once.tokens)
    assert often.intervals["block_efficiency"] == pytest.approx(once.intervals["block_efficiency"])


def test_an_interval_over_few_prompts_covers_what_students_t_says() -> None:
    for n in (2, 3, 5, 9, 10, 30):
        within = ndtri(0.975) * np.sqrt((n - 1) / n)
        assert coverage((n,)) == pytest.approx(2 * stdtr(n - 1, within) - 1, abs=1e-6)
        assert coverage((n, n)) == pytest.approx(2 * stdtr(2 * n - 2, within) - 1, abs=1e-6)
    assert [prompts_needed(sets) for sets in (1, 2, 3)] == [10, 7, 6]
    assert coverage((1,)) == coverage((1, 1)) == 0.0


def test_every_token_is_paid_for_by_a_forward_and_intervals_contain_the_figure(
    results: Results,
) -> None:
    for run in results.runs:
        for record in run.generations:
            assert record.n_draft + record.rounds == record.tokens + record.n_discarded
        for name, (low, high) in run.intervals.items():
            assert low <= getattr(run, name) <= high, (run.name, name)


def test_a_score_that_few_prompts_have_is_given_without_an_interval() -> None:
    rng = np.random.default_rng(0)
    records = [simulate(rng, f"{n}", lengths=(3, 3), ease=0.7) for n in range(12)]
    scores = [{"all": 1.0, "few": 1.0}] * 5 + [{"all": 1.0}] * 7
    pairs = zip(records, scores, strict=True)
    metrics = compute_metrics([replace(each, scores=given) for each, given in pairs])
    assert metrics.scores == {"few": 1.0, "all": 1.0}
    assert {"all", "few"} & {*metrics.intervals} == {"all"}


def test_an_interval_leaves_out_the_lowest_and_the_highest_fortieth() -> None:
    assert interval(np.linspace(0.0, 1.0, 1001)) == pytest.approx((0.025, 0.975))


def test_nominal_95_percent_intervals_cover_the_true_rate() -> None:
    rng = np.random.default_rng(7)
    trials, covered = 200, 0
    truth = 0.7
    for _ in range(trials):
        eases = np.clip(rng.normal(truth, 0.1, size=30), 0, 1)
        records = []
        for i, ease in enumerate(eases):
            accepted = rng.random(40) < ease
            rounds = [one_round(1, int(a)) for a in accepted]
            records.append(record_prompt(str(i), rounds, seconds=1.0, finish="length"))
        low, high = compute_metrics(records).intervals["acceptance_rate"]
        covered += low <= truth <= high
    assert 0.88 <= covered / trials <= 0.99


def test_results_survive_writing_and_reading_and_are_their_recomputation(
    results: Results, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    write_results(path, results)
    again = read_results(path)
    assert again == results
    check_metrics(again)
    stored = json.loads(path.read_text())
    assert stored["schema_version"] == 1
    assert set(stored) >= {"schema_version", "environment", "runs"}
    contract = {
        *("dataset", "target", "draft", "head", "drafter", "verifier", "stop", "sampling"),
        *("prompts", "tokens", "rounds", "n_target", "n_draft", "n_discarded"),
        *("block_efficiency", "acceptance_rate", "acceptance_by_position", "discard_rate"),
        *("verification_rate", "tokens_per_second", "speedup"),
    }
    for run in stored["runs"]:
        assert contract <= set(run)


@pytest.mark.parametrize("name", ["speedup", "block_efficiency", "tokens"])
def test_a_figure_typed_by_hand_is_found(results: Results, name: str) -> None:
    better = results.runs[1].model_copy(update={name: getattr(results.runs[1], name) * 2})
    forged = results.model_copy(update={"runs": [results.runs[0], better, *results.runs[2:]]})
    with pytest.raises(ManifestError, match=name):
        check_metrics(forged)


def test_unusable_results_are_refused_with_the_place(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ManifestError, match="no results at"):
        read_results(path)
    write_results(path, results)
    stored = json.loads(path.read_text())
    typed = {**stored["runs"][3], "tokens": "many"}
    for text, place in (
        (json.dumps({**stored, "schema_version": 2}), "schema_version"),
        (json.dumps({**stored, "runs": [*stored["runs"][:3], typed]}), r"runs\.3\.tokens"),
        ('{"schema_version": 1, "runs": [', r"results\.json"),
    ):
        path.write_text(text)
        with pytest.raises(ManifestError, match=place):
            read_results(path)
