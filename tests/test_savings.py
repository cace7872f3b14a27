"""Time saved by one rule against another, with intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from eval.drafting.stopping.recorded import Reals
from recipes.papers.replay import Counts, Times, saving

TIMES = Times(draft_seconds=0.2, target_seconds=1.0)


def counts(n_target: Reals, n_draft: Reals) -> Counts:
    tokens = np.full(len(n_target), 40.0)
    return Counts(tokens, n_target, n_draft, n_draft + n_target - tokens)


def random_counts(seed: int, rollouts: int = 60) -> Counts:
    generator = np.random.default_rng(seed)
    return counts(generator.uniform(10, 20, rollouts), generator.uniform(40, 60, rollouts))


def test_a_saving_is_the_share_of_the_rivals_time_and_its_interval_is_the_bootstraps() -> None:
    rule, rival = random_counts(0), random_counts(1)
    found = saving(rule, rival, TIMES)
    expected = 1 - rule.seconds_per_token(TIMES) / rival.seconds_per_token(TIMES)
    assert found.value == pytest.approx(expected)
    # Resamples drawn by hand, another way and with other random numbers.
    generator = np.random.default_rng(5)
    values = []
    for _ in range(4000):
        drawn = generator.integers(0, 60, 60)
        seconds = [each.seconds(TIMES)[drawn].sum() for each in (rule, rival)]
        values.append(1 - seconds[0] / seconds[1])
    low, high = np.quantile(values, (0.025, 0.975))
    width = high - low
    assert found.low == pytest.approx(low, abs=0.06 * width)
    assert found.high == pytest.approx(high, abs=0.06 * width)


def test_rollouts_of_one_prompt_are_resampled_together() -> None:
    """Copies of a rollout tell nothing new, so they must not make the interval narrower."""
    rule, rival = random_counts(0, 20), random_counts(1, 20)
    once = saving(rule, rival, TIMES)

    def copied(original: Counts) -> Counts:
        return counts(np.repeat(original.n_target, 8), np.repeat(original.n_draft, 8))

    names = [f"prompt {number:02d}" for number in range(20) for _ in range(8)]
    grouped = saving(copied(rule), copied(rival), TIMES, names)
    for name in ("value", "low", "high"):
        assert getattr(grouped, name) == pytest.approx(getattr(once, name))
    apart = saving(copied(rule), copied(rival), TIMES)
    assert apart.high - apart.low < 0.6 * (once.high - once.low)


def test_other_rollouts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the same rollouts"):
        saving(random_counts(0), random_counts(0, 50), TIMES)
    with pytest.raises(ValueError, match="3 prompts were named for 60 rollouts"):
        saving(random_counts(0), random_counts(1), TIMES, ["a", "b", "c"])
