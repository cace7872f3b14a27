"""Whether a head pays, in words: what the top of a report and of a head's card say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.analysis.quality import Quality
from eval.analysis.rivals import Replayed, Rival
from eval.measuring.intervals import Interval
from eval.reporting.rendering import NOT_MEASURED
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


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A rule without a head, and what the head saves over it; cells in the order of the columns."""

    rule: str
    cells: tuple[str, ...]
    decides: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a head pays, all judgements together.

    Args:
        sentence: "The head pays: ..." or "The head does not pay, because ...".
        columns: headings of the cells.
        rows: the best fixed length first, then the other rules, hardest to beat first.
        cost: what a drafted token costs with and without the head; empty if it was not measured.
    """

    sentence: str
    columns: tuple[str, ...] = ()
    rows: tuple[DecisionRow, ...] = ()
    cost: str = ""


def decide(verdict: HeadVerdict, quality: Quality | None) -> Decision:
    """Judge by replay and by the clock together.

    A head pays if replay, which is exact, shows that it saves time over every rule without one, and
    the clock does not say otherwise of the two that matter: the best fixed length and the hardest
    to beat. It does not pay if either of the two judgements surely says so. Short of that it counts
    as not paying either, because nothing shows that it does.
    """
    replay = None if quality is None else quality.replay
    by_replay = {} if replay is None else {name_of(r): (r.rule, r.overall) for r in replay.rivals}
    by_clock = {
        rival.method: (rival.rule, _share(next(iter(rival.ratios.values()))))
        for rival in verdict.rivals
    }
    judged = [each for each in (by_replay, by_clock) if each]
    if not judged:
        return Decision(f"{HEADLINES['not measured']}: {verdict.reason}.")
    # What decides: in each judgement the best fixed length and the hardest other rule to beat.
    deciding = [_hardest(each) for each in judged]
    names = ("in replay",) * bool(by_replay) + ("by the clock",) * bool(by_clock)
    numbers = "; ".join(
        f"{where} it {_sentence(list(few.items()))}"
        for where, few in zip(names, deciding, strict=True)
    )
    against = _against(replay, by_clock)
    status = "The head pays" if not against else f"The head does not pay, because {against}"
    if not by_clock:
        numbers += f" (by the clock: not measured, {verdict.reason})"
    return Decision(
        f"{status}: {numbers}.",
        tuple(f"saved {where}" for where in names),
        _rows(by_replay, by_clock, {rule for few in deciding for rule in few}),
        _cost(verdict),
    )


Saved = Mapping[str, tuple[str, Interval]]
"""A rule with its setting -> the rule alone, and the share of its time that a head saves."""


def _hardest(saved: Saved) -> dict[str, Interval]:
    """The fixed length, and of the other rules the one that a head saves least over."""
    fixed = {name: share for name, (rule, share) in saved.items() if rule == "fixed"}
    others = {name: share for name, (rule, share) in saved.items() if rule != "fixed"}
    if others:
        name = min(others, key=lambda name: others[name].value)
        fixed[name] = others[name]
    return fixed


def _against(replay: Replayed | None, by_clock: Saved) -> str:
    """What keeps a head from paying; empty if nothing does."""
    if replay is not None and replay.status != "pays":
        return _why(replay).removeprefix(": ").rstrip(".") + " in replay"
    lost = {name: share for name, (_, share) in by_clock.items() if share.high < 0.0}
    if lost:
        return f"by the clock {_list(list(lost))} {_takes(lost)} less time without it"
    # Replay is exact but for the cost of the head itself: the clock has to confirm its sign.
    slower = {name: share for name, share in _hardest(by_clock).items() if share.value < 0.0}
    if slower:
        return f"the clock does not confirm it: {_list(list(slower))} {_takes(slower)} less time"
    tied = {name: share for name, (_, share) in by_clock.items() if share.low <= 0.0}
    if replay is None and tied:
        return f"by the clock it is not told apart from {_list(list(tied))}"
    return ""


def _takes(names: Mapping[str, Interval]) -> str:
    return "takes" if len(names) == 1 else "take"


def _rows(by_replay: Saved, by_clock: Saved, deciding: set[str]) -> tuple[DecisionRow, ...]:
    """A row a rule; its setting may differ between the two judgements."""
    columns = [each for each in (by_replay, by_clock) if each]
    rules = list(dict.fromkeys(rule for each in columns for rule, _ in each.values()))
    rows = []
    for rule in sorted(rules, key=lambda rule: rule != "fixed"):
        found = [{n: share for n, (r, share) in each.items() if r == rule} for each in columns]
        cells = tuple(
            "; ".join(f"{share} ({name})" for name, share in one.items()) or NOT_MEASURED
            for one in found
        )
        decides = any(name in deciding for one in found for name in one)
        rows.append(DecisionRow("fixed length" if rule == "fixed" else rule, cells, decides))
    return tuple(rows)


def _cost(verdict: HeadVerdict) -> str:
    """What the head's answers cost, in words."""
    cost = verdict.cost
    if cost is None:
        return ""
    extra = cost.with_head - cost.without
    answers = (
        f"{1000 * extra:.2f} ms, {100 * extra / cost.without:.0f} % of a draft step, go to the head"
        if extra > 0
        else "the head's answers take no time that shows"
    )
    return (
        f"A drafted token takes {1000 * cost.with_head:.2f} ms with the head and"
        f" {1000 * cost.without:.2f} ms at {cost.method}: {answers}. A forward of the target takes"
        f" {1000 * cost.target:.2f} ms. Replay counts no time for the head's answers; the clock"
        " does."
    )


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
