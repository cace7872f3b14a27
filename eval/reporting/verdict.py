"""Whether an acceptance head pays: against the best fixed length and the rules without training.

Each rule's setting is chosen on held-out rollouts (`eval.analysis.choice`), then judged on the
evaluation's prompts: by tokens a second over all prompt sets together, and for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eval.analysis.choice import DevChoice
from eval.analysis.rivals import ALL
from eval.measuring.metrics import speed_ratio_interval
from eval.measuring.records import PromptRecord
from eval.measuring.results import Results, Run

Status = Literal["pays", "does not pay", "not shown to pay", "not measured"]
ASSISTED = "assisted"
"""How the rule of transformers' own loop is called among the rivals."""


DRAFTERS = ("chain", "transformers")


@dataclass(frozen=True, slots=True)
class Ratio:
    """The head's tokens a second over a rival's, and its 95 % interval, paired by prompt."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """In words: by how many percent the head is faster or slower."""
        low, value, high = (100.0 * (x - 1.0) for x in (self.low, self.value, self.high))
        word = "faster" if value >= 0.0 else "slower"
        return f"{abs(value):.1f} % {word} (95 % interval {low:+.1f} to {high:+.1f} %)"


@dataclass(frozen=True, slots=True)
class Rival:
    """A rule that needs no head, at the setting that was best on held-out rollouts.

    Args:
        rule: name of its stopping rule.
        method: the measured method with that setting.
        candidates: how many settings it was chosen from.
        ratios: "all prompt sets", and each set by name -> the head's speed over this rule's.
    """

    rule: str
    method: str
    candidates: int
    ratios: dict[str, Ratio]


@dataclass(frozen=True, slots=True)
class HeadCost:
    """What asking a head costs, by the clock.

    Args:
        with_head: seconds of a forward of the draft and what is done about its token, the head's
            answer included.
        without: the same of the fixed length that it is compared with.
        target: seconds of a forward of the target with the head.
        method: that fixed length.
    """

    with_head: float
    without: float
    target: float
    method: str


@dataclass(frozen=True, slots=True)
class HeadVerdict:
    """Whether a head pays, and what that was judged by.

    Args:
        status: it pays if it is surely faster than every rival, and does not if it is surely slower
            than one; "surely" is a 95 % interval that does not contain "as fast".
        reason: why nothing was measured; else empty.
        method: the method with the head that was chosen; None if nothing was measured.
        threshold: of that method.
        candidates: how many thresholds it was chosen from.
        verifier: acceptance rule of the head's method and of every rival.
        rivals: the fixed length first.
        left_out: rules whose setting could not be chosen on held-out rollouts.
        fastest: of all methods without a head, chosen in hindsight by speed on the evaluation's
            prompts, so looking better than it is; any verifier. Not judged by.
        choice: what the rivals were chosen by.
        cost: what asking the head costs.
    """

    status: Status
    reason: str = ""
    method: str | None = None
    threshold: float | None = None
    candidates: int = 0
    verifier: str | None = None
    rivals: tuple[Rival, ...] = ()
    left_out: tuple[str, ...] = ()
    fastest: Rival | None = None
    choice: DevChoice | None = field(default=None)
    cost: HeadCost | None = None


def judge(results: Results, choice: DevChoice | None) -> HeadVerdict:
    """Judge the head of an evaluation on its prompts.

    Args:
        results: an evaluation with a method that thresholds a head, measured on every prompt set.
        choice: what its settings cost on held-out rollouts; None if that is not known.
    """
    if not results.timed:
        return HeadVerdict("not measured", "speeds were not measured")
    if choice is None:
        return HeadVerdict("not measured", "no held-out labels to choose the threshold on")
    families = _families(results)
    heads = families.pop("head", {})
    headless = {name: runs for settings in families.values() for name, runs in settings.items()}
    method = _chosen(heads, choice)
    if method is None:
        return HeadVerdict(
            "not measured", "no threshold was measured that held-out labels can rank"
        )
    mine = heads[method]
    verifier = mine[0].verifier
    rivals, left_out = [], []
    for rule, settings in families.items():
        # Transformers' own loop has no other verifier than its own.
        same = {
            name: runs
            for name, runs in settings.items()
            if rule == ASSISTED or runs[0].verifier == verifier
        }
        rival = _chosen(same, choice)
        if rival is not None:
            ratios = _ratios(mine, same[rival])
            rivals.append(Rival(rule, rival, len(same), ratios))
        elif same:
            left_out.append(rule)
    if not any(rival.rule == "fixed" for rival in rivals):
        reason = f"no fixed length was measured with {verifier} verification"
        return HeadVerdict("not measured", reason)
    return HeadVerdict(
        _status([rival.ratios[ALL] for rival in rivals]),
        method=method,
        threshold=mine[0].threshold,
        candidates=len(heads),
        verifier=verifier,
        rivals=tuple(sorted(rivals, key=lambda rival: rival.rule != "fixed")),
        left_out=tuple(left_out),
        fastest=_fastest(mine, headless),
        choice=choice,
        cost=_cost(mine, families["fixed"], rivals),
    )


def _cost(
    mine: Sequence[Run], fixed: Mapping[str, Sequence[Run]], rivals: Sequence[Rival]
) -> HeadCost | None:
    """Time of a draft step with the head and at the fixed length it is compared with."""
    method = next(rival.method for rival in rivals if rival.rule == "fixed")
    with_head, without = (_draft_step(runs) for runs in (mine, fixed[method]))
    if not (with_head and without):
        return None
    records = [record for run in mine for record in run.generations]
    target = sum(each.target_seconds for each in records) / sum(each.rounds for each in records)
    return HeadCost(with_head, without, target, method)


def _draft_step(runs: Sequence[Run]) -> float | None:
    """Seconds of a drafted token; None if nothing was drafted or timed."""
    records = [record for run in runs for record in run.generations]
    drafted = sum(record.n_draft for record in records)
    return sum(record.draft_seconds for record in records) / drafted if drafted else None


def _families(results: Results) -> dict[str, dict[str, list[Run]]]:
    """Rule -> method -> its runs, for lossless chains that were measured on every prompt set.

    The head's own rule, rules that read no head, and transformers' own loop.
    """
    methods: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.drafter in DRAFTERS and run.lossless and run.rule is not None:
            methods.setdefault(run.method, []).append(run)
    families: dict[str, dict[str, list[Run]]] = {}
    for name, runs in methods.items():
        rule = runs[0].rule
        assert rule is not None
        complete = len(runs) == len(results.datasets())
        if complete and (rule.needs_head or runs[0].head is None):
            ours = "head" if rule.needs_head else rule.name
            family = ASSISTED if runs[0].drafter == "transformers" else ours
            families.setdefault(family, {})[name] = runs
    return families


def _chosen(settings: dict[str, list[Run]], choice: DevChoice) -> str | None:
    """The setting that costs least on held-out rollouts; where there is one only, that one."""
    if len(settings) == 1:
        return next(iter(settings))
    if not settings or any(name not in choice.expected for name in settings):
        return None
    return min(settings, key=lambda name: choice.expected[name])


def _fastest(mine: Sequence[Run], headless: dict[str, list[Run]]) -> Rival:
    """The fastest method without a head over all prompt sets, whatever verifies it."""

    def speed(name: str) -> float:
        return _tokens_per_second([record for run in headless[name] for record in run.generations])

    name = max(headless, key=speed)
    rule = headless[name][0].rule
    assert rule is not None
    return Rival(rule.name, name, len(headless), _ratios(mine, headless[name]))


def _ratios(mine: Sequence[Run], other: Sequence[Run]) -> dict[str, Ratio]:
    by_set = {run.dataset: run.generations for run in other}
    ratios = {
        ALL: _ratio(
            [record for run in mine for record in run.generations],
            [record for run in other for record in run.generations],
        )
    }
    return ratios | {run.dataset: _ratio(run.generations, by_set[run.dataset]) for run in mine}


def _ratio(mine: Sequence[PromptRecord], other: Sequence[PromptRecord]) -> Ratio:
    speed, base = (_tokens_per_second(records) for records in (mine, other))
    return Ratio(speed / base, *speed_ratio_interval(mine, other))


def _tokens_per_second(records: Sequence[PromptRecord]) -> float:
    return sum(record.tokens for record in records) / sum(record.seconds for record in records)


def _status(ratios: Sequence[Ratio]) -> Status:
    if any(ratio.high < 1.0 for ratio in ratios):
        return "does not pay"
    return "pays" if all(ratio.low > 1.0 for ratio in ratios) else "not shown to pay"
