"""One verdict over all that was measured, the pooled rows it is of, and draft lengths."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.table import beside_table
from eval.decode_config import Method
from eval.measuring.intervals import Interval
from eval.measuring.lengths import fixed_lengths, lengths_to_measure, next_round
from eval.measuring.metrics import compute_metrics
from eval.measuring.pooled import PooledRow, merit, pool
from eval.measuring.results import (
    Results,
    Run,
    build_results,
    check_metrics,
    read_results,
    write_results,
)
from eval.publishing.release import fastest_lengths
from eval.reporting.report import (
    basis,
    exactness,
    methods_table,
    picture,
    render_page,
    sections,
    terminal,
)
from eval.reporting.table import readme_table, shown_methods
from eval.reporting.verdict import verdict
from tests.support.synthetic_results import (
    PROMPTS,
    T_DRAFT,
    T_TARGET,
    only,
    rebuilt,
    simulate,
    slower,
)

# --- pooled ---


def test_the_pooled_rates_of_one_set_and_of_equal_sets_are_theirs(results: Results) -> None:
    alone = only(results, "alpaca")
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
            # Narrower by about the root of 2, because sets are resampled independently.
            assert pooled.high - pooled.low <= 0.9 * (high - low) + 1e-12


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
    alone = only(results, "alpaca")
    first, second = pool(alone)[2:4]
    ratio = first.over(second, "tokens_per_second")
    a, b = alone.runs[2], alone.runs[3]
    within = compute_metrics(a.generations, b.generations).intervals["speedup"]
    assert (ratio.low, ratio.high) == pytest.approx(within)
    assert ratio.value == pytest.approx(a.tokens_per_second / b.tokens_per_second)  # type: ignore[operator]
    assert first.over(first, "tokens_per_second") == Interval(1.0, 1.0, 1.0)


# --- the verdict ---


def beside(results: Results, name: str, *lengths: int) -> Results:
    """With other lengths of a method, which are slower."""
    made = [
        slower(run, 3.0).model_copy(
            update={"method": run.method.replace(name=f"{name} as {k}", length=k)}
        )
        for k in lengths
        for run in results.runs
        if run.name == name
    ]
    return rebuilt(results.model_copy(update={"runs": [*results.runs, *made]}), lambda run: run)


def within(results: Results, name: str, other: str) -> str:
    """The interval of a method's speed over another's on all sets, as a verdict gives it."""
    rows = {row.name: row for row in pool(results)}
    ratio = rows[name].over(rows[other], "tokens_per_second")
    return f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"


def test_the_first_sentence_names_the_fastest_lossless_method_and_its_paired_interval(
    results: Results,
) -> None:
    said = verdict(results)
    best = max((r for r in pool(results) if r.method.lossless), key=PooledRow.speed)
    assert said.startswith(f"{best.name} is fastest: {best.value('speedup'):.2f} times the speed ")
    assert f"{within(results, best.name, 'plain')}." in said
    assert "is exact: the verifier" in exactness(results)
    on = basis(results)
    assert f"Prompts: alpaca {PROMPTS}, gsm8k {PROMPTS}; temperature 1.0, top_k 50" in on
    assert "each set counts alike" in on
    assert "Simulated CPU @ 2.0 GHz, 1 torch threads" in on
    # transformers' loop without a draft is no rival, however fast.
    generate = Method(name="transformers", decoder="generate")
    alone = rebuilt(
        only(results, "plain", "fixed-4", "transformers"),
        lambda run: (
            slower(run, 0.1).model_copy(update={"method": generate})
            if run.name == "transformers"
            else run
        ),
    )
    assert verdict(alone).startswith("fixed-4 is fastest: ")


def test_a_biased_method_is_never_the_fastest_and_never_called_exact(results: Results) -> None:
    fast = rebuilt(results, lambda run: run if run.method.lossless else slower(run, 0.2))
    assert "biased" not in verdict(fast)
    exact, biased = exactness(fast).split("Not exact: biased-0.05 changes")
    assert "total variation 0.041 [0.041, 0.041] a token" in biased
    assert "biased" not in exact
    alone = only(fast, "plain", "biased-0.05")
    assert verdict(alone) == "Only the target alone was measured here."
    engine = Method(name="server alone", decoder="server", url="http://127.0.0.1:1")
    runs = [run.model_copy(update={"method": engine}) for run in alone.runs]
    for served in (runs, [*alone.runs, *runs]):  # which no verdict calls the target alone
        said = verdict(alone.model_copy(update={"runs": served}))
        assert said.startswith("Nothing drafted here; the speed-ups of served engines are over ")
    assert "is exact" not in exactness(alone)


@pytest.mark.parametrize(
    ("draft", "verify", "tries"),
    [
        (6.0, 1.0, "A draft that costs nothing would run at"),
        (1.0, 6.0, "Even a draft that costs nothing would not pay"),
    ],
)
def test_where_nothing_is_faster_what_to_try_follows_from_the_runs_own_figures(
    results: Results, draft: float, verify: float, tries: str
) -> None:
    def dear(run: Run) -> Run:
        if run.name == "plain":
            return run
        made = []
        for g in run.generations:
            drafting, target = draft * g.draft_seconds, verify * g.target_seconds
            more = drafting + target - g.draft_seconds - g.target_seconds
            times = {"draft_seconds": drafting, "target_seconds": target}
            times |= {"seconds": g.seconds + more, "prompt_seconds": verify * g.prompt_seconds}
            made.append(replace(g, **times))
        return run.model_copy(update={"generations": made})

    slow = rebuilt(only(results, "plain", "fixed-2", "fixed-4", "head-0.3"), dear)
    said = verdict(slow)
    assert said.startswith("Nothing is faster than the target alone: the best method, ")
    assert tries in said
    assert ("draft.init.vocabulary" in said) == (draft > 1)
    assert ("a lower temperature" in said) == (verify > 1)
    best = max(("fixed-2", "fixed-4"), key={r.name: r.speed() for r in pool(slow)}.__getitem__)
    first = np.mean([run.acceptance_by_position[0] for run in slow.runs if run.name == best])
    assert f"With {best} {100 * first:.0f} % of first drafted tokens were accepted" in said
    costs = re.search(r"costs ([.\d]+) of a token .* tokens ([.\d]+) and ([.\d]+) times", said)
    assert costs is not None
    expected = [draft * T_DRAFT / (T_TARGET + 0.0004), verify, verify]
    assert [float(cost) for cost in costs.groups()] == pytest.approx(expected, rel=0.04)
    (even,) = [r.value("speedup") or 0.0 for r in pool(results) if r.name == "fixed-4"]
    tied = rebuilt(only(results, "plain", "fixed-4"), lambda r: slower(r, even if r.draft else 1))
    assert verdict(tied).startswith("Nothing is shown to be faster than the target alone: ")


@pytest.mark.parametrize(
    ("lengths", "fastest_of", "wanted"),
    [
        ([4], 4, "{name: K=3, length: 3}, {name: K=6, length: 6}"),
        ([3, 4], 4, "{name: K=6, length: 6}"),
        ([2, 4, 6], 4, "{name: K=3, length: 3}"),
        ([1, 8, 16], 8, "{name: K=5, length: 5}, {name: K=12, length: 12}"),
        ([5, 8, 12], 8, ""),
        ([3, 4, 6], 4, ""),
        ([1, 2], 1, ""),
        ([], 0, "{name: K=1, length: 1}, {name: K=2, length: 2}, {name: K=3, length: 3}"),
    ],
)
def test_whether_it_pays_is_said_only_where_the_lengths_next_to_the_best_were_measured(
    results: Results, lengths: list[int], fastest_of: int, wanted: str
) -> None:
    named = dict(zip(("fixed-2", "fixed-4", "fixed-6"), lengths, strict=False))

    def of_length(run: Run) -> Run:
        if run.name not in named:
            return run
        length = named[run.name]
        method = run.method.replace(name=f"K={length}", length=length)
        run = slower(run, 0.5 if length == fastest_of else 1.0)
        return run.model_copy(update={"method": method})

    some = rebuilt(only(results, "plain", "head-0.5", *named), of_length)
    said = verdict(some)
    assert wanted in said
    assert ("to find the best, measure" in said) == bool(wanted)
    assert "The head does not pay" in said if fastest_of else "pays is not known" in said
    faster = rebuilt(some, lambda run: slower(run, 0.2) if run.head else run)
    assert ("The head pays: " in verdict(faster)) != bool(wanted)
    assert ("Whether the head pays is not known: " in verdict(faster)) == bool(wanted)


def test_lengths_of_another_verifier_are_no_neighbours(results: Results) -> None:
    wanted = lengths_to_measure(only(results, "plain", "fixed-4", "block-6"))
    asked = {(method.verifier, method.deepest) for method in wanted}
    assert asked == {("token", 3), ("token", 6), ("block", 4), ("block", 9)}


def test_dev_times_again_only_what_may_be_the_best_and_nothing_where_no_length_is_missing(
    results: Results,
) -> None:
    some = only(results, "plain", "fixed-2", "fixed-4", "fixed-6", "head-0.5", "transformers")

    def change(run: Run) -> Run:
        """Two are fast; a head's longest draft is not a length that was measured."""
        run = slower(run, 0.5) if run.name in ("fixed-4", "head-0.5") else run
        limited = run.method.replace(limit=3) if run.head else run.method
        return run.model_copy(update={"method": limited})

    some = rebuilt(some, change)
    asked = next_round(some, ())
    assert [method.name for method in asked] == ["plain", "fixed-4", "head-0.5", "fixed-3"]
    assert not next_round(some, asked[-1:])  # it was slower in an earlier round


