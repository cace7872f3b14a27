"""What-if: from the counts of one run to the speed-up at other forward times."""

from __future__ import annotations

import html
import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.analysis.what_if import (
    POOLED,
    RATIOS,
    Machine,
    Priced,
    WhatIf,
    memory_bound,
    on_machine,
    seconds_at,
    what_if,
)
from eval.measuring.methods import PLAIN
from eval.measuring.pooled import pool
from eval.measuring.records import PromptRecord, record_prompt
from eval.measuring.results import Results, build_results, read_results, write_results
from eval.reporting.report import Context, render_page
from eval.reporting.what_if import OUTSIDE, headline, main, panels, what_if_section
from eval.rounds import Round
from tests.synthetic_results import ENVIRONMENT, method, synthetic_results


def test_a_record_keeps_the_targets_seconds_by_the_tokens_that_it_scored() -> None:
    rounds = [
        Round(2, 2, 1, 2, 3, 0.5, 4.0, 0.1),  # reads the prompt
        Round(2, 2, 2, 3, 2, 0.2, 1.25, 0.1),
        Round(0, 0, 0, 1, 0, 0.0, 1.0, 0.1),
        Round(2, 2, 0, 1, 2, 0.2, 1.5, 0.1),
    ]
    record = record_prompt("a", rounds, seconds=9.0, finish="length", prompt_tokens=7)
    assert record.prompt_tokens == 7
    assert record.first_draft_forwards == 3
    assert (record.first_draft_seconds, record.first_target_seconds) == (0.5, 4.0)
    assert record.later_rounds == [1, 0, 2]
    assert record.later_target_seconds == [1.0, 0, 2.75]
    only = record_prompt("b", rounds[:1], seconds=9.0, finish="length")
    assert (only.later_rounds, only.later_target_seconds) == ([], [])


# A machine whose times add up exactly, in seconds.
DRAFT, CHAIN_ROUND, HEAD, LEVEL = 0.002, 0.0005, 0.0007, 0.0011
OVERHEAD = {None: 0.0001, "chain": 0.0003, "tree": 0.0006}
LOOP = (0.005, 0.0005, 0.0002)
PROMPTS = 6


def chain_seconds(tokens: int) -> float:
    return 0.010 + 0.0013 * tokens


def tree_seconds(tokens: int) -> float:
    return 0.012 + 0.0011 * tokens


def prefill(prompt: int) -> tuple[float, float]:
    """Of target and draft."""
    return 0.003 * (prompt + 1), 0.0004 * (prompt + 1)


@dataclass(frozen=True)
class Kind:
    """What a simulated method drafts: a chain within two lengths, so many nodes a depth."""

    changes: dict[str, Any]
    lengths: tuple[int, int] = (0, 0)
    width: int = 1
    asked: int = 0  # forwards beyond the tokens that are drafted

    @property
    def drafter(self) -> str | None:
        drafter: str | None = self.changes.get("drafter", "chain")
        return drafter


NONE = {"draft": None, "drafter": None, "verifier": None, "stop": None, "length": None}
KINDS = {
    PLAIN: Kind(NONE),
    "K=2": Kind({"length": 2}, (2, 2)),
    "K=5": Kind({"length": 5}, (5, 5)),
    "head": Kind({"stop": "head", "head": "h", "threshold": 0.5, "length": 20}, (1, 6), asked=1),
    "tree": Kind(
        {"drafter": "tree", "verifier": "rrs", "length": 2, "parameters": {"widths": [3, 1]}},
        (2, 2),
        width=3,
    ),
    "transformers": Kind({"drafter": "transformers", "verifier": None, "length": 3}, (1, 3)),
}


def rounds_of(kind: Kind, rng: np.random.Generator, tokens: int = 40) -> list[Round]:
    """Counts of a generation, without times."""
    rounds, left = [], tokens
    while left > 0:
        depth = min(int(rng.integers(kind.lengths[0], kind.lengths[1] + 1)), left - 1)
        accepted = int(rng.integers(0, depth + 1))
        forwards = depth + kind.asked * (depth > 0)
        rounds.append(
            Round(depth * kind.width, depth, accepted, accepted + 1, forwards, 0.0, 0.0, 0.0)
        )
        left -= accepted + 1
    return rounds


