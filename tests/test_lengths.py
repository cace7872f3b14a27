"""The best measured draft length of each engine."""

from __future__ import annotations

import pytest

from eval.measuring.pooled import pool
from eval.measuring.results import Results
from eval.reporting.recommendation import best_lengths, longest_measured
from specdata.errors import ManifestError
from tests.synthetic_results import synthetic_results


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


def test_the_best_length_of_each_engine_is_the_fastest_of_all_that_was_measured(
    results: Results,
) -> None:
    best = best_lengths(results)
    assert best["transformers"] is None  # its method here stops by confidence
    ours = best["draftsmith"]
    assert ours is not None
    names = ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6")
    rows = {row.name: row for row in pool(results) if row.name in names}
    speeds = {name: row.value("tokens_per_second") or 0.0 for name, row in rows.items()}
    first, second = sorted(speeds, key=speeds.__getitem__, reverse=True)[:2]
    assert (ours.row.name, ours.others[0].name) == (first, second)
    assert {row.name for row in ours.others} == {*names} - {first}
    best, speed, lengths, against = ours.cells
    assert best.startswith(f"K = {ours.length}, ")
    assert speed.startswith(f"{speeds[first]:.1f} [")
    assert lengths == "K = 2, 4, 6, 8, 12"
    ratio = rows[first].over(rows[second], "tokens_per_second")
    assert against.startswith(f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] {second}")


def test_transformers_has_the_best_of_its_own_lengths(results: Results) -> None:
    own = [
        run.model_copy(
            update={"method": run.method.replace(decoder="assisted", name=f"hf {run.name}")}
        )
        for run in results.runs
        if run.name in ("fixed-2", "fixed-12")
    ]
    both = results.model_copy(update={"runs": [*results.runs, *own]})
    best = best_lengths(both)["transformers"]
    assert best is not None
    assert {best.length, best.others[0].method.deepest} == {2, 12}
    ours, alone = best_lengths(both)["draftsmith"], best_lengths(results)["draftsmith"]
    assert ours is not None
    assert alone is not None
    assert ours.row.name == alone.row.name


def test_a_length_measured_on_some_prompt_sets_only_is_no_best_length(results: Results) -> None:
    ours = best_lengths(results)["draftsmith"]
    assert ours is not None
    fewer = [r for r in results.runs if (r.name, r.dataset) != (ours.row.name, "gsm8k")]
    left = best_lengths(results.model_copy(update={"runs": fewer}))["draftsmith"]
    assert left is not None
    assert left.row.name == ours.others[0].name
    none = [r for r in results.runs if not r.method.fixed_length]
    with pytest.raises(ManifestError, match="fixed length"):
        longest_measured(results.model_copy(update={"runs": none}))
