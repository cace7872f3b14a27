"""What a report says first; the pooled row, intervals, warnings, positions, texts by token."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from eval.reporting.drill_down import MOST_METHODS, MOST_TOKENS, UNSEEN, drill_down
from eval.reporting.positions import is_adaptive, position_tables, positions_of, shown_runs

from eval.measuring.metrics import speed_ratio_interval
from eval.measuring.pooled import fastest_pooled, pool
from eval.measuring.results import Method, Results, Run, build_results, fastest
from eval.measuring.samples import RoundText, Sample, Samples, SampleText
from eval.reporting.overall import FEW_PROMPTS, is_wide, overall
from eval.reporting.report import ALL_SETS, Context, pooled_section, render_page, sections_of
from tests.synthetic_results import ENVIRONMENT, PROMPTS, synthetic_results

HOSTILE = "<script>alert('x')</script>&amp; {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


@pytest.fixture(scope="module")
def few(results: Results) -> Results:
    """Few methods, so that drawing them is quick."""
    return only(results, "plain", "fixed-4", "head-0.9", "transformers", "biased-0.05")


@pytest.fixture(scope="module")
def page(few: Results) -> str:
    return render_page(few, Context())


@pytest.fixture(scope="module")
def hostile_page(few: Results) -> str:
    return shown(few, ROUNDS)


def rebuilt(results: Results, change: Callable[[Run], Run | None]) -> Results:
    """The results of changed runs; those of which nothing is left are dropped."""
    runs = [changed for run in results.runs if (changed := change(run)) is not None]
    return build_results(ENVIRONMENT, [(as_method(run), run.generations) for run in runs])


def as_method(run: Run) -> Method:
    return Method(**{name: getattr(run, name) for name in Method.model_fields})


def slower(run: Run, factor: float) -> Run:
    """The same tokens in another time."""
    made = [replace(each, seconds=each.seconds * factor) for each in run.generations]
    return run.model_copy(update={"generations": made})


def only(results: Results, *names: str) -> Results:
    return rebuilt(results, lambda run: run if run.method in names else None)


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
        assert row.method == both.method == run.method
        for name in row.rates:
            value, within = run.rate(name)
            assert row.value(name) == pytest.approx(value), name
            assert row.interval(name) == pytest.approx(within), name
            assert both.value(name) == pytest.approx(value), name
            low, high = both.interval(name)
            assert high - low <= (within[1] - within[0]) + 1e-12  # type: ignore[index]


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
    value, within = first.over(second, "tokens_per_second")
    a, b = alone.runs[2], alone.runs[3]
    assert within == pytest.approx(speed_ratio_interval(a.generations, b.generations))
    assert value == pytest.approx(a.tokens_per_second / b.tokens_per_second)  # type: ignore[operator]
    assert first.over(first, "tokens_per_second") == (1.0, (1.0, 1.0))


def test_the_fastest_of_one_set_is_the_fastest_pooled(results: Results) -> None:
    alone = rebuilt(results, lambda run: run if run.dataset == "alpaca" else None)
    pooled, single = fastest_pooled(pool(alone)), fastest(alone.runs)
    assert pooled is not None
    assert single is not None
    assert pooled[0].method == single[0].method
    assert [row.method for row in pooled[1]] == [run.method for run in single[1]]


def test_the_pooled_table_stands_beside_those_of_the_sets(results: Results, page: str) -> None:
    section = pooled_section(results)
    assert section is not None
    assert section.dataset == ALL_SETS
    assert [row.method for row in section.rows] == [run.method for run in results.of("alpaca")]
    assert [row.mark for row in section.rows].count("★") == 1
    assert "counts alike" in section.summary
    assert pooled_section(rebuilt(results, lambda r: r if r.dataset == "alpaca" else None)) is None
    assert page.index(f"<strong>{ALL_SETS}") < page.index("<strong>alpaca")


# --- what is said first ---


def test_the_first_sentence_names_the_fastest_lossless_method_and_its_paired_intervals(
    results: Results, page: str
) -> None:
    said = overall(results)
    rows = {row.method: row for row in pool(results)}
    lossless = [r for r in rows.values() if r.lossless]
    best = max(lossless, key=lambda row: row.value("tokens_per_second") or 0.0)
    value, (low, high) = best.over(rows["plain"], "tokens_per_second")
    assert said.finding.startswith(
        f"{best.method} is fastest: {value:.2f} times the speed of the target alone"
        f" (95 % interval {low:.2f} to {high:.2f})."
    )
    value, (low, high) = best.over(rows["transformers"], "tokens_per_second")
    assert f"(transformers) it is {value:.2f} times as fast" in said.finding
    assert f"(95 % interval {low:.2f} to {high:.2f})" in said.finding
    assert "It is exact: the verifier" in said.exactness
    assert f"{PROMPTS} of alpaca, {PROMPTS} of gsm8k, each set counting alike" in said.basis
    assert "at temperature 1.0, top-k 50" in said.basis
    assert "Simulated CPU @ 2.0 GHz, 1 thread." in said.basis
    assert page.index('class="finding"') < page.index('id="results"')


def test_a_biased_method_is_never_the_fastest_and_never_called_exact(results: Results) -> None:
    fast = rebuilt(results, lambda run: run if run.lossless else slower(run, 0.2))
    said = overall(fast)
    assert not said.finding.startswith("biased")
    assert "biased" not in said.finding
    assert "Not exact: biased-0.05 ran at" in said.exactness
    assert "total variation 0.041 a token" in said.exactness
    assert "biased" not in said.exactness.split("Not exact")[0]
    alone = overall(only(fast, "plain", "biased-0.05"))
    assert alone.finding == "Only the target alone was measured."
    assert "It is exact" not in alone.exactness


def test_a_head_that_is_fastest_says_that_it_is_judged_elsewhere_and_no_other_method_does(
    results: Results,
) -> None:
    heads = {run.method for run in results.runs if run.head is not None}
    (head,) = sorted(heads)[:1]
    first = rebuilt(results, lambda run: run if run.method == head else slower(run, 9.0))
    assert overall(first).finding.startswith(f"{head} is fastest")
    assert f"The fastest on these prompts, {head}, stops by a head." in overall(first).cautions[-1]
    without = rebuilt(results, lambda run: None if run.method in heads else run)
    assert not any("stops by a head" in caution for caution in overall(without).cautions)


def test_where_nothing_is_faster_or_shown_to_be_the_first_sentence_says_so(
    results: Results,
) -> None:
    some = only(results, "plain", "fixed-4", "transformers")
    slow = rebuilt(some, lambda run: run if run.method == "plain" else slower(run, 9.0))
    said = overall(slow)
    assert said.finding.startswith("Nothing is faster than the target alone: the best method, ")
    (row,) = [row for row in pool(some) if row.method == "fixed-4"]
    even = row.value("speedup")
    assert even is not None
    tied = rebuilt(some, lambda run: run if run.method == "plain" else slower(run, even))
    said = overall(tied)
    assert said.finding.startswith("No method is shown to be faster than the target alone: ")
    assert any("Too uncertain to tell" in caution for caution in said.cautions)
    assert overall(only(results, "plain")).finding == "Only the target alone was measured."


def test_where_transformers_is_fastest_it_is_said_and_ours_is_compared_with_it(
    results: Results,
) -> None:
    some = only(results, "plain", "fixed-4", "transformers")
    theirs = rebuilt(some, lambda r: slower(r, 0.1) if r.drafter == "transformers" else r)
    said = overall(theirs)
    assert said.finding.startswith("transformers' own transformers is fastest")
    assert "The best of ours, fixed-4, runs at 0." in said.finding
    assert "transformers' own verification" in said.exactness


def test_without_times_nothing_is_called_fastest() -> None:
    said = overall(synthetic_results(datasets=("alpaca",), timed=False))
    assert "Speeds were not measured" in said.finding
    assert "is fastest" not in said.finding
    assert re.search(r"Most tokens a forward of the target: .*95 % interval", said.finding)


def test_few_prompts_and_wide_intervals_carry_a_warning_and_enough_carry_none(
    results: Results, few: Results, page: str
) -> None:
    assert PROMPTS < FEW_PROMPTS
    said = overall(results).cautions[0]
    assert f"alpaca {PROMPTS}, gsm8k {PROMPTS}; fewer than {FEW_PROMPTS} a set" in said
    assert is_wide(1.0, (0.89, 1.11))
    assert not is_wide(1.0, (0.91, 1.09))
    (row,) = [row for row in sections_of(results)[0].rows if row.method == "fixed-12"]
    run = results.of("alpaca")[5]
    assert run.method == "fixed-12"
    assert row.figures[0].interval.endswith("~") == is_wide(*run.rate("speedup"))
    assert "Fewer than 24 prompts" in sections_of(results)[0].footnote
    assert page.count('class="caution"') == len(overall(few).cautions) > 0

    def more(run: Run) -> Run:
        """Each prompt 40 times under other names: no set is small."""
        made = [
            replace(each, prompt_id=f"{each.prompt_id}-{copy}")
            for copy in range(40)
            for each in run.generations
        ]
        return run.model_copy(update={"generations": made})

    enough = rebuilt(only(results, "plain", "fixed-4", "transformers"), more)
    assert overall(enough).cautions == ()
    assert "Fewer than" not in sections_of(enough)[0].footnote


def test_every_figure_of_every_table_has_its_interval(
    results: Results, few: Results, page: str
) -> None:
    pooled = pooled_section(results)
    assert pooled is not None
    cells = 0
    for section in (pooled, *sections_of(results)):
        for row in section.rows:
            for figure in row.figures:
                if figure.value != "\N{EN DASH}":  # the target alone accepts nothing
                    assert re.fullmatch(r"\[[\d.]+, [\d.]+\]~?", figure.interval), row.method
                    cells += 1
    assert cells == 3 * (6 * len(results.of("alpaca")) - 1)
    run = few.runs[1]
    for name, decimals in (("acceptance_rate", 3), ("discard_rate", 3), ("block_efficiency", 2)):
        low, high = run.intervals[name]
        assert f"[{low:.{decimals}f}, {high:.{decimals}f}]" in page


# --- acceptance by position ---


def test_fixed_and_adaptive_lengths_are_never_in_one_drawing(results: Results) -> None:
    fixed = shown_runs(results, "alpaca", adaptive=False)
    adaptive = shown_runs(results, "alpaca", adaptive=True)
    assert {run.stop for run in fixed} == {"fixed"}
    assert all(run.stop != "fixed" for run in adaptive)
    assert {run.method for run in fixed} & {run.method for run in adaptive} == set()
    assert {"head-0.9", "transformers"} <= {run.method for run in adaptive}
    assert not any(is_adaptive(run) for run in results.runs if run.drafter is None)


def test_the_figures_of_a_position_are_those_of_the_generations(results: Results) -> None:
    for run in results.of("alpaca")[1:]:
        for place, found in enumerate(positions_of(run)):
            drafted = sum(
                g.drafted_by_position[place]
                for g in run.generations
                if place < len(g.drafted_by_position)
            )
            assert found.drafted == drafted
            assert found.accepted == pytest.approx(run.acceptance_by_position[place])
            assert found.low <= found.accepted <= found.high
            assert found.share == pytest.approx(drafted / run.rounds)


def test_the_table_of_an_adaptive_rule_says_how_many_tokens_reached_each_position(
    results: Results, page: str
) -> None:
    (run,) = [run for run in results.of("alpaca") if run.method == "head-0.9"]
    table = position_tables(results, adaptive=True)[0]
    cells = table.rows["head-0.9"]
    assert [cell[1].split(" of ")[1].replace(",", "") for cell in cells] == [
        str(each.drafted) for each in positions_of(run)
    ]
    counts = [each.drafted for each in positions_of(run)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]
    assert "Not to be compared with fixed lengths" in page
    assert all(cell[1] in page for cell in cells)


# --- prompts token by token ---


def sample(dataset: str, method: str, rounds: list[RoundText], prompt: str = HOSTILE) -> Sample:
    return Sample(
        dataset=dataset,
        prompt_id="p",
        prompt=prompt,
        methods={method: SampleText(rounds=rounds, is_whole=True)},
    )


ROUNDS = [
    RoundText(accepted=["a ", "<b>"], added=" </u>", discarded=["\n", "", HOSTILE], is_bonus=False),
    RoundText(accepted=["", "é\n\n", "  x"], added="&lt;", discarded=[], is_bonus=True),
    RoundText(accepted=[], added=HOSTILE, discarded=["no"], is_bonus=False),
    RoundText(accepted=["end"], added=None, discarded=[], is_bonus=True),
]
TEXT = f"a <b> </u>é\n\n  x&lt;{HOSTILE}end"


class Tokens(HTMLParser):
    """Text of the token views: what is kept, and the tokens by their tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.kept = ""
        self.tokens: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self._inside = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if ("class", "tokens") in attrs:
            self._inside = True
        elif self._inside:
            self._open.append(tag)
            if tag != "span":
                self.tokens.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if self._inside and not self._open:
            self._inside = False
        elif self._inside:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside:
            assert self._open[-1] in {"u", "b", "del"}, f"text outside a token: {data!r}"
            tag, before = self.tokens[-1]
            self.tokens[-1] = (tag, before + data)
            self.kept += data if tag != "del" else ""