def timed(kind: Kind, prompt: int, rounds: list[Round], *, draft: float = DRAFT) -> PromptRecord:
    """The same with times that add up."""
    of_target, of_draft = prefill(prompt)
    drafter = kind.drafter
    done: list[Round] = []
    for each in rounds:
        table = tree_seconds if drafter == "tree" else chain_seconds
        target = table(each.drafted + 1) + (0.0 if done else of_target)
        beside = HEAD if kind.changes.get("stop") == "head" else 0.0
        beside = LEVEL if drafter == "tree" else beside
        drafting = (draft + beside) * each.draft_forwards
        if drafter and not done:
            drafting += of_draft * draft / DRAFT
        if drafter == "chain" and each.drafted:
            drafting += CHAIN_ROUND
        overhead = OVERHEAD.get(drafter, 0.0)
        done.append(
            replace(each, draft_seconds=drafting, target_seconds=target, overhead_seconds=overhead)
        )
    seconds = sum(r.draft_seconds + r.target_seconds + r.overhead_seconds for r in done)
    if drafter == "transformers":
        call, a_round, forward = LOOP
        seconds += call + sum(a_round + forward * r.draft_forwards for r in done)
        done = rounds  # whose shares are not known
    return record_prompt(
        str(prompt), done, seconds=seconds, finish="length", prompt_tokens=10 + prompt
    )


def additive(
    datasets: tuple[str, ...] = ("maths", "code"), *, draft: float = DRAFT, **slower: float
) -> Results:
    """Results of that machine; `slower` maps a method to a factor of its wall time."""
    measured = []
    for dataset in datasets:
        for name, kind in KINDS.items():
            rng = np.random.default_rng([len(dataset), *name.encode()])
            records = [timed(kind, n, rounds_of(kind, rng), draft=draft) for n in range(PROMPTS)]
            factor = slower.get(name, 1.0)
            records = [replace(r, seconds=r.seconds * factor) for r in records]
            measured.append((method(name, dataset, **kind.changes), records))
    return build_results(ENVIRONMENT, measured)


def by_name(shown: WhatIf) -> dict[str, Priced]:
    return {each.run.method: each for each in shown.methods}


def test_times_that_add_up_are_predicted_exactly_of_every_kind_of_method() -> None:
    results = additive()
    found = what_if(results)
    assert list(found) == [POOLED, "maths", "code"]
    for name, shown in found.items():
        assert shown.ratio == pytest.approx(DRAFT / chain_seconds(1))
        assert list(by_name(shown)) == list(KINDS)[1:]
        for own, priced in by_name(shown).items():
            predicted, clocked = shown.speedup(priced), shown.clocked(priced)
            assert astuple(predicted) == pytest.approx(astuple(clocked)), (name, own)
            assert shown.agrees(priced)
    for run in results.runs:
        if run.method != PLAIN:
            clocked = found[run.dataset].clocked(by_name(found[run.dataset])[run.method])
            assert clocked.value == pytest.approx(run.speedup)
            assert (clocked.low, clocked.high) == pytest.approx(run.intervals["speedup"])
    for row in pool(results)[1:]:  # the report's own row over all sets
        clocked = found[POOLED].clocked(by_name(found[POOLED])[row.method])
        assert clocked.value == pytest.approx(row.value("speedup"))
        assert (clocked.low, clocked.high) == pytest.approx(row.interval("speedup"))


def test_another_ratio_predicts_what_a_machine_with_that_draft_takes() -> None:
    here, there = what_if(additive()), what_if(additive(draft=3.5 * DRAFT))
    for name, shown in here.items():
        other = there[name]
        for own, priced in by_name(shown).items():
            expected = other.clocked(by_name(other)[own])
            predicted = shown.speedup(priced, other.ratio)
            assert astuple(predicted) == pytest.approx(astuple(expected)), (name, own)


def test_a_method_is_slower_the_more_its_draft_costs_and_breaks_even_once() -> None:
    shown = what_if(additive())[POOLED]
    for priced in shown.methods:
        curve = shown.curve(priced)
        assert (np.diff(curve) < 0).all()
        even = shown.break_even(priced)
        assert shown.speedup(priced, even).value == pytest.approx(1.0)
        assert curve[0] == pytest.approx(shown.speedup(priced, float(RATIOS[0])).value)


def test_with_a_free_draft_and_a_memory_bound_target_speed_is_tokens_a_call() -> None:
    results = additive()
    rows = pool(results)
    for name, shown in memory_bound(results).items():
        for priced in shown.methods:
            run = priced.run
            calls = run.block_efficiency
            if name == POOLED:
                (calls,) = (r.value("block_efficiency") for r in rows if r.method == run.method)
            assert shown.speedup(priced, 0.0).value == pytest.approx(calls)
            if name != POOLED:  # a draft as dear as the target: its forwards are further calls
                each = run.tokens / (run.n_target + run.draft_forwards)
                assert shown.speedup(priced, 1.0).value == pytest.approx(each)
    maths = by_name(memory_bound(results)["maths"])["K=5"]
    assert maths.unit.sum() == maths.run.draft_forwards
    assert maths.fixed.sum() == maths.run.n_target


