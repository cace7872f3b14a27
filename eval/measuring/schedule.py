"""How many tokens a server should draft at each number of requests, as vLLM's schedule says it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eval.measuring.intervals import Array, Interval, resamples


def tokens_per_second(answers: Mapping[str, Mapping[str, list[float]]], requests: int) -> Array:
    """Tokens a second of so many requests together, and of each resample: (1 + RESAMPLES,).

    `answers` has tokens and seconds, by set and prompt. Sets count alike, as in `pooled`.
    """
    seconds, counts = np.float64(0), tuple(map(len, answers.values()))
    for seed, each in enumerate(answers.values()):
        tokens, took = np.array([*each.values()]).T @ resamples(len(each), seed, counts).T
        seconds = seconds + took / tokens
    return np.asarray(requests * len(counts) / seconds)


def best_length(speeds: Mapping[int, Array]) -> int:
    """The length to draft: from the shortest on, a longer one where it is surely faster."""
    best, *longer = sorted(speeds)
    for length in longer:
        if Interval.of(speeds[length] / speeds[best]).low > 1:
            best = length
    return best


def schedule(best: Mapping[int, int]) -> list[list[int]]:
    """Entries [from, to, length] of requests, both ends included, as vLLM wants them.

    `best` is the length at each measured number. Numbers between two take that of the larger, for
    drafts pay less the more requests there are. vLLM goes on with the last length.
    """
    entries, begin = list[list[int]](), 1
    for requests, length in sorted(best.items()):
        if entries and entries[-1][2] == length:
            entries[-1][1] = requests
        else:
            entries.append([begin, requests, length])
        begin = requests + 1
    return entries
