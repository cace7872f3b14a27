"""Expected speed-up at other cost ratios: Eq. 5.1 on the counts of a run."""

from __future__ import annotations

import pytest

from eval.measuring.methods import PLAIN
from eval.measuring.metrics import LatencyFit
from eval.measuring.pooled import pool
from eval.measuring.results import Results
from eval.reporting.recommendation import RATIOS, expected_speedup, what_if
from eval.reporting.report import Context, render_page
from tests.synthetic_results import synthetic_results


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results()


def test_a_chain_is_as_fast_as_equation_5_1_says(results: Results) -> None:
    chains = [
        row
        for row in pool(results)
        if row.method.is_chain
        and all(each.draft_forwards == each.n_draft for run in row.runs for each in run.generations)
    ]
    assert chains
    for row in chains:
        for ratio in RATIOS:
            seconds = [
                LatencyFit(ratio, 1.0, 1.0, 3).seconds_per_token(
                    discard_rate=run.discard_rate, verification_rate=run.verification_rate
                )
                for run in row.runs
            ]
            expected = len(seconds) / sum(seconds)  # the sets count alike
            assert expected_speedup(row, ratio) == pytest.approx(expected)


def test_forwards_are_counted_whatever_they_drafted() -> None:
    """A tree pays its levels, not its nodes, and a head the forward after which it stops."""
    row = next(row for row in pool(synthetic_results(datasets=("alpaca",))) if "tree" in row.name)
    made = row.runs[0].generations
    tokens, rounds, forwards = (
        sum(getattr(each, name) for each in made) for name in ("tokens", "rounds", "draft_forwards")
    )
    assert forwards < sum(each.n_draft for each in made)
    assert expected_speedup(row, 0.2) == pytest.approx(tokens / (rounds + 0.2 * forwards))


def test_the_page_has_one_table_whose_best_method_is_lossless(results: Results) -> None:
    shown = what_if(results)
    assert shown is not None
    drafting = [row for row in pool(results) if row.method.uses_draft]
    assert [method.removesuffix(" †") for method, _ in shown.rows] == [r.name for r in drafting]
    for number in range(len(RATIOS)):
        best = [method for method, speedups in shown.rows if "★" in speedups[number]]
        assert best
        assert not any("†" in name for name in best)
    assert render_page(results, Context()).count(f"<h2>{shown.title}") == 1


def test_the_target_alone_has_no_table(results: Results) -> None:
    alone = results.model_copy(update={"runs": [run for run in results.runs if run.name == PLAIN]})
    assert what_if(alone) is None