def test_what_dev_did_not_time_again_is_chosen_after_all_that_it_did(results: Results) -> None:
    dev, test = only(results, "alpaca"), only(results, "gsm8k")
    last = [run.model_copy(update={"split": "dev"}) for run in dev.runs if run.name != "fixed-4"]
    runs = [slower(run, 0.1) if run.name == "fixed-4" else run for run in test.runs]
    both = rebuilt(results.model_copy(update={"runs": [*last, *runs]}), lambda run: run)
    ranked = sorted(pool(both), key=merit)
    assert (ranked[0].name, len(ranked)) == ("fixed-4", len(runs))
    assert both.chosen_on() == ["alpaca"]


@pytest.mark.parametrize(
    ("rival", "factors", "says"),
    [
        ("fixed-4", (0.5, 0.5), "The head pays: "),
        ("fixed-4", (1.0, 1.0), "It is not shown that the head pays: "),
        ("fixed-6", (1.3, 1.3), "The head does not pay: "),
        ("block-6", (0.6, 1.3), "It is not shown that the head pays: "),
        ("tree-4x2x1", (1.3, 1.3), "The head does not pay: "),
        ("transformers", (1.3, 1.3), "The head does not pay: "),
    ],
)
def test_a_head_pays_only_if_intervals_say_so_against_all_that_was_measured_without(
    results: Results, rival: str, factors: tuple[float, float], says: str
) -> None:
    def timed_as(run: Run) -> Run:
        """Others take a little longer; a head as long as the rival, times a factor."""
        is_head = run.name.startswith("head-")
        name = rival if is_head else run.name
        (timed,) = [each for each in results.of(run.dataset) if each.name == name]
        factor = factors if is_head else (0.5, 0.5) if name == rival else (1.3, 1.3)
        factor = (0.5 * factor[0], 0.5 * factor[1]) if is_head else factor
        records = [
            replace(g, seconds=g.seconds * (3.0 if name == "plain" else factor[number % 2]))
            for number, g in enumerate(timed.generations)
        ]
        return run.model_copy(update={"generations": records})

    changed = beside(beside(rebuilt(results, timed_as), "fixed-4", 3), "block-6", 5, 9)
    said = verdict(changed)
    assert says in said
    head = max((row for row in pool(changed) if row.name.startswith("head-")), key=PooledRow.speed)
    assert f"{head.name} is " in said
    how = f"times as fast as {rival}, which asks none {within(changed, head.name, rival)}."
    assert how in said


