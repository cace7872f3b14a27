"""What to use: the first lines of a report, its pooled rows, and draft lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.decode_config import Method
from eval.measuring.intervals import Interval
from eval.measuring.metrics import compute_metrics
from eval.measuring.pooled import PooledRow, fastest, pool
from eval.measuring.results import Results, Run
from eval.reporting.recommendation import (
    FEW_PROMPTS,
    answer,
    fastest_lengths,
    head_rivals,
    head_sentence,
    head_verdict,
    is_wide,
    lengths_table,
    longest_measured,
)
from eval.reporting.report import Context, methods_table, sections
from eval.reporting.table import readme_table
from specdata.errors import ManifestError
from tests.synthetic_results import PROMPTS, only, rebuilt, slower, synthetic_results

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
    alone = only(results, "alpaca")
    first, second = pool(alone)[2:4]
    ratio = first.over(second, "tokens_per_second")
    a, b = alone.runs[2], alone.runs[3]
    within = compute_metrics(a.generations, b.generations).intervals["speedup"]
    assert (ratio.low, ratio.high) == pytest.approx(within)
    assert ratio.value == pytest.approx(a.tokens_per_second / b.tokens_per_second)  # type: ignore[operator]
    assert first.over(first, "tokens_per_second") == Interval(1.0, 1.0, 1.0)


def test_all_prompt_sets_have_one_average_in_every_table(results: Results) -> None:
    """Report, terminal, card, README: the same figure for the same method."""
    every, each, *_ = sections(results, Context())
    assert "counts alike" in every.sentence
    assert [name for name, _ in each.table.columns][:2] == results.datasets()
    table = readme_table(results).splitlines()
    for row, (name, figures), (_, again) in zip(
        pool(results), every.table.rows, each.table.rows, strict=True
    ):
        assert name.split()[0] == row.name
        tokens = f"{row.value('block_efficiency'):.2f}"
        assert figures[2].startswith(tokens)
        assert again[2] == tokens
        assert figures[1].startswith(f"{row.value('tokens_per_second'):.1f}")
        for line in table:
            assert not line.startswith(f"| {row.name} ") or f" {tokens} |" in line
    one = sections(only(results, "alpaca"), Context())
    assert "Each prompt set" not in [section.title for section in one]


# --- what is said first ---


def test_the_first_sentence_names_the_fastest_lossless_method_and_its_paired_intervals(
    results: Results,
) -> None:
    said = answer(results)
    rows = {row.name: row for row in pool(results)}
    best = max((r for r in rows.values() if r.method.lossless), key=PooledRow.speed)
    for rival, words in (
        ("plain", f"{best.name} is fastest: # times the speed of the target alone"),
        ("transformers", "(transformers) it is # times as fast"),
    ):
        ratio = best.over(rows[rival], "tokens_per_second")
        assert words.replace("#", f"{ratio.value:.2f}") in said.finding
        assert f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})" in said.finding
    assert "It is exact: the verifier" in said.exactness
    assert f"Prompts: alpaca {PROMPTS}, gsm8k {PROMPTS}; temperature 1.0, top_k 50" in said.basis
    assert "each set counts alike" in said.basis
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
    assert answer(alone).finding.startswith("fixed-4 is fastest: ")
    best = fastest(pool(alone))
    assert best is not None
    assert best[0].name == "fixed-4"
    assert "Simulated CPU @ 2.0 GHz, 1 torch threads" in said.basis


def test_a_biased_method_is_never_the_fastest_and_never_called_exact(results: Results) -> None:
    fast = rebuilt(results, lambda run: run if run.method.lossless else slower(run, 0.2))
    said = answer(fast)
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
    (even,) = [row.value("speedup") or 0.0 for row in pool(some) if row.name == "fixed-4"]
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
    table = methods_table(results, ["alpaca"])
    for (_, figures), run in zip(table.rows, results.of("alpaca"), strict=True):
        assert run.speedup is not None
        wide = is_wide(Interval(run.speedup, *run.intervals["speedup"]))
        assert figures[0].endswith("~") == wide

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


# --- whether the head pays ---


def test_the_fastest_method_with_a_head_meets_the_fastest_of_each_kind_without(
    results: Results,
) -> None:
    table, found = {row.name: row for row in pool(results)}, head_verdict(results)
    assert found is not None
    heads = [f"head-{threshold}" for threshold in (0.3, 0.5, 0.7, 0.9)]
    assert (found.method, found.candidates) == (max(heads, key=lambda n: table[n].speed()), 4)
    of_kind = {
        "fixed": [f"fixed-{length}" for length in (2, 4, 6, 8, 12)] + ["block-6"],
        "tree": ["tree-4x2x1"],
        "assisted": ["transformers"],
        **{name.split("-")[0]: [name] for name in ("confidence-0.4", "entropy-1.5", "logit-0.7")},
    }
    assert {rival.kind: rival.method for rival in found.rivals} == {
        kind: max(names, key=lambda name: table[name].speed()) for kind, names in of_kind.items()
    }
    assert found.rivals[0].kind == "fixed"
    head = table[found.method].speed()
    for rival in found.rivals:
        assert rival.saved.value == pytest.approx(1 - table[rival.method].speed() / head)
        assert rival.saved.low < rival.saved.value < rival.saved.high
    section = head_rivals(results)
    assert section is not None
    assert section.sentence == head_sentence(results) == answer(results).head
    assert section.table.rows[0] == (
        "fixed length",
        (f"{found.rivals[0].saved}", found.rivals[0].method),
    )
    sure = [rival for rival in found.rivals if rival.saved.low > 0.0]
    assert len(section.table.wins) == len(sure)


@pytest.mark.parametrize(
    ("rival", "factors", "says"),
    [
        ("fixed-4", (0.5, 0.5), "The head pays: "),
        ("fixed-4", (1.0, 1.0), "So few prompts cannot tell whether the head pays: "),
        ("fixed-4", (0.6, 1.3), "So few prompts cannot tell whether the head pays: "),
        ("fixed-12", (1.3, 1.3), "The head does not pay: "),
        ("block-6", (0.6, 1.3), "So few prompts cannot tell whether the head pays: "),
        ("tree-4x2x1", (1.3, 1.3), "The head does not pay: "),
    ],
)
def test_a_head_pays_only_if_its_intervals_say_so_against_every_rival_of_the_table(
    results: Results, rival: str, factors: tuple[float, float], says: str
) -> None:
    def timed_as(run: Run) -> Run:
        """All others take three times as long; a head as long as the rival, times a factor."""
        is_head = run.name.startswith("head-")
        name = rival if is_head else run.name
        (timed,) = [each for each in results.of(run.dataset) if each.name == name]
        factor = factors if is_head else (1.0, 1.0) if name == rival else (3.0, 3.0)
        records = [
            replace(g, seconds=g.seconds * factor[number % 2])
            for number, g in enumerate(timed.generations)
        ]
        return run.model_copy(update={"generations": records})

    changed = rebuilt(results, timed_as)
    sentence = head_sentence(changed)
    assert sentence.startswith(says)
    found = head_verdict(changed)
    assert found is not None
    saved = {each.method: each.saved for each in found.rivals}[rival]
    assert f"{found.method} saves {saved} over {rival}" in sentence
    assert (saved.low > 0.0) == sentence.startswith("The head pays")
    assert ("negative: slower" in sentence) == (saved.value < 0.0)
    assert saved.value == pytest.approx(1 - sum(factors) / 2, abs=0.05)


def test_of_heads_under_two_verifiers_the_faster_is_judged(results: Results) -> None:
    def under_block(run: Run) -> Run:
        method = run.method.replace(name="block head", verifier="block")
        return slower(run, 0.5).model_copy(update={"method": method})

    blocks = rebuilt(only(results, "head-0.5"), under_block).runs
    found = head_verdict(results.model_copy(update={"runs": [*results.runs, *blocks]}))
    assert found is not None
    assert (found.method, found.candidates) == ("block head", 5)


def test_why_a_head_was_not_judged_is_said(results: Results) -> None:
    untimed = synthetic_results("alpaca", timed=False)
    said = "Whether the head pays was not measured: "
    assert head_sentence(untimed) == f"{said}speeds were not measured."
    heads = rebuilt(results, lambda run: run if run.head or not run.draft else None)
    assert head_sentence(heads) == f"{said}no fixed length was measured."
    assert head_rivals(heads) is None
    assert head_sentence(only(results, "plain", "fixed-4")) == ""


# --- the number of drafted tokens ---


def test_the_best_length_of_each_engine_is_the_fastest_of_all_that_was_measured(
    results: Results,
) -> None:
    fastest = fastest_lengths(results)
    assert fastest["transformers"] == []  # its method here stops by confidence
    names = ("fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12", "block-6")
    rows = sorted((r for r in pool(results) if r.name in names), key=PooledRow.speed, reverse=True)
    assert [row.name for row in fastest["draftsmith"]] == [row.name for row in rows]
    ((engine, (best, speed, lengths, against)),) = lengths_table(fastest).rows
    assert engine == "draftsmith"
    assert best.startswith(f"K = {rows[0].method.deepest}, ")
    assert speed.startswith(f"{rows[0].speed():.1f} [")
    assert lengths == "K = 2, 4, 6, 8, 12"
    ratio = rows[0].over(rows[1], "tokens_per_second")
    shown = f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] {rows[1].name}"
    assert against.startswith(shown)


def test_transformers_has_the_best_of_its_own_lengths(results: Results) -> None:
    def theirs(run: Run) -> Run:
        method = run.method.replace(decoder="assisted", name=f"hf {run.name}")
        return run.model_copy(update={"method": method})

    own = rebuilt(only(results, "fixed-2", "fixed-12"), theirs).runs
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
