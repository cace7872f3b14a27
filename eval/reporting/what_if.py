"""Expected speed-up at other costs of the draft: one table, from the counts of the run itself.

By SpecDec++ (Huang et al., arXiv:2405.19715), Eq. 5.1, an emitted token takes

    t = t_d (1 + N_discarded/N) + (t_t - t_d) N_target/N

with t_d and t_t for a forward of draft and target. For a chain 1 + N_discarded/N - N_target/N is
N_forwards/N, the draft's forwards a token, and those were counted, of trees too. Plain decoding
takes t_t, so at a cost ratio r = t_d/t_t the speed-up is 1 / (N_target/N + r N_forwards/N). Nothing
beside forwards is in it, and verifying a draft is taken to cost what one token costs, as the papers
assume. A method keeps the lengths that it drafted in this run, whatever the ratio.
"""

from __future__ import annotations

import numpy as np

from eval.analysis.head_verdict import measured_times
from eval.measuring.pooled import PooledRow, pool
from eval.measuring.results import Results
from eval.reporting.rendering import Fold

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""t_draft / t_target; .21 is that of the pair that most papers' figures are of (a 68M draft)."""
EXPLAINED = (
    "Speed-up over the target alone if a forward of the draft took the share r of one of the"
    " target's: 1 / (N target/N + r N forwards/N), SpecDec++ Eq. 5.1 with the counts of this run,"
    " nothing beside forwards, and verifying as dear as one token. Every method keeps the lengths"
    " that it drafted here. ★ the fastest lossless method at that ratio."
)


def expected_speedup(row: PooledRow, ratio: float) -> float:
    """Speed over plain decoding by Eq. 5.1, every prompt set counting alike.

    Args:
        row: a method over one prompt set or several.
        ratio: t_draft / t_target.
    """
    seconds = []  # of a token on each set, where the target's forward takes 1
    for run in row.runs:
        tokens = sum(each.tokens for each in run.generations)
        rounds = sum(each.rounds for each in run.generations)
        forwards = sum(each.draft_forwards for each in run.generations)
        seconds.append((rounds + ratio * forwards) / tokens)
    return 1.0 / float(np.mean(seconds))


def what_if(results: Results) -> Fold | None:
    """The table over all prompt sets together; None if nothing drafted."""
    drafting = [row for row in pool(results) if row.draft]
    if not drafting:
        return None
    speedups = np.array([[expected_speedup(row, ratio) for ratio in RATIOS] for row in drafting])
    lossless = np.array([row.lossless for row in drafting])
    best = np.where(lossless[:, None], speedups, 0.0).max(axis=0)  # 0 where all are biased
    rows = [
        (
            row.method + ("" if row.lossless else " †"),
            [("★ " if x == y else "") + f"{x:.2f}x" for x, y in zip(own, best, strict=True)],
        )
        for row, own in zip(drafting, speedups, strict=True)
    ]
    fit, own = measured_times(results), ""
    if fit is not None:
        own = (
            f" Here a drafted token took {1000 * fit.t_draft:.2f} ms and a target forward"
            f" {1000 * fit.t_target:.2f} ms, all that a round costs included (fitted to the chains"
            f" of every set, R² = {fit.r_squared:.3f}): r = {fit.t_draft / fit.t_target:.2g}."
        )
    return Fold(
        "What if the draft were cheaper, or dearer?",
        "Expected speed-up at other ratios r of a draft's forward to the target's.",
        [(f"r = {ratio:g}", "") for ratio in RATIOS],
        rows,
        note=EXPLAINED + own,
    )