def test_without_a_head_the_draft_pays_against_what_needs_none(results: Results) -> None:
    few = only(results, "plain", "fixed-4", "fixed-6")
    assert "Whether the draft pays is not known" in verdict(few)
    measured = beside(few, "fixed-4", 3)
    assert verdict(measured).endswith(" The draft pays.")

    def looked_up(run: Run) -> Run:
        method = Method(name="lookup", decoder="assisted", lookup=3)
        return slower(run, 0.2).model_copy(update={"method": method, "draft": None})

    fast = rebuilt(only(results, "transformers"), looked_up).runs
    rivals = results.model_copy(update={"runs": [*measured.runs, *fast]})
    assert "lookup (of transformers) is fastest" in verdict(rivals)
    assert "The draft does not pay: " in verdict(rivals)
    assert "as fast as lookup, which needs none" in verdict(rivals)


def test_what_is_said_of_some_lengths_is_not_contradicted_by_more_of_them(results: Results) -> None:
    """Machines of random costs, of a drafted token and of a row, and of random acceptance.

    With the lengths that are asked for there is always an answer.
    """
    alpaca, said = only(results, "alpaca"), []
    pattern = {run.name: run for run in alpaca.runs}
    claim = re.compile(r"[Tt]he head (pays|does not pay|pays is not known)[:.]")

    def timed(machine: int, name: str, length: int) -> Run:
        """The head ends drafts at some length, and gains or loses some time."""
        rng = np.random.default_rng(machine)
        ease, drafted, row = rng.uniform(0.5, 0.98), rng.uniform(0, 0.3), rng.uniform(0, 0.1)
        low, gained = int(rng.integers(1, 9)), rng.uniform(0.6, 1.0)
        least, most = (low, 2 * low) if name.startswith("head") else (length, length)
        factor, rng = gained if least < most else 1.0, np.random.default_rng((machine, length))
        made = []
        for prompt in range(12):
            g = simulate(rng, f"{prompt}", lengths=(least, most), ease=ease)
            seconds = g.rounds * (1 + row) + g.n_draft * (drafted + row)
            made.append(replace(g, seconds=factor * seconds * rng.normal(1, 0.02)))
        method = pattern[name].method
        if name == "fixed-4":
            method = method.replace(name=f"K={length}", length=length)
        return pattern[name].model_copy(update={"generations": made, "method": method})

    for machine in range(8):
        made: dict[int, Run] = {}

        def measured(lengths: set[int], machine: int, made: dict[int, Run]) -> Results:
            for k in lengths - {*made}:
                made[k] = timed(machine, "fixed-4", k)
            runs = [timed(machine, "plain", 0), timed(machine, "head-0.5", 65)]
            runs += [made[k] for k in sorted(lengths)]
            return build_results(alpaca.environment, [(run, run.generations) for run in runs])

        lengths = {1, 2, 3, 4, 5} if machine % 2 else {1, 8, 16}
        found = some = measured(lengths, machine, made)
        while missing := lengths_to_measure(found):
            lengths |= {method.deepest for method in missing}
            found = measured(lengths, machine, made)
        more = measured({*lengths, *range(1, 9), 10, 12, 14, 18, 24}, machine, made)
        claims = [claim.search(verdict(each)) for each in (some, found, more)]
        said.append(tuple(each and each[1] for each in claims))
    kinds = {"pays", "does not pay"}
    assert all({first, last} != kinds for *firsts, last in said for first in firsts), said
    assert "pays is not known" in {first for first, *_ in said}
    assert {found for _, found, _ in said} == kinds


