"""What the report says of the head and of trainings: one decision, its numbers, how to repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.analysis.quality import Quality
from eval.analysis.rivals import ALL, Replayed, Rival
from eval.measuring.intervals import Interval
from eval.reporting.findings import decide
from eval.reporting.verdict import HeadCost, HeadVerdict, Ratio, _draft_step
from eval.reporting.verdict import Rival as TimedRival
from tests.synthetic_quality import synthetic_quality
from tests.synthetic_results import T_DRAFT, synthetic_results

SAVES = Interval(0.06, 0.05, 0.07)
LOSES = Interval(-0.03, -0.04, -0.02)
FASTER, SLOWER = Ratio(1.25, 1.1, 1.4), Ratio(0.8, 0.7, 0.9)
MAYBE_FASTER, MAYBE_SLOWER = Ratio(1.05, 0.9, 1.2), Ratio(0.95, 0.9, 1.1)


def rival(rule: str, setting: str, saved: Interval) -> Rival:
    return Rival(rule=rule, setting=setting, candidates=3, saved={ALL: saved})


def replayed(*rivals: Rival) -> Quality:
    replay = Replayed(
        draft_seconds=0.002,
        target_seconds=0.011,
        setting="h=.5",
        candidates=4,
        rivals=list(rivals),
        to_oracle=None,
        cost_rule=None,
    )
    return synthetic_quality().model_copy(update={"replay": replay})


def clocked(fixed: Ratio, margin: Ratio, cost: HeadCost | None = None) -> HeadVerdict:
    rivals = (
        TimedRival("fixed", "K=4", 3, {ALL: fixed}),
        TimedRival("margin", "margin .5", 2, {ALL: margin}),
    )
    return HeadVerdict("not shown to pay", method="head .5", rivals=rivals, cost=cost)


IN_REPLAY = replayed(
    rival("fixed", "K=6", SAVES), rival("margin", "h=.7", Interval(0.01, 0.0, 0.02))
)
PAYS = replayed(rival("fixed", "K=6", SAVES), rival("margin", "h=.7", SAVES))


@pytest.mark.parametrize(
    ("quality", "verdict", "begins"),
    [
        (PAYS, clocked(FASTER, FASTER), "The head pays: in replay it saves 6.0 % [5.0, 7.0] over"),
        (PAYS, clocked(MAYBE_FASTER, MAYBE_FASTER), "The head pays: "),
        (
            PAYS,
            clocked(FASTER, SLOWER),
            "The head does not pay, because by the clock margin .5 takes less time without it: in",
        ),
        (
            PAYS,
            clocked(MAYBE_SLOWER, FASTER),
            "The head does not pay, because the clock does not confirm it: K=4 takes less time: in",
        ),
        (
            IN_REPLAY,
            clocked(FASTER, FASTER),
            "The head does not pay, because it is not told apart from margin h=.7 in replay: in",
        ),
        (
            replayed(rival("fixed", "K=6", SAVES), rival("margin", "h=.7", LOSES)),
            clocked(FASTER, FASTER),
            "The head does not pay, because margin h=.7 takes less time without it in replay: in",
        ),
        (
            None,
            clocked(FASTER, MAYBE_FASTER),
            "The head does not pay, because by the clock it is not told apart from margin .5: by",
        ),
        (None, clocked(FASTER, FASTER), "The head pays: by the clock it saves 20.0 % ["),
        (
            None,
            HeadVerdict("not measured", "speeds were not measured"),
            "Whether the head pays was not measured: speeds were not measured.",
        ),
    ],
)
def test_one_sentence_says_whether_the_head_pays_or_why_not(
    quality: Quality | None, verdict: HeadVerdict, begins: str
) -> None:
    assert decide(verdict, quality).sentence.startswith(begins)


def test_the_decision_has_the_numbers_of_both_judgements_for_every_rule() -> None:
    decision = decide(clocked(FASTER, SLOWER), PAYS)
    assert decision.sentence.endswith(
        "in replay it saves 6.0 % [5.0, 7.0] over K=6, 6.0 % [5.0, 7.0] over margin h=.7; by the"
        " clock it saves 20.0 % [9.1, 28.6] over K=4; loses 25.0 % [11.1, 42.9] against margin .5."
    )
    assert decision.columns == ("saved in replay", "saved by the clock")
    assert [row.rule for row in decision.rows] == ["fixed length", "margin"]
    assert decision.rows[1].cells[0] == "6.0 % [5.0, 7.0] (margin h=.7)"
    assert decision.rows[1].cells[1] == "-25.0 % [-42.9, -11.1] (margin .5)"
    assert all(row.decides for row in decision.rows)
    untimed = decide(HeadVerdict("not measured", "no held-out labels"), PAYS)
    assert untimed.sentence.endswith("(by the clock: not measured, no held-out labels).")


def test_the_cost_of_the_head_is_the_difference_of_two_draft_steps() -> None:
    cost = HeadCost(with_head=0.0025, without=0.002, target=0.011, method="K=4")
    words = decide(clocked(FASTER, FASTER, cost), PAYS).cost
    assert "2.50 ms with the head and 2.00 ms at K=4: 0.50 ms, 25 % of a draft step, go to" in words
    assert "11.00 ms" in words
    free = replace(cost, with_head=0.0019)
    assert "no time that shows" in decide(clocked(FASTER, FASTER, free), PAYS).cost
    results = synthetic_results(datasets=("alpaca",))
    fixed = [run for run in results.runs if run.method == "fixed-4"]
    assert _draft_step(fixed) == pytest.approx(T_DRAFT, rel=0.03)
    assert _draft_step([run for run in results.runs if run.draft is None]) is None