def shown(results: Results, rounds: list[RoundText], prompt: str = HOSTILE) -> str:
    best = fastest(results.of("alpaca"))
    assert best is not None
    samples = Samples(schema_version=1, samples=[sample("alpaca", best[0].method, rounds, prompt)])
    return render_page(results, Context(samples=samples))


def test_what_is_not_struck_through_is_the_decoded_text_and_nothing_of_it_is_markup(
    hostile_page: str,
) -> None:
    found = Tokens(hostile_page)
    assert found.kept == TEXT == SampleText(rounds=ROUNDS, is_whole=True).text
    assert "script" not in found.tags
    assert "49" not in found.kept
    assert "<script" not in hostile_page


def test_accepted_discarded_and_added_tokens_differ_without_colour(hostile_page: str) -> None:
    found = Tokens(hostile_page)
    tags: dict[str, list[str]] = {"u": [], "del": [], "b": []}
    for tag, text in found.tokens:
        tags[tag].append(text)
    assert tags["u"] == ["a ", "<b>", "", "é\n\n", "  x", "end"]
    assert tags["del"] == ["⏎", UNSEEN, HOSTILE, "no"]
    assert tags["b"] == [" </u>", "&lt;", HOSTILE]
    page = hostile_page
    assert 'title="Round 1: 5 drafted, 2 accepted, one corrected by the target"' in page
    assert 'title="Round 2: 3 drafted, 3 accepted, and one more token"' in page
    assert 'title="Round 4: 1 drafted, 1 accepted"' in page