@pytest.mark.parametrize(
    ("sets", "count", "is_enough"),
    [(1, 1, False), (1, 3, False), (1, 9, False), (1, 10, True), (2, 6, False), (2, 7, True)],
)
def test_of_too_few_prompts_there_is_no_interval_and_no_verdict_anywhere(
    results: Results, sets: int, count: int, is_enough: bool, tmp_path: Path
) -> None:
    some = rebuilt(
        results if sets == 2 else only(results, "alpaca"),
        lambda run: run.model_copy(update={"generations": run.generations[:count]}),
    )
    write_results(tmp_path / "results.json", some)
    some = read_results(tmp_path / "results.json")
    check_metrics(some)
    said = verdict(some)
    assert said.startswith("No verdict, for too few prompts (alpaca") != is_enough
    assert all(bool(run.intervals) == (count >= 10) for run in some.runs)
    console = Console(width=80, file=io.StringIO())
    console.print(terminal(some))
    shown = [methods_table(some).markdown(), console.file.getvalue(), verdict(some)]  # type: ignore[attr-defined]
    shown += [readme_table(some, is_brief=True), beside_table({"all": some}), exactness(some)]
    for text in shown[:1] if is_enough else shown:
        assert bool(re.search(r"\[[\d.]+, |95 % interval \d", text)) == is_enough, text
    assert ("★" in shown[0]) == is_enough
    if not is_enough:
        assert f"Measure {10 if sets == 1 else 7} or more" in said
        assert not re.search(r">\[\d|nan", render_page(some))
        assert {bar.look for bar in picture(some)} <= {"", "first", "biased"}