def test_a_free_draft_divides_tokens_a_call_by_what_verifying_takes_longer() -> None:
    # Two rounds a prompt, K = 3, nothing beside forwards: 2 + 4 tokens in 2 forwards of 4 tokens.
    plain = [Round(0, 0, 0, 1, 0, 0.0, 1.0, 0.0)] * 6
    drafted = [Round(3, 3, 1, 2, 3, 0.3, 1.5, 0.0), Round(3, 3, 3, 4, 3, 0.3, 1.5, 0.0)]
    records = {
        name: [record_prompt("a", rounds, seconds=total, finish="length", prompt_tokens=1)]
        for name, rounds, total in (("plain", plain, 6.0), ("K=3", drafted, 3.6))
    }
    rows = [(method(PLAIN, "x", **NONE), records["plain"])]
    rows.append((method("K=3", "x", length=3), records["K=3"]))
    (shown,) = what_if(build_results(ENVIRONMENT, rows)).values()
    (priced,) = shown.methods
    assert shown.ratio == pytest.approx(0.1)
    assert shown.speedup(priced, 0.0).value == pytest.approx((6 / 2) / (1.5 / 1.0))
    assert shown.speedup(priced).value == pytest.approx(6 / 3.6)
    assert shown.speedup(priced, 0.4).value == pytest.approx(6 / (3.0 + 6 * 0.4))
    assert shown.break_even(priced) == pytest.approx((6 - 3.0) / 6)
    assert [m.run.method for m, _, _ in shown.winners()] == ["K=3", "plain"]


def machine(**changes: Any) -> Machine:
    given = {"name": "other", "target": {1: 2.0, 5: 4.0}, "draft": {1: 0.5}, "overhead": 0.25}
    return Machine.model_validate(given | changes)


def test_a_table_of_forward_times_prices_the_counts_of_a_run() -> None:
    results = additive()
    times = {n: float(seconds_at({1: 2.0, 5: 4.0}, np.array([n]))[0]) for n in range(1, 40)}
    assert (times[1], times[3], times[5], times[9]) == (2.0, 3.0, 4.0, 6.0)
    shown = on_machine(results, machine())["maths"]
    expected: dict[str, float] = {}
    for name in (PLAIN, "K=5", "transformers"):
        rng = np.random.default_rng([len("maths"), *name.encode()])
        expected[name], share = 0.0, CHAIN_ROUND / DRAFT if name == "K=5" else 0.0
        for prompt in range(PROMPTS):
            for number, each in enumerate(rounds_of(KINDS[name], rng)):
                read = each.drafted + (1 if number else 10 + prompt)
                expected[name] += times[read] + 0.25 + 0.5 * each.draft_forwards
                expected[name] += 0.5 * share * (each.drafted > 0)
    for name in ("K=5", "transformers"):
        predicted = shown.speedup(by_name(shown)[name]).value
        assert predicted == pytest.approx(expected[PLAIN] / expected[name]), name
    assert shown.ratio == 0.25


def test_times_that_do_not_depend_on_tokens_need_one_entry() -> None:
    assert seconds_at({1: 3.0}, np.array([1.0, 7.0, 900.0])).tolist() == [3.0] * 3
    # Noise must not make long forwards cost nothing.
    assert seconds_at({1: 3.0, 4: 2.0}, np.array([4.0, 1e6])).tolist() == [2.0, 2.0]


def test_results_that_lack_what_is_needed_have_no_section_and_no_error() -> None:
    results = additive(("maths",))
    assert what_if_section(results) is not None
    assert what_if(synthetic_results(datasets=("maths",))) == {}  # no tokens of prompts
    assert what_if(synthetic_results(datasets=("maths",), timed=False)) == {}

    def without(*names: str) -> Results:
        runs = [run for run in results.runs if run.method not in names]
        return results.model_copy(update={"runs": runs})

    for fewer in (without(PLAIN), without(*list(KINDS)[1:])):
        assert (what_if(fewer), what_if_section(fewer), panels(fewer)) == ({}, None, [])
    # A tree alone, or transformers' loop alone with the times of nothing else of the draft.
    assert list(by_name(what_if(without("K=2", "K=5", "head"))["maths"])) == [
        "tree",
        "transformers",
    ]
    assert what_if(without("K=2", "K=5", "head", "tree")) == {}


def test_an_earlier_versions_file_is_read_and_has_no_section(tmp_path: Path) -> None:
    stored = additive(("maths",)).model_dump(mode="json")
    new = ("prompt_tokens", "first_draft_forwards", "first_draft_seconds", "first_target_seconds")
    for run in stored["runs"]:
        for generation in run["generations"]:
            for name in (*new, "later_rounds", "later_target_seconds"):
                del generation[name]
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert what_if(read_results(tmp_path / "results.json")) == {}


