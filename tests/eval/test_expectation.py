"""Expected counts of recorded rollouts under a rule, and the oracle of SpecDec++ Theorem 4.1."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.replay import (
    Counts,
    Times,
    expected_counts,
    oracle_counts,
    recorded_lengths,
    saving,
)
from benchmarks.papers.traces import Traces
from eval.drafting.stopping import StoppingRule
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import Lengths, Reals, RecordedHead, RecordedTokens, pad
from eval.drafting.stopping.thresholds import Confidence, Cumulative, Fixed, HeadThreshold

OUTCOMES = [bits for n in range(1, 7) for bits in itertools.product([False, True], repeat=n)]
Plain = tuple[int, int, int, int]  # tokens, n_target, n_draft, n_discarded
TIMES = Times(draft_seconds=0.2, target_seconds=1.0)


def traces(accept: Sequence[Sequence[float]]) -> Traces:
    """Rollouts of which nothing but the acceptance is known."""
    padded = pad(accept)
    lengths = np.array([len(row) for row in accept], dtype=np.int64)
    return Traces(RecordedTokens(lengths=lengths, q=padded, q_max=padded), padded)


def drafted(recorded: Traces, rule: StoppingRule) -> Lengths:
    return recorded_lengths(rule, recorded.tokens)


def counts_of(counts: Counts, row: int = 0) -> tuple[float, ...]:
    return tuple(
        float(values[row])
        for values in (counts.tokens, counts.n_target, counts.n_draft, counts.n_discarded)
    )


def decoded(accepted: Sequence[bool], lengths: Sequence[int]) -> Plain:
    """Round after round, with these outcomes: what the expectation is an expectation of."""
    position = n_target = n_draft = n_discarded = 0
    while position < len(accepted):
        drafted = lengths[position]
        kept = 0
        while kept < drafted and accepted[position + kept]:
            kept += 1
        n_target, n_draft = n_target + 1, n_draft + drafted
        n_discarded += drafted - kept
        position += kept + 1
    return position, n_target, n_draft, n_discarded


def every_rule(n: int) -> Iterator[list[int]]:
    """Every choice of lengths at n positions; a round leaves the last token to the target."""
    for lengths in itertools.product(*(range(n - position) for position in range(n))):
        yield list(lengths)


def mean_of(
    accept: Sequence[float], counted: Callable[[tuple[bool, ...]], tuple[float, ...]]
) -> tuple[float, ...]:
    """The mean of what is counted, over all outcomes."""
    mean = np.zeros(4)
    for outcome in itertools.product([False, True], repeat=len(accept)):
        weight = math.prod(a if yes else 1.0 - a for a, yes in zip(accept, outcome, strict=True))
        mean += weight * np.array(counted(outcome))
    return tuple(mean)


def test_expected_counts_and_the_oracles_are_the_mean_over_all_outcomes() -> None:
    chance = random.Random(0)
    rows = [[chance.random() for _ in range(n)] for n in (1, 3, 6, 5)]
    recorded = traces(rows)
    estimates = np.array([[chance.random() for _ in range(6)] for _ in rows])
    head = RecordedHead(np.log(estimates / (1.0 - estimates)), lag=1)
    tokens = replace(recorded.tokens, q=estimates, q_max=estimates, head=head)
    read = Traces(tokens, recorded.accept)
    rules = [
        np.zeros_like(tokens.most()),
        drafted(read, Fixed(length=2)),
        drafted(read, Confidence(threshold=0.5, limit=3)),
        drafted(read, Cumulative(threshold=0.3, limit=4)),
        drafted(read, HeadThreshold(threshold=0.7, limit=4)),
        drafted(read, Cost(draft_seconds=0.2, token_seconds=1.0, mean_acceptance=1.0, limit=5)),
    ]
    assert len({rule.tobytes() for rule in rules}) == len(rules)
    for lengths in rules:
        counts = expected_counts(recorded, lengths)
        for row, accept in enumerate(rows):
            mean = mean_of(accept, lambda outcome: decoded(outcome, lengths[row].tolist()))  # noqa: B023
            assert counts_of(counts, row) == pytest.approx(mean, abs=1e-12)
    oracle = oracle_counts(recorded)
    for row, accept in enumerate(rows):
        mean = mean_of(accept, lambda outcome: counts_of(oracle_counts(traces([outcome]))))
        assert counts_of(oracle, row) == pytest.approx(mean, abs=1e-12)


def test_the_oracle_takes_the_least_time_of_all_rules_on_every_short_trace() -> None:
    for accepted in OUTCOMES:
        best = counts_of(oracle_counts(traces([[float(yes) for yes in accepted]])))
        rules = {decoded(accepted, lengths) for lengths in every_rule(len(accepted))}
        assert best in rules
        assert best[1] == min(rule[1] for rule in rules)
        # The last token comes from the target anyway, so a rejection there costs nothing more.
        assert (best[3], best[1]) == (0, accepted[:-1].count(False) + 1)
        for draft in (0.01, 0.3, 1.0):
            least = min(draft * rule[2] + rule[1] for rule in rules)
            assert draft * best[2] + best[1] == pytest.approx(least, abs=1e-12)


# --- time saved by one rule against another ---


def counts(n_target: Reals, n_draft: Reals) -> Counts:
    tokens = np.full(len(n_target), 40.0)
    return Counts(tokens, n_target, n_draft, n_draft + n_target - tokens)


def random_counts(seed: int, rollouts: int = 60) -> Counts:
    generator = np.random.default_rng(seed)
    return counts(generator.uniform(10, 20, rollouts), generator.uniform(40, 60, rollouts))


def each_its_own(count: int) -> list[str]:
    return [f"prompt {number:03d}" for number in range(count)]


def test_rollouts_of_one_prompt_are_resampled_together() -> None:
    """Copies of a rollout tell nothing new, so they must not make the interval narrower."""
    rule, rival = random_counts(0, 20), random_counts(1, 20)
    once = saving(rule, rival, TIMES, each_its_own(20))
    expected = 1 - rule.seconds_per_token(TIMES) / rival.seconds_per_token(TIMES)
    assert once.value == pytest.approx(expected)

    def copied(original: Counts) -> Counts:
        return counts(np.repeat(original.n_target, 8), np.repeat(original.n_draft, 8))

    names = [f"prompt {number:02d}" for number in range(20) for _ in range(8)]
    grouped = saving(copied(rule), copied(rival), TIMES, names)
    for name in ("value", "low", "high"):
        assert getattr(grouped, name) == pytest.approx(getattr(once, name))
    apart = saving(copied(rule), copied(rival), TIMES, each_its_own(160))
    assert apart.high - apart.low < 0.6 * (once.high - once.low)
