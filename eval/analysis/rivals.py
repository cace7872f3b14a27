"""A head's stopping rule against rules that need no head: chosen on dev, judged on test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eval.analysis.expectation import Counts
from eval.analysis.replay import COST_RULE, RuleResult
from eval.analysis.savings import closes, saving
from eval.drafting.stopping import STOPPING_RULES
from eval.measuring.intervals import Interval
from eval.measuring.records import Strict

ALL = "all prompt sets"
HEAD = "head"
RIVALS = tuple(name for name, rule in STOPPING_RULES.items() if not rule.needs_head)
"""Rules that need no head; what is replayed beside them is nobody's choice."""
Verdict = Literal["pays", "does not pay", "not shown to pay"]


class Rival(Strict):
    """A rule that needs no head, at its best setting.

    Attributes:
        rule: the rule.
        setting: the one that took the least time on dev rollouts.
        candidates: how many it was chosen from.
        saved: prompt set, `ALL` first -> the share of this rule's time that stopping by the head
            saves; negative where the head takes longer.
    """

    rule: str
    setting: str
    candidates: int
    saved: dict[str, Interval]

    @property
    def overall(self) -> Interval:
        """Over all prompt sets together."""
        return next(iter(self.saved.values()))


class Replayed(Strict):
    """A head's stopping rule against those that need no head, in replay.

    Attributes:
        draft_seconds: t_d, seconds of a drafted token.
        target_seconds: t_t, seconds of a round.
        setting: the head's threshold, chosen on dev like those of its rivals.
        candidates: how many it was chosen from.
        rivals: the fixed length first, then from the hardest to beat.
        to_oracle: how much of the way from the logistic model on max q to the oracle the head goes,
            in time a token; None without that rival, or if there is no way to go.
        cost_rule: what the head's cost rule, which needs no threshold, saves over the fixed length;
            None if it cannot be replayed.
    """

    draft_seconds: float
    target_seconds: float
    setting: str
    candidates: int
    rivals: list[Rival]
    to_oracle: Interval | None
    cost_rule: Rival | None

    @property
    def status(self) -> Verdict:
        """It pays if it surely saves time over every rival, not if it surely loses to one."""
        shares = [rival.overall for rival in self.rivals]
        if any(share.high < 0.0 for share in shares):
            return "does not pay"
        return "pays" if all(share.low > 0.0 for share in shares) else "not shown to pay"


def compare(
    dev: Sequence[RuleResult],
    judged: Sequence[RuleResult],
    prompts: Sequence[str],
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

    sets = prompt_sets(names)

    def against(mine: RuleResult, other: RuleResult, candidates: int) -> Rival:
        pair = [known[each.family, each.setting] for each in (mine, other)]
        saved = {
            name: saving(
                *(_chosen(counts, rows) for counts in pair),
                draft_seconds=draft_seconds,
                target_seconds=target_seconds,
                prompts=np.asarray(prompts)[rows].tolist(),
            )
            for name, rows in sets.items()
        }
        return Rival(rule=other.family, setting=other.setting, candidates=candidates, saved=saved)

    rivals = [
        against(best[HEAD], best[family], len(results))
        for family, results in settings.items()
        if family in RIVALS
    ]
    rivals.sort(key=lambda rival: (rival.rule != "fixed", rival.overall.value))
    return Replayed(
        draft_seconds=draft_seconds,
        target_seconds=target_seconds,
        setting=best[HEAD].setting,
        candidates=len(settings[HEAD]),
        rivals=rivals,
        to_oracle=_way(known, best, prompts, draft_seconds, target_seconds),
        cost_rule=None if cost is None else against(cost, best["fixed"], len(settings["fixed"])),
    )


def _way(
    known: Mapping[tuple[str, str], Counts],
    best: Mapping[str, RuleResult],
    prompts: Sequence[str],
    draft_seconds: float,
    target_seconds: float,
) -> Interval | None:
    """The head's share of the way from the logistic model to the oracle, over all prompt sets."""
    if not {"logit", "oracle"} <= best.keys():
        return None
    head, logit, oracle = (
        known[best[family].family, best[family].setting] for family in (HEAD, "logit", "oracle")
    )
    try:
        return closes(
            head,
            logit,
            oracle,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
            prompts=prompts,
        )
    except ValueError:  # there is none
        return None


def prompt_sets(names: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Prompt set -> (R,) which rollouts are of it; `ALL` first, if there are several."""
    of = np.asarray(names)
    sets = {name: of == name for name in dict.fromkeys(names)}
    return {ALL: np.ones(len(of), dtype=bool), **sets} if len(sets) > 1 else sets


def _chosen(counts: Counts, rows: NDArray[np.bool_]) -> Counts:
    """The counts of some rollouts."""
    fields = (counts.tokens, counts.n_target, counts.n_draft, counts.n_discarded)
    return Counts(*(field[rows] for field in fields))
