"""What to use: the first lines of a report, its pooled rows, and draft lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from eval.measuring.intervals import Interval
from eval.measuring.metrics import compute_metrics
from eval.measuring.pooled import pool
from eval.measuring.results import Results, Run, build_results
from eval.reporting.recommendation import (
    FEW_PROMPTS,
    answer,
    fastest_lengths,
    is_wide,
    length_cells,
    longest_measured,
)
from eval.reporting.report import Context, folds, rows_of
from eval.reporting.table import readme_table
from specdata.errors import ManifestError
from tests.synthetic_results import ENVIRONMENT, PROMPTS, synthetic_results


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


def rebuilt(results: Results, change: Callable[[Run], Run | None]) -> Results:
    """The results of changed runs; those of which nothing is left are dropped."""
    runs = [changed for run in results.runs if (changed := change(run)) is not None]
    return build_results(ENVIRONMENT, [(run, run.generations) for run in runs])


def slower(run: Run, factor: float) -> Run:
    """The same tokens in another time."""
    made = [replace(each, seconds=each.seconds * factor) for each in run.generations]
    return run.model_copy(update={"generations": made})


def only(results: Results, *names: str) -> Results:
    return rebuilt(results, lambda run: run if run.name in names else None)


# --- pooled ---


def test_the_pooled_rates_of_one_set_and_of_equal_sets_are_theirs(results: Results) -> None:
    alone = rebuilt(results, lambda run: run if run.dataset == "alpaca" else None)
    twins = alone.model_copy(
        update={
            "runs": [
                run.model_copy(update={"dataset": name})
                for name in ("one", "two")
                for run in alone.runs
            ]
        }
    )
    for row, both, run in zip(pool(alone), pool(twins), alone.runs, strict=True):
        assert row.name == both.name == run.name
        for name in row.rates:
            rate, pooled, (low, high) = row.rate(name), both.rate(name), run.intervals[name]
            assert rate is not None
            assert pooled is not None
            assert rate.value == pooled.value == pytest.approx(getattr(run, name)), name
            assert (rate.low, rate.high) == pytest.approx((low, high)), name
            assert pooled.high - pooled.low <= (high - low) + 1e-12


def test_every_set_counts_alike_however_many_prompts_it_has(results: Results) -> None:
    """The pooled time of a token is the mean of the sets' times of a token."""

    def fewer(run: Run) -> Run:
        few = run.generations[:3] if run.dataset == "gsm8k" else run.generations
        return run.model_copy(update={"generations": few})

    uneven = rebuilt(results, fewer)
    for row in pool(uneven):
        times = [1 / run.tokens_per_second for run in row.runs]  # type: ignore[operator]
        assert row.value("tokens_per_second") == pytest.approx(len(times) / sum(times))
        forwards = [run.verification_rate for run in row.runs]
        assert row.value("verification_rate") == pytest.approx(sum(forwards) / len(forwards))
        assert row.value("block_efficiency") == pytest.approx(len(forwards) / sum(forwards))


def test_ratios_of_pooled_methods_are_paired_by_prompt(results: Results) -> None:
    alone = rebuilt(results, lambda run: run if run.dataset == "alpaca" else None)
    first, second = pool(alone)[2:4]
    ratio = first.over(second, "tokens_per_second")
    a, b = alone.runs[2], alone.runs[3]
    within = compute_metrics(a.generations, b.generations).intervals["speedup"]
    assert (ratio.low, ratio.high) == pytest.approx(within)
    assert ratio.value == pytest.approx(a.tokens_per_second / b.tokens_per_second)  # type: ignore[operator]
    assert first.over(first, "tokens_per_second") == Interval(1.0, 1.0, 1.0)


def test_all_prompt_sets_have_one_average_in_every_table(results: Results) -> None:
    """Report, terminal, card, README: the same figure for the same method."""
    every, each, *_ = folds(results, Context())
    assert "counts alike" in every.sentence
    assert len(each.columns) == 2 * len(results.datasets())
    table = readme_table(results).splitlines()
    for row, (name, figures) in zip(pool(results), every.rows, strict=True):
        assert name.split()[0] == row.name
        tokens = f"{row.value('block_efficiency'):.2f}"
        assert figures[2].startswith(tokens)
        assert figures[1].startswith(f"{row.value('tokens_per_second'):.1f}")
        for line in table:
            assert not line.startswith(f"| {row.name} ") or f" {tokens} |" in line
    one = folds(rebuilt(results, lambda r: r if r.dataset == "alpaca" else None), Context())
    assert "Each prompt set" not in [fold.title for fold in one]


# --- what is said first ---


def test_the_first_sentence_names_the_fastest_lossless_method_and_its_paired_intervals(
    results: Results,
) -> None:
    said = answer(results)
    rows = {row.name: row for row in pool(results)}
    lossless = [r for r in rows.values() if r.method.lossless]
    best = max(lossless, key=lambda row: row.value("tokens_per_second") or 0.0)
    ratio = best.over(rows["plain"], "tokens_per_second")
    value, low, high = ratio.value, ratio.low, ratio.high
    assert said.finding.startswith(
        f"{best.name} is fastest: {value:.2f} times the speed of the target alone"
        f" (95 % interval {low:.2f} to {high:.2f})."
    )
    ratio = best.over(rows["transformers"], "tokens_per_second")
    value, low, high = ratio.value, ratio.low, ratio.high
    assert f"(transformers) it is {value:.2f} times as fast" in said.finding
    assert f"(95 % interval {low:.2f} to {high:.2f})" in said.finding
    assert "It is exact: the verifier" in said.exactness
    assert f"Prompts: alpaca {PROMPTS}, gsm8k {PROMPTS}; temperature 1.0, top_k 50" in said.basis
    assert "each set counts alike" in said.basis
    assert "Simulated CPU @ 2.0 GHz, 1 of torch's threads" in said.basis


