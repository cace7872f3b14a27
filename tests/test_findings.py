"""Whether a head pays, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.analysis.rivals import ALL, Replayed, Rival
from eval.measuring.intervals import Interval
from eval.reporting.findings import findings
from eval.reporting.verdict import HeadVerdict, Ratio
from eval.reporting.verdict import Rival as TimedRival
from tests.synthetic_quality import synthetic_quality

UNMEASURED = HeadVerdict("not measured", "speeds were not measured")
FIXED = Rival(
    rule="fixed",
    setting="K=6",
    candidates=20,
    saved={ALL: Interval(0.061, 0.049, 0.072), "maths": Interval(-0.004, -0.02, 0.011)},
)
MARGIN = Rival(
    rule="margin",
    setting="h=0.7",
    candidates=9,
    saved={ALL: Interval(0.02, 0.011, 0.029), "maths": Interval(0.031, 0.01, 0.05)},
)
REPLAY = Replayed(
    draft_seconds=0.002,
    target_seconds=0.011,
    setting="h=0.8",
    candidates=9,
    rivals=[FIXED, MARGIN],
    to_oracle=Interval(0.23, 0.2, 0.26),
    cost_rule=FIXED,
)


def in_replay(replay: Replayed, **changes: object) -> tuple[str, dict[str, str], str]:
    quality = synthetic_quality().model_copy(update={"replay": replay, **changes})
    found, by_clock = findings(UNMEASURED, quality)
    assert by_clock.headline.endswith("by the clock: speeds were not measured.")
    assert by_clock.sets == {}
    return found.headline, found.sets, found.basis


def test_what_is_saved_over_each_rival_is_said_with_its_interval() -> None:
    headline, sets, basis = in_replay(REPLAY)
    assert headline.startswith("The head pays by exact expectation: it takes less time than every")
    assert sets == {
        ALL: "saves 6.1 % [4.9, 7.2] over K=6, 2.0 % [1.1, 2.9] over margin h=0.7",
        "maths": "saves 3.1 % [1.0, 5.0] over margin h=0.7; loses 0.4 % [-1.1, 2.0] against K=6",
    }
    assert "24 test rollouts" in basis
    assert "2.00 ms a drafted token and 11.00 ms a target forward" in basis
    assert "threshold (h=0.8) and each rival's setting were chosen on 24 dev rollouts" in basis
    assert (
        "oracle, which knows what will be accepted, the head goes 23.0 % [20.0, 26.0] of" in basis
    )
    assert "by its cost rule, the head saves 6.1 % [4.9, 7.2] over K=6." in basis


def changed(rival: Rival, overall: Interval) -> Rival:
    return rival.model_copy(update={"saved": {**rival.saved, ALL: overall}})


@pytest.mark.parametrize(
    ("overall", "said"),
    [
        (
            Interval(-0.02, -0.03, -0.01),
            "The head does not pay by exact expectation: margin h=0.7 takes less time without it.",
        ),
        (
            Interval(-0.02, -0.05, 0.01),
            "The head is not shown to pay by exact expectation: it is not told apart from margin"
            " h=0.7.",
        ),
    ],
)
def test_a_head_that_does_not_pay_is_told_so_and_by_what_it_is_beaten(
    overall: Interval, said: str
) -> None:
    rivals = [FIXED, changed(MARGIN, overall)]
    assert in_replay(REPLAY.model_copy(update={"rivals": rivals}))[0] == said
    both = [changed(FIXED, overall), changed(MARGIN, overall)]
    assert "K=6 and margin h=0.7" in in_replay(REPLAY.model_copy(update={"rivals": both}))[0]


def test_figures_of_rollouts_that_settings_were_chosen_on_are_called_too_good() -> None:
    _, _, basis = in_replay(REPLAY, judged_on="dev", rollouts={"dev": 24})
    assert "look better than they are" in basis


def test_by_the_clock_a_ratio_of_speeds_is_a_share_of_time() -> None:
    verdict = HeadVerdict(
        "pays",
        method="head h=.7",
        rivals=(
            TimedRival("fixed", "K=4", 3, {ALL: Ratio(1.25, 1.0, 2.0)}),
            TimedRival("entropy", "entropy 1", 1, {ALL: Ratio(1.6, 1.0, 2.0)}),
            TimedRival("logit", "logit .5", 1, {ALL: Ratio(0.8, 0.5, 1.0)}),
        ),
    )
    (found,) = findings(verdict, None)
    assert found.headline == "The head pays by the clock."
    saved = "saves 20.0 % [0.0, 50.0] over K=4"
    lost = "loses 25.0 % [0.0, 100.0] against logit .5"
    assert found.sets == {ALL: f"{saved}, 37.5 % [0.0, 50.0] over entropy 1; {lost}"}
    assert found.brief == {ALL: f"{saved}; {lost}"}, "the fixed length, and the hardest to beat"
    assert "head h=.7" in found.basis
    unknown = replace(verdict, status="not measured", reason="no labels")
    assert findings(unknown, None)[0].headline.endswith("by the clock: no labels.")