def test_prompts_are_folded_and_bounded_and_hostile_ones_are_text(few: Results, page: str) -> None:
    without = page
    page = shown(few, ROUNDS * 400, prompt=HOSTILE * 400)
    assert page.count("<script") == 0
    assert "characters …]" in page
    assert "; its begin" in page
    assert len(Tokens(page).tokens) <= MOST_TOKENS + 6
    assert '<details class="sample">' in page
    assert "open>" not in page
    assert len(page) - len(without) < 40_000


def test_few_methods_are_shown_the_best_first_and_sets_without_samples_left_out(
    results: Results, page: str
) -> None:
    runs = [run for run in results.of("alpaca") if run.drafter is not None]
    text = SampleText(rounds=ROUNDS, is_whole=True)
    every = sample("alpaca", "", []).model_copy(update={"methods": {r.method: text for r in runs}})
    (dataset,) = view = drill_down(Samples(schema_version=1, samples=[every]), results)
    assert dataset == "alpaca"
    methods = [each.method for each in view["alpaca"][0].texts]
    best = fastest(results.of("alpaca"))
    assert best is not None
    assert methods[0] == best[0].method
    assert len(methods) <= MOST_METHODS
    assert any(method.startswith("head") for method in methods)
    assert any(method.startswith("fixed") for method in methods)
    assert "Prompt by prompt" not in page
