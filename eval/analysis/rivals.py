"""What stopping by a head saves over rules that need none: chosen on dev, judged on test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from eval.analysis.expectation import Counts
from eval.analysis.prediction import Estimate, Ids, Reals
from eval.analysis.replay import COST_RULE, RuleResult
from eval.measuring.metrics import bootstrap_weights, interval
from eval.measuring.records import Strict

ALL = "all prompt sets"
HEAD = "head"
NO_RIVALS = ("oracle", "plain", "perfect head", "perfect, no lag", HEAD)
"""What is replayed beside rules that need no head."""
Verdict = Literal["pays", "does not pay", "not shown to pay"]


class Saving(Strict):
    """The share of a rule's time that stopping by the head saves.

    Attributes:
        rule: the rule.
        setting: the one that took the least time on dev rollouts.
        candidates: how many it was chosen from.
        shares: prompt set, `ALL` first -> 1 - (the head's time) / (the rule's time); negative where
            the head takes longer.
    """

    rule: str
    setting: str
    candidates: int
    shares: dict[str, Estimate]


class Replayed(Strict):
    """A head's stopping rule against those that need no head, in replay.

    Attributes:
        draft_seconds: t_d, seconds of a drafted token.
        target_seconds: t_t, seconds of a round.
        setting: the head's threshold, chosen on dev like those of its rivals.
        candidates: how many it was chosen from.
        rivals: the fixed length first, then from the hardest to beat.
        cost_rule: what the head's cost rule, which needs no threshold, saves over the fixed length;
            None if it cannot be replayed.
    """

    draft_seconds: float
    target_seconds: float
    setting: str
    candidates: int
    rivals: list[Saving]
    cost_rule: Saving | None

    @property
    def status(self) -> Verdict:
        """It pays if it surely saves time over every rival, not if it surely loses to one."""
        shares = [rival.shares[ALL] for rival in self.rivals]
        if any(share.high < 0.0 for share in shares):
            return "does not pay"
        return "pays" if all(share.low > 0.0 for share in shares) else "not shown to pay"


def compare(
    dev: Sequence[RuleResult],
    judged: Sequence[RuleResult],
    prompts: Ids,
    names: Sequence[str],
    *,
    draft_seconds: float,
    target_seconds: float,
) -> Replayed | None:
    """Choose each rule's setting on dev and compare the head with every other on other rollouts.

    Args:
        dev: rules at all their settings, replayed on dev rollouts.
        judged: the same on the R rollouts that are judged on.
        prompts: (R,) equal for rollouts of one prompt, which are resampled together.
        names: (R,) prompt sets.
        draft_seconds: t_d.
        target_seconds: t_t.

    Returns:
        None if no threshold of a head, or no fixed length, was replayed.
    """

    def time(result: RuleResult) -> float:
        return result.counts.seconds_per_token(draft_seconds, target_seconds)

    known = {(result.family, result.setting): result.counts for result in judged}
    settings: dict[str, list[RuleResult]] = {}
    cost = None
    for result in dev:
        if (result.family, result.setting) == (HEAD, COST_RULE):
            cost = result
        elif (result.family, result.setting) in known:
            settings.setdefault(result.family, []).append(result)
    best = {family: min(results, key=time) for family, results in settings.items()}
    if HEAD not in best or "fixed" not in best:
        return None

    def seconds(result: RuleResult) -> Reals:
        counts: Counts = known[result.family, result.setting]
        return counts.seconds(draft_seconds, target_seconds)

    def saved(mine: RuleResult, other: RuleResult, candidates: int) -> Saving:
        shares = _shares(seconds(mine), seconds(other), prompts, names)
        return Saving(
            rule=other.family, setting=other.setting, candidates=candidates, shares=shares
        )

    rivals = [
        saved(best[HEAD], best[family], len(results))
        for family, results in settings.items()
        if family not in NO_RIVALS
    ]
    rivals.sort(key=lambda rival: (rival.rule != "fixed", rival.shares[ALL].value))
    return Replayed(
        draft_seconds=draft_seconds,
        target_seconds=target_seconds,
        setting=best[HEAD].setting,
        candidates=len(settings[HEAD]),
        rivals=rivals,
        cost_rule=None if cost is None else saved(cost, best["fixed"], len(settings["fixed"])),
    )


def _shares(mine: Reals, other: Reals, prompts: Ids, names: Sequence[str]) -> Mapping[str, Estimate]:
    """The share of time saved on each prompt set, resamples of prompts in common."""
    sets = np.asarray(names)
    shares = {}
    for name in (ALL, *dict.fromkeys(names)):
        chosen = (sets == name) | (name == ALL)
        _, number = np.unique(prompts[chosen], return_inverse=True)
        sums = np.stack([np.bincount(number, weights=x[chosen]) for x in (mine, other)], axis=1)
        ours, theirs = (bootstrap_weights(len(sums)) @ sums).T
        low, high = interval(1.0 - ours / theirs)
        value = 1.0 - float(mine[chosen].sum() / other[chosen].sum())
        shares[name] = Estimate(value=value, low=low, high=high)
    return shares
