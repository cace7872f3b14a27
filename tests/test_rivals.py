"""A head's rule against its rivals: settings are chosen on dev and judged on test."""

from __future__ import annotations

import numpy as np
import pytest

from eval.analysis.expectation import Counts
from eval.analysis.replay import COST_RULE, RuleResult
from eval.analysis.rivals import ALL, compare
from eval.analysis.savings import closes, saving

PROMPTS = ["a", "a", "b", "c", "d", "e"]
NAMES = ["maths", "maths", "maths", "code", "code", "code"]
TIMES = {"draft_seconds": 0.1, "target_seconds": 1.0}


def result(family: str, setting: str, seconds: float, seed: int = 0) -> RuleResult:
    """A rule whose rollouts take about `seconds` each."""
    noise = np.random.default_rng(seed).uniform(-0.05, 0.05, len(PROMPTS))
    n_target = seconds * (1.0 + noise)
    nothing = np.zeros(len(PROMPTS))
    return RuleResult(
        family, setting, Counts(np.full(len(PROMPTS), 40.0), n_target, *[nothing] * 2)
    )


# On test another threshold of the head, and another length, would have been best.
DEV = [
    result("oracle", "", 5.0),
    result("fixed", "K=4", 10.0),
    result("fixed", "K=6", 9.0),
    result("head", "h=0.5", 8.0),
    result("head", "h=0.7", 7.0),
    result("logit", "h=0.7", 9.0),
    result("perfect head", "h=0.5", 6.0),
    result("head", COST_RULE, 7.0),
    result("entropy", "1", 11.0),
]
TEST = [
    result("oracle", "", 5.0),
    result("fixed", "K=4", 9.0, seed=1),
    result("fixed", "K=6", 10.0, seed=2),
    result("head", "h=0.5", 7.0, seed=3),
    result("head", "h=0.7", 8.0, seed=4),
    result("logit", "h=0.7", 8.5, seed=5),
    result("perfect head", "h=0.5", 6.0, seed=6),
    result("head", COST_RULE, 8.2, seed=7),
]


def test_settings_are_chosen_on_dev_and_judged_on_test() -> None:
    found = compare(DEV, TEST, PROMPTS, NAMES, **TIMES)
    assert found is not None
    assert (found.setting, found.candidates) == ("h=0.7", 2)
    # Entropy was not replayed on test; the oracle and a perfect head are no rivals.
    assert [(r.rule, r.setting, r.candidates) for r in found.rivals] == [
        ("fixed", "K=6", 2),
        ("logit", "h=0.7", 1),
    ]
    head, fixed = TEST[4].counts, TEST[2].counts
    assert found.rivals[0].overall == saving(head, fixed, **TIMES, prompts=PROMPTS)
    assert found.rivals[0].overall.value == pytest.approx(0.2, abs=0.05)
    assert list(found.rivals[0].saved) == [ALL, "maths", "code"]
    code = slice(3, 6)
    by_hand = 1 - head.n_target[code].sum() / fixed.n_target[code].sum()
    assert found.rivals[0].saved["code"].value == pytest.approx(by_hand)
    # Two rollouts of one prompt: only two prompts to resample, not three.
    pair = [Counts(*(x[:3] for x in (c.tokens, c.n_target, c.n_draft, c.n_discarded)))
            for c in (head, fixed)]  # fmt: skip
    assert found.rivals[0].saved["maths"] == saving(*pair, **TIMES, prompts=["a", "a", "b"])
    assert found.to_oracle == closes(head, TEST[5].counts, TEST[0].counts, **TIMES, prompts=PROMPTS)
    assert found.cost_rule is not None
    assert found.cost_rule.setting == "K=6"
    assert found.cost_rule.overall.value == pytest.approx(0.18, abs=0.05)


def test_the_fixed_length_comes_first_and_then_the_hardest_to_beat() -> None:
    more = [("confidence", 9.5), ("cumulative", 8.0), ("margin", 8.2)]
    rivals = [result(name, "1", seconds) for name, seconds in more]
    found = compare([*DEV, *rivals], [*TEST, *rivals], PROMPTS, NAMES, **TIMES)
    assert found is not None
    assert [r.rule for r in found.rivals] == [
        "fixed",
        "cumulative",
        "margin",
        "logit",
        "confidence",
    ]


@pytest.mark.parametrize(
    ("seconds", "status"),
    [
        (8.5, "pays"),
        (8.0, "not shown to pay"),  # saves .3 %, the interval contains 0
        (7.85, "not shown to pay"),  # loses 1.6 %, likewise
        (7.0, "does not pay"),
    ],
)
def test_a_head_pays_only_if_it_surely_saves_over_every_rival(seconds: float, status: str) -> None:
    rival = result("margin", "h=0.7", seconds, seed=8)
    found = compare([*DEV, rival], [*TEST, rival], PROMPTS, NAMES, **TIMES)
    assert found is not None
    assert found.status == status


def test_without_a_head_or_a_fixed_length_nothing_is_compared() -> None:
    for left_out in ("head", "fixed"):
        dev = [r for r in DEV if r.family != left_out]
        assert compare(dev, TEST, PROMPTS, NAMES, **TIMES) is None
    one = compare(DEV, TEST, PROMPTS, ["maths"] * 6, **TIMES)
    assert one is not None
    assert list(one.rivals[0].saved) == ["maths"]
