"""Stopping rules along recorded rollouts: what each costs, and how far it is from the oracle.

Counts are expectations over all outcomes of acceptance (`eval.analysis.expectation`). Every rule of
`STOPPING_RULES` is replayed, at each of its `settings`; each pays what asking it takes
(`eval.measuring.question`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.analysis.expectation import (
    Counts,
    Times,
    Traces,
    dinkelbach,
    expected_counts,
    oracle_counts,
)
from eval.drafting.stopping import STOPPING_RULES, StoppingRule, fit_rules, recorded_lengths
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.head import Head
from eval.drafting.stopping.recorded import Lengths, RecordedHead
from eval.measuring.intervals import Interval, resamples
from specdata.errors import ConfigError

if TYPE_CHECKING:  # help is shown without torch, so what works imports where it works
    import datasets


@dataclass(frozen=True, slots=True)
class RuleResult:
    """A replayed rule.

    Args:
        family: the rule's `title`, or the name of a bound.
        setting: the rule's `label`.
        counts: expected counts of each rollout.
    """

    family: str
    setting: str
    counts: Counts


def every_setting(fitted: Mapping[str, Any]) -> list[StoppingRule]:
    """Every rule at each setting that is tried, with these values of what it fits on labels."""
    rules = [rule for kind in STOPPING_RULES.values() for rule in kind.settings()]
    return [rule.with_fit(fitted) for rule in rules]


def fit_all_rules(traces: Traces) -> dict[str, Any]:
    """The parameters that rules fit on labels, by name, of every rule.

    Args:
        traces: of held-out rollouts, which the draft was not distilled on.
    """
    rules = [rule() for rule in STOPPING_RULES.values()]
    return fit_rules(rules, traces.tokens, traces.accept)


def replayed(
    rule: StoppingRule, traces: Traces, times: Times, question: float = 0.0
) -> Counts | None:
    """The expected counts of a rule; None if it reads what was not recorded.

    A rule that measures costs is given those that it would come to know, a question's too: lambda
    is the time per token that it achieves itself. What it learns besides is not replayed.

    Args:
        rule: at its setting.
        traces: of at least one rollout.
        times: t_d and t_t.
        question: seconds of asking it about a drafted token.
    """
    paid, mean = replace(times, draft_seconds=times.draft_seconds + question), traces.mean_accept()

    def knowing(seconds: float) -> StoppingRule:
        return rule.with_costs(
            draft_seconds=paid.draft_seconds, token_seconds=seconds, mean_acceptance=mean
        )

    def lengths(seconds: float) -> Lengths:
        drafted = recorded_lengths(knowing(seconds), traces.tokens)
        assert drafted is not None, "it reads the same at every cost"
        return drafted

    if (drafted := recorded_lengths(knowing(times.target_seconds), traces.tokens)) is None:
        return None
    if knowing(times.target_seconds) is rule:
        counts = expected_counts(traces, drafted)
    else:
        counts, _ = dinkelbach(traces, lengths, paid)
    return replace(counts, question=question)


def replay_rules(
    traces: Traces,
    fitted: Mapping[str, Any],
    times: Times,
    questions: Mapping[str, float] | None = None,
) -> list[RuleResult]:
    """Replay every rule at every setting, each as the decoder applies it.

    Args:
        traces: of at least one rollout.
        fitted: values of what rules fit on labels; see `fit_all_rules`.
        times: t_d and t_t.
        questions: a rule's `title` -> seconds of asking it about a drafted token; 0 for others.
    """
    results = []
    for rule in every_setting(fitted):
        counts = replayed(rule, traces, times, (questions or {}).get(rule.title, 0.0))
        if counts is not None:
            results.append(RuleResult(rule.title, rule.label, counts))
    return results


def bounds(traces: Traces, times: Times) -> list[RuleResult]:
    """The bound that no rule reaches, and the target alone.

    The oracle knows which tokens will be accepted, and has no limit. Two are what a head would be
    without error: "perfect head" is SpecDec++'s rule with the acceptance probabilities themselves,
    one token late; "perfect, no lag" knows that of the newest token, too.
    """
    from scipy.special import logit

    alone = np.zeros_like(traces.tokens.most())
    results = [
        RuleResult("oracle", "", oracle_counts(traces)),
        RuleResult("plain", "", expected_counts(traces, alone)),
    ]
    odds = logit(traces.accept)
    late, prompt = RecordedHead(odds, lag=1), RecordedHead(odds)
    perfect: list[tuple[str, RecordedHead, StoppingRule]]
    perfect = [("perfect head", late, rule) for rule in Head.settings()]
    perfect += [("perfect, no lag", prompt, rule) for rule in Head.settings()]
    perfect += [("perfect, no lag, cost", prompt, Cost())]
    for family, head, rule in perfect:
        counts = replayed(rule, replace(traces, tokens=replace(traces.tokens, head=head)), times)
        assert counts is not None
        results.append(RuleResult(family, rule.label, counts))
    return results


def saving(
    rule: Counts, rival: Counts, times: Times, prompts: Sequence[str] | None = None
) -> Interval:
    """The share of the rival's time a token that a rule saves: 1 - t(rule) / t(rival).

    Both are replayed on the same rollouts, so their times are paired: a resample draws prompts, and
    both are judged on those.

    Args:
        rule: expected counts of R rollouts.
        rival: of the same rollouts under another rule.
        times: t_d and t_t.
        prompts: (R,) which prompt each rollout is of; those of one are resampled together. Each of
            its own by default.

    Raises:
        ValueError: if the counts are not of the same rollouts.
    """
    if not np.array_equal(rule.tokens, rival.tokens):
        raise ValueError("rules are compared on the same rollouts, and these emit other tokens")
    if prompts is not None and len(prompts) != len(rule.tokens):
        raise ValueError(f"{len(prompts)} prompts were named for {len(rule.tokens)} rollouts")
    names = np.arange(len(rule.tokens)) if prompts is None else prompts
    _, group = np.unique(names, return_inverse=True)
    drawn = resamples(int(group.max()) + 1)
    seconds, rival_seconds = (
        drawn @ np.bincount(group, each.seconds(times)) for each in (rule, rival)
    )
    return Interval.of(1.0 - seconds / rival_seconds)


def rows_of_split(
    labels: datasets.IterableDataset, folder: Path, split: str, most: int
) -> datasets.Dataset:
    """The first rows of a split, at most so many of each prompt set."""
    from datasets import Dataset

    if most < 1:
        raise ConfigError(f"at least one rollout of a prompt set must be read, got {most}")
    taken: Counter[str] = Counter()
    rows = []
    for row in labels:
        if row["split"] == split and taken[row["dataset"]] < most:
            rows.append(row)
            taken[row["dataset"]] += 1
    if not rows:
        splits = ", ".join(sorted({row["split"] for row in labels}))
        raise ConfigError(f"{folder} has no rows of split {split!r}, only {splits}")
    return Dataset.from_list(rows)