def test_a_prediction_outside_the_clocks_interval_is_flagged() -> None:
    # One of the chains takes 40 % longer than its forwards: not what its rounds' mean explains.
    results = additive(("maths",), **{"K=2": 1.4})
    section = what_if_section(results)
    assert section is not None
    flagged = {row.method: row.cells[0].endswith(OUTSIDE) for row in section["rows"]}
    assert flagged["K=2"]
    assert not flagged["tree"]
    assert "outside: " in section["agreement"]
    assert "K=2" in section["agreement"].split("outside: ")[1]


def test_the_page_says_who_wins_where_and_below_which_ratio_anything_pays() -> None:
    results = additive()
    page = render_page(results, Context())
    shown = what_if(results)[POOLED]
    text = html.unescape(page)
    assert headline(shown) in text
    assert f"ratio t_draft/t_target of {shown.ratio:.2g}" in text
    most = max(map(shown.break_even, shown.methods))
    assert f"Speculation pays below a ratio of {most:.2g}." in text
    assert f"{len(KINDS) - 1} of {len(KINDS) - 1} predictions lie in the clock's" in text
    winners = [m.run.method for m, _, _ in shown.winners()]
    assert winners[-1] == PLAIN
    assert len(shown.winners()) == len({*winners})
    # A drawing of all as measured and memory-bound, and one of each set.
    assert [f'id="what-if{n}-title"' in page for n in range(5)] == [True] * 4 + [False]
    ratios = {(p.title, p.clocked) for p in panels(results)}
    assert ratios == {
        ("as measured", True),
        ("memory-bound target", False),
        ("maths, as measured", True),
        ("code, as measured", True),
    }


def test_a_draft_that_never_pays_is_said_to_pay_at_no_ratio() -> None:
    results = additive(("maths",))
    shown = what_if(results)["maths"]
    slow = replace(shown.methods[0], fixed=10 * shown.methods[0].fixed)
    assert "pays at no ratio" in headline(WhatIf(shown.plain, (slow,)))
    assert "the target alone" in headline(WhatIf(shown.plain, (slow,)))
    cheap = replace(shown.methods[0], unit=0.01 * shown.methods[0].unit)
    assert "pays at every ratio up to 1" in headline(WhatIf(shown.plain, (cheap,)))


def test_the_command_shows_other_ratios_and_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = additive()
    write_results(tmp_path / "results.json", results)
    table = tmp_path / "gpu.yaml"
    table.write_text("name: a GPU\ntarget: {1: 2, 5: 4.0}\ndraft: {1: 0.5}\noverhead: 0.25\n")
    same = tmp_path / "gpu.json"
    same.write_text(json.dumps(machine().model_dump()))
    assert Machine.read(same) == machine()
    assert main([str(tmp_path), "--machine", str(table), "--ratio", "0.3"]) == 0
    shown = capsys.readouterr().out
    there = on_machine(results, machine())[POOLED]
    for own, priced in by_name(there).items():
        (line, *_) = (line for line in shown.splitlines() if line.startswith(own))
        assert f"{there.speedup(priced).value:.2f}x" in line
        here = what_if(results)[POOLED]
        assert f"{here.speedup(by_name(here)[own], 0.3).value:.2f}x" in line
    assert "a GPU: ratio 0.25, fastest " in shown
    assert headline(what_if(results)[POOLED]) in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ntarget: {1: 2}\n", "draft: Field required"),
        ("name: x\ntarget: {2: 2}\ndraft: {1: 1}\n", "1 among them, to positive seconds"),
        ("name: x\ntarget: {1: 2}\ndraft: {1: 0}\n", "draft maps numbers of tokens"),
        ("name: x\ntarget: {one: 2}\ndraft: {1: 1}\n", "target.one"),
        ("name: x\ntarget: {1: .nan}\ndraft: {1: 1}\n", "target.1"),
        ("name: x\ntarget: {1: 2}\ndraft: {1: 1}\noverheads: 1\n", "overheads: Extra inputs"),
        ("name: x\ntarget: {1: 2}\ndraft: {1: 1}\noverhead: -1\n", "overhead: Input should be"),
        ("name: [\n", "JSON or YAML file of forward times"),
        ("", "must be a table of forward times"),
    ],
)
def test_an_unusable_table_is_refused_with_what_must_hold(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "results.json", additive(("maths",)))
    table = tmp_path / "gpu.yaml"
    table.write_text(text)
    assert main([str(tmp_path / "results.json"), "--machine", str(table)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {table} must be ")
    assert message in error


def test_unusable_input_of_the_command_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "run the evaluation first" in capsys.readouterr().err
    write_results(tmp_path / "results.json", synthetic_results(datasets=("maths",)))
    assert main([str(tmp_path)]) == 2
    assert "cannot tell what forwards took" in capsys.readouterr().err
    assert main([str(tmp_path), "--ratio", "0"]) == 2
    assert "--ratio is t_draft/t_target, above 0" in capsys.readouterr().err
    assert main([str(tmp_path), "--machine", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