def test_methods_are_chosen_on_dev_and_judged_on_test_where_both_were_measured(
    results: Results,
) -> None:
    """On dev fixed-2 and head-0.3 are made the fastest of their kinds, on test the slowest."""

    def split(run: Run) -> Run:
        chosen, is_dev = run.name in ("fixed-2", "head-0.3"), run.dataset == "alpaca"
        run = slower(run, (0.1 if is_dev else 1.5) if chosen else 1.0)
        return run.model_copy(update={"split": "dev" if is_dev else "test"})

    both = rebuilt(results, split)
    alone = rebuilt(both, lambda run: run if run.split == "test" else None)
    assert both.datasets() == ["gsm8k"]
    assert basis(both).endswith(f"chosen on other prompts (alpaca {PROMPTS}).")
    assert basis(alone).endswith("chosen on the prompts that it is judged on.")
    assert fastest_lengths(both)["draftsmith"][0].name == "fixed-2"
    assert "head-0.3" in shown_methods(both)
    assert "fastest on alpaca." in readme_table(both)
    assert [row.rates.keys() for row in pool(both)] == [row.rates.keys() for row in pool(alone)]
    for row, again in zip(pool(both), pool(alone), strict=True):
        assert row.rate("tokens_per_second") == again.rate("tokens_per_second")
    best = max(("fixed-2", "head-0.3"), key={r.name: merit(r) for r in pool(both)}.__getitem__)
    assert f"{best} " in verdict(both)
    assert within(alone, best, "plain") in verdict(both)
    assert "alpaca |" not in readme_table(both)
    assert all("alpaca" not in each.table.markdown() for each in sections(both))


def test_a_method_is_not_called_fastest_on_dev_where_the_target_alone_is(results: Results) -> None:
    def split(run: Run) -> Run:
        is_dev = run.dataset == "alpaca"
        run = slower(run, 9.0 if is_dev and run.name != "plain" else 1.0)
        return run.model_copy(update={"split": "dev" if is_dev else "test"})

    both = rebuilt(only(results, "plain", "fixed-2", "fixed-4"), split)
    (best,) = (row for row in pool(both) if row.name == "fixed-4")
    assert verdict(both).startswith(
        "On dev the target alone is fastest; of what drafts fixed-4 is, and has on test "
        f"{best.value('speedup'):.2f} times its speed {within(both, 'fixed-4', 'plain')}."
    )
    assert "Not told apart" not in verdict(both)