def test_a_biased_method_is_never_the_fastest_and_never_called_exact(results: Results) -> None:
    fast = rebuilt(results, lambda run: run if run.method.lossless else slower(run, 0.2))
    said = answer(fast)
    assert not said.finding.startswith("biased")
    assert "biased" not in said.finding
    assert "Not exact: biased-0.05 ran at" in said.exactness
    assert "total variation 0.041 a token" in said.exactness
    assert "biased" not in said.exactness.split("Not exact")[0]
    alone = answer(only(fast, "plain", "biased-0.05"))
    assert alone.finding == "Only the target alone was measured."
    assert "It is exact" not in alone.exactness


def test_where_nothing_is_faster_or_shown_to_be_the_first_sentence_says_so(
    results: Results,
) -> None:
    some = only(results, "plain", "fixed-4", "transformers")
    slow = rebuilt(some, lambda run: run if run.name == "plain" else slower(run, 9.0))
    said = answer(slow)
    assert said.finding.startswith("Nothing is faster than the target alone: the best method, ")
    (row,) = [row for row in pool(some) if row.name == "fixed-4"]
    even = row.value("speedup")
    assert even is not None
    tied = rebuilt(some, lambda run: run if run.name == "plain" else slower(run, even))
    said = answer(tied)
    assert said.finding.startswith("No method is shown to be faster than the target alone: ")
    assert answer(only(results, "plain")).finding == "Only the target alone was measured."


def test_where_transformers_is_fastest_it_is_said_and_ours_is_compared_with_it(
    results: Results,
) -> None:
    some = only(results, "plain", "fixed-4", "transformers")
    theirs = rebuilt(some, lambda r: slower(r, 0.1) if r.method.decoder == "assisted" else r)
    said = answer(theirs)
    assert said.finding.startswith("transformers' own transformers is fastest")
    assert "Against the best of ours (fixed-4) it is " in said.finding
    assert "transformers' own verification" in said.exactness


def test_few_prompts_and_wide_intervals_carry_a_warning_and_enough_carry_none(
    results: Results,
) -> None:
    assert PROMPTS < FEW_PROMPTS
    said = answer(results).cautions[0]
    assert f"alpaca {PROMPTS}, gsm8k {PROMPTS}; fewer than {FEW_PROMPTS} a set" in said
    assert is_wide(Interval(1.0, 0.89, 1.11))
    assert not is_wide(Interval(1.0, 0.91, 1.09))
    for row, run in zip(rows_of(results, ["alpaca"]), results.of("alpaca"), strict=True):
        assert run.speedup is not None
        wide = is_wide(Interval(run.speedup, *run.intervals["speedup"]))
        assert row.figures[0].endswith("~") == wide

    def more(run: Run) -> Run:
        """Each prompt 40 times under other names: no set is small."""
        made = [
            replace(each, prompt_id=f"{each.prompt_id}-{copy}")
            for copy in range(40)
            for each in run.generations
        ]
        return run.model_copy(update={"generations": made})

    enough = rebuilt(only(results, "plain", "fixed-4", "transformers"), more)
    assert answer(enough).cautions == ()


# --- the number of drafted tokens ---


def test_the_best_length_of_each_engine_is_the_fastest_of_all_that_was_measured(
    results: Results,
) -> None:
    fastest = fastest_lengths(results)
    assert fastest["transformers"] == []  # its method here stops by confidence
    names = ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6")
    rows = {row.name: row for row in pool(results) if row.name in names}
    speeds = {name: row.value("tokens_per_second") or 0.0 for name, row in rows.items()}
    first, second, *_ = ranked = sorted(speeds, key=speeds.__getitem__, reverse=True)
    assert [row.name for row in fastest["draftsmith"]] == ranked
    best, speed, lengths, against = length_cells(fastest["draftsmith"])
    assert best.startswith(f"K = {rows[first].method.deepest}, ")
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
    both = fastest_lengths(results.model_copy(update={"runs": [*results.runs, *own]}))
    assert {row.method.deepest for row in both["transformers"]} == {2, 12}
    ours, alone = (each["draftsmith"] for each in (both, fastest_lengths(results)))
    assert [row.name for row in ours] == [row.name for row in alone]


def test_a_length_measured_on_some_prompt_sets_only_is_no_best_length(results: Results) -> None:
    best, *others = (row.name for row in fastest_lengths(results)["draftsmith"])
    fewer = [r for r in results.runs if (r.name, r.dataset) != (best, "gsm8k")]
    left = fastest_lengths(results.model_copy(update={"runs": fewer}))["draftsmith"]
    assert [row.name for row in left] == others
    none = [r for r in results.runs if not r.method.fixed_length]
    with pytest.raises(ManifestError, match="fixed length"):
        longest_measured(results.model_copy(update={"runs": none}))
