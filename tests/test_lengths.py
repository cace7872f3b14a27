"""The best measured draft length of each engine."""

from __future__ import annotations

import pytest

from eval.measuring.pooled import pool
from eval.measuring.results import Results
from eval.reporting.lengths import longest_measured, measured_lengths
from specdata.errors import ManifestError
from tests.synthetic_results import synthetic_results


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


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
    names = ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6")
    rows = {row.method: row for row in pool(results) if row.method in names}
    speeds = {name: row.value("tokens_per_second") or 0.0 for name, row in rows.items()}
    first, second = sorted(speeds, key=speeds.__getitem__, reverse=True)[:2]
    assert (ours.method, ours.runner_up) == (first, second)
    assert ours.speed.value == speeds[first]
    assert ours.speed.low < ours.speed.value < ours.speed.high
    assert ours.measured == (2, 4, 6, 8, 12)
    assert ours.ratio == rows[first].over(rows[second], "tokens_per_second")


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