@pytest.mark.parametrize(
    ("share", "uneven", "says"),
    [(1.0, 1.0, ""), (0.95, 1.2, ""), (0.5, 1.0, "a core for 50 %"), (0.0, 2.0, "varied by 67 %")],
)
def test_times_beside_other_work_are_called_so_with_the_figures(
    results: Results, share: float, uneven: float, says: str
) -> None:
    """By the decoding thread's time on a core (0: not measured), or by plain decoding's spread."""

    def timed(run: Run) -> Run:
        made = []
        for number, g in enumerate(run.generations):
            wall = g.tokens * (uneven if run.name == "plain" and number % 2 else 1.0)
            made.append(replace(g, seconds=wall, cpu_seconds=share * wall))
        return run.model_copy(update={"generations": made})

    found = rebuilt(only(results, "plain", "fixed-4"), timed)
    for text in (verdict(found), readme_table(found), render_page(found)):
        assert ("measured on a busy machine (" in text) == bool(says)
        assert says in text


# --- the number of drafted tokens ---


def test_the_best_length_of_each_engine_is_the_fastest_of_its_own_that_were_measured(
    results: Results,
) -> None:
    fastest = fastest_lengths(results)
    assert fastest["transformers"] == []  # its method here stops by confidence
    names = ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6")
    rows = sorted((r for r in pool(results) if r.name in names), key=PooledRow.speed, reverse=True)
    assert [row.name for row in fastest["draftsmith"]] == [row.name for row in rows]

    def theirs(run: Run) -> Run:
        method = run.method.replace(decoder="assisted", name=f"hf {run.name}")
        return run.model_copy(update={"method": method})

    own = rebuilt(only(results, "fixed-2", "fixed-12"), theirs).runs
    both = fastest_lengths(results.model_copy(update={"runs": [*results.runs, *own]}))
    assert {row.method.deepest for row in both["transformers"]} == {2, 12}
    assert [row.name for row in both["draftsmith"]] == [row.name for row in rows]


def test_a_length_measured_on_some_prompt_sets_only_is_no_best_length(results: Results) -> None:
    best, *others = (row.name for row in fastest_lengths(results)["draftsmith"])
    fewer = [r for r in results.runs if (r.name, r.dataset) != (best, "gsm8k")]
    left = fastest_lengths(results.model_copy(update={"runs": fewer}))["draftsmith"]
    assert [row.name for row in left] == others


def test_what_the_targets_own_head_gives_is_said_beside_the_draft(results: Results) -> None:
    """It is a rival of the draft that needs none, and no length of the draft."""
    measured = beside(only(results, "plain", "fixed-4", "fixed-6"), "fixed-4", 3)

    def own(run: Run) -> Run:
        return slower(run, 0.2).model_copy(
            update={"method": run.method.replace(name="mtp K=4", mtp=True), "draft": run.target}
        )

    heads = rebuilt(only(measured, "fixed-4"), own)
    both = measured.model_copy(update={"runs": [*measured.runs, *heads.runs]})
    assert "mtp K=4 is fastest" in verdict(both)
    words = r"The target.s own head gives (\S+)x .* with mtp K=4; the draft gives (\S+)x"
    gives = re.search(words, verdict(both))
    assert gives is not None
    assert float(gives[1]) > float(gives[2]) > 1
    assert "The draft does not pay: " in verdict(both)
    assert "as fast as mtp K=4, which needs none" in verdict(both)
    assert {"mtp K=4", "fixed-4"} <= {*shown_methods(both)}, "no setting of one another"
    assert "own head" not in verdict(measured)
    assert [row.name for row in fixed_lengths(pool(both))] == [
        row.name for row in fixed_lengths(pool(measured))
    ]
