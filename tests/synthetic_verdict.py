"""Verdict on a simulated head, for the tests of reports and cards."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.special import expit

from eval.analysis.expectation import Traces
from eval.analysis.head_verdict import HeadVerdict, judge_head
from eval.drafting.stopping.recorded import RecordedHead, RecordedTokens
from tests.synthetic_results import synthetic_results


def traces(seed: int, rollouts: int = 24, width: int = 24, *, skill: float = 4.0) -> Traces:
    """Rollouts whose acceptance a head knows up to noise, the less the larger its `skill`."""
    generator = np.random.default_rng(seed)
    shape = (rollouts, width)
    odds = generator.normal(1.5, 1.5, shape)
    accept = expit(odds + generator.normal(0.0, 1.0, shape))
    q_max = expit(0.6 * odds + generator.normal(0.0, 1.0, shape)).clip(0.05)
    drawn = odds + generator.normal(0.0, 2.0 / skill, shape)
    lengths = generator.integers(width // 2, width + 1, rollouts)
    lengths[0] = width
    tokens = RecordedTokens(
        lengths=lengths,
        q=q_max * generator.uniform(0.5, 1.0, shape),
        q_max=q_max,
        entropy=-np.log(q_max),
        head=RecordedHead(drawn),
    )
    return Traces(tokens, accept)


@cache
def synthetic_verdict(
    names: tuple[str, ...] = ("alpaca", "gsm8k"), *, timed: bool = True, skill: float = 4.0
) -> HeadVerdict:
    """Judged on 24 rollouts of these prompt sets, each of a prompt of its own."""
    test = traces(1, skill=skill)
    return judge_head(
        synthetic_results(datasets=names, timed=timed),
        traces(0, skill=skill),
        test,
        prompts=[f"prompt {i}" for i in range(len(test.accept))],
        questions={},
    )
