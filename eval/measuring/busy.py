"""Whether a machine was busy with other work while an evaluation was timed.

A thread that waits for a core, or sleeps at a barrier for a partner that waits, does not run: its
CPU time falls behind the wall time. That of the process does not, for waiting threads spin. On two
cores (a target of 2 layers, captured) the decoding thread ran for 99 to 100 % of its time alone,
with one and with two threads; beside one busy loop for 46 to 75 % (one thread) and 30 % (two, while
the process had 58 %), beside two for 31 % and 17 to 24 %; beside a little other work for 89 %.
"""

from __future__ import annotations

import numpy as np

from eval.measuring.results import Results
from specdata.processes import IDLE

MOST_SPREAD = 0.3
"""Interquartile range over median of plain decoding's seconds a token, over the prompts of a set.
Evaluations on idle machines had .02 to .18; a busy one, unevenly, .6 and more."""


def busy(results: Results) -> str:
    """What shows that a machine was busy, in words with figures; empty where nothing does."""
    records = [each for run in results.judged for each in run.generations if each.cpu_seconds]
    turns: list[float] = []
    for run in results.judged:
        if run.method.decoder == "plain" and run.tokens_per_second:
            of_token = np.array([each.seconds / each.tokens for each in run.generations])
            turns += (of_token / np.median(of_token)).tolist()
    shown = []
    if records:
        share = sum(each.cpu_seconds for each in records) / sum(each.seconds for each in records)
        if share < IDLE:
            shown.append(f"decoding had a core for {100 * share:.0f} % of its time")
    if len(turns) >= 10:
        low, middle, high = np.percentile(turns, [25, 50, 75])
        if (spread := (high - low) / middle) > MOST_SPREAD:
            shown.append(f"a token of plain decoding varied by {100 * spread:.0f} %")
    return f"measured on a busy machine ({'; '.join(shown)})" if shown else ""
