"""How much time one stopping rule saves against another, with intervals over prompts.

Both rules are replayed on the same rollouts, so their times are paired: a resample draws prompts,
and both are judged on those. All comparisons of as many prompts use the same resamples (common
random numbers), so that differences between intervals are differences between rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.analysis.expectation import Counts
from eval.drafting.stopping.recorded import Reals
from eval.measuring.intervals import Interval, resamples


def saving(
    rule: Counts,
    rival: Counts,
    *,
    draft_seconds: float,
    target_seconds: float,
    prompts: Sequence[str] | None = None,
) -> Interval:
    """The share of the rival's time a token that a rule saves: 1 - t(rule) / t(rival).

    Args:
        rule: expected counts of R rollouts.
        rival: of the same rollouts under another rule.
        draft_seconds: t_d.
        target_seconds: t_t.
        prompts: (R,) which prompt each rollout is of; those of one are resampled together. Each of
            its own by default.

    Raises:
        ValueError: if the counts are not of the same rollouts.
    """
    ours, theirs = _sums((rule, rival), draft_seconds, target_seconds, prompts)
    return Interval.of(1.0 - ours / theirs)


def closes(
    rule: Counts,
    rival: Counts,
    best: Counts,
    *,
    draft_seconds: float,
    target_seconds: float,
    prompts: Sequence[str] | None = None,
) -> Interval:
    """The share of the way from a rival to the best, in time a token, that a rule goes.

    (t(rival) - t(rule)) / (t(rival) - t(best)): 0 is the rival, 1 is the best, which is the oracle
    as a rule.

    Args:
        rule: expected counts of R rollouts.
        rival: of the same rollouts, where the way begins.
        best: of the same rollouts, where it ends.
        draft_seconds: t_d.
        target_seconds: t_t.
        prompts: as in `saving`.

    Raises:
        ValueError: if the counts are not of the same rollouts, or the rival is as fast as the best.
    """
    ours, theirs, least = _sums((rule, rival, best), draft_seconds, target_seconds, prompts)
    if theirs[0] <= least[0]:
        raise ValueError("there is no way to go: the rival takes no more time than the best")
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (theirs - ours) / (theirs - least)
    return Interval.of(shares)


def _sums(
    counts: Sequence[Counts],
    draft_seconds: float,
    target_seconds: float,
    prompts: Sequence[str] | None,
) -> list[Reals]:
    """Seconds of each rule, of all prompts first and then of every resample: (1 + RESAMPLES,)."""
    tokens = counts[0].tokens
    if any(not np.array_equal(tokens, other.tokens) for other in counts):
        raise ValueError("rules are compared on the same rollouts, and these emit other tokens")
    if prompts is not None and len(prompts) != len(tokens):
        raise ValueError(f"{len(prompts)} prompts were named for {len(tokens)} rollouts")
    _, group = np.unique(
        np.arange(len(tokens)) if prompts is None else prompts, return_inverse=True
    )
    groups = int(group.max()) + 1
    drawn = resamples(groups)
    return [
        drawn @ np.bincount(group, each.seconds(draft_seconds, target_seconds), groups)
        for each in counts
    ]
