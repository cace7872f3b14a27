"""Whether a head pays, in words: what the top of a report and of a head's card say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.analysis.quality import Quality
from eval.analysis.rivals import Replayed, Rival
from eval.analysis.savings import Interval
from eval.reporting.verdict import HeadVerdict, Ratio

HEADLINES = {
    "pays": "The head pays",
    "does not pay": "The head does not pay",
    "not shown to pay": "The head is not shown to pay",
    "not measured": "Whether the head pays was not measured",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement of a head.

    Args:
        headline: whether it pays, and by what it was judged.
        sets: prompt set -> what the head saves there over each rival, in words.
        brief: the same over the first two alone: the fixed length, and the hardest to beat.
        basis: what the judgement rests on.
    """

    headline: str
    sets: dict[str, str]
    brief: dict[str, str]
    basis: str


def findings(verdict: HeadVerdict, quality: Quality | None) -> list[Finding]:
    """By exact expectation along held-out rollouts, where that was replayed, and by the clock."""
    found = []
    if quality is not None and quality.replay is not None:
        found.append(_of_replay(quality, quality.replay))
    return [*found, _of_clock(verdict)]


def _of_replay(quality: Quality, replay: Replayed) -> Finding:
    rivals = [(name_of(rival), rival.saved) for rival in replay.rivals]
    rollouts, chosen = quality.rollouts[quality.judged_on], quality.rollouts["dev"]
    where = f"{rollouts} {quality.judged_on} rollouts, which neither draft nor head was trained on"
    basis = (
        f"Expected time over every outcome of acceptance on {where}, with"
        f" {1000 * replay.draft_seconds:.2f} ms a drafted token and"
        f" {1000 * replay.target_seconds:.2f} ms a target forward as measured here. The head's"
        f" threshold ({replay.setting}) and each rival's setting were chosen on"
        + (
            f" {chosen} dev rollouts."
            if quality.judged_on == "test"
            else " the same rollouts, because the labels hold no test rollouts: all figures look"
            " better than they are."
        )
    )
    if replay.to_oracle is not None:
        basis += (
            " From the rule logit to the oracle, which knows what will be accepted, the head goes"
            f" {replay.to_oracle} of the way."
        )
    if replay.cost_rule is not None:
        saved = _sentence([(name_of(replay.cost_rule), replay.cost_rule.overall)])
        basis += f" Without a threshold, by its cost rule, the head {saved}."
    headline = f"{HEADLINES[replay.status]} by exact expectation"
    return Finding(headline + _why(replay), *_by_set(rivals), basis)


def _why(replay: Replayed) -> str:
    """Which rivals keep a head from paying."""
    if replay.status == "pays":
        return ": it takes less time than every rule that needs no head."
    if replay.status == "does not pay":
        better = [name_of(r) for r in replay.rivals if r.overall.high < 0.0]
        return f": {_list(better)} {'takes' if len(better) == 1 else 'take'} less time without it."
    tied = [name_of(r) for r in replay.rivals if r.overall.low <= 0.0]
    return f": it is not told apart from {_list(tied)}."


def _of_clock(verdict: HeadVerdict) -> Finding:
    if verdict.status == "not measured":
        return Finding(f"{HEADLINES['not measured']} by the clock: {verdict.reason}.", {}, {}, "")
    rivals = [
        (rival.method, {name: _share(ratio) for name, ratio in rival.ratios.items()})
        for rival in verdict.rivals
    ]
    first, *others = rivals
    rivals = [first, *sorted(others, key=lambda rival: next(iter(rival[1].values())).value)]
    basis = (
        f"Wall time of decoding the evaluation's prompts with {verdict.method}, chosen like each"
        " rival's setting on held-out rollouts from the settings that were measured."
    )
    return Finding(f"{HEADLINES[verdict.status]} by the clock.", *_by_set(rivals), basis)


def _share(ratio: Ratio) -> Interval:
    """The share of the time that is saved, from a ratio of speeds."""
    low, value, high = (1.0 - 1.0 / x for x in (ratio.low, ratio.value, ratio.high))
    return Interval(value, low, high)


def name_of(rival: Rival) -> str:
    """A rival with its setting; a fixed length is named by it alone."""
    return rival.setting if rival.rule == "fixed" else f"{rival.rule} {rival.setting}"


def _by_set(
    rivals: Sequence[tuple[str, Mapping[str, Interval]]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Prompt set -> the sentence over all rivals, and over the first two."""
    whole, brief = (
        {name: _sentence([(rival, saved[name]) for rival, saved in some]) for name in rivals[0][1]}
        for some in (rivals, rivals[:2])
    )
    return whole, brief


def _sentence(shares: list[tuple[str, Interval]]) -> str:
    """Such as: saves 6.1 % [4.9, 7.2] over K=6, 2.0 % [1.1, 2.9] over margin h=0.7."""
    saved = [f"{share} over {rival}" for rival, share in shares if share.value >= 0.0]
    lost = [
        f"{Interval(-share.value, -share.high, -share.low)} against {rival}"
        for rival, share in shares
        if share.value < 0.0
    ]
    parts = ["saves " + ", ".join(saved)] if saved else []
    return "; ".join([*parts, "loses " + ", ".join(lost)] if lost else parts)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
