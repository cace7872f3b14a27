"""The published metrics of generations' records, with intervals.

Every rate is a ratio of sums over prompts, never a mean of ratios: a prompt weighs as much as the
work it caused. Every interval is a 95 % percentile bootstrap that resamples prompts, because the
tokens of one prompt depend on each other (`eval.measuring.intervals`). All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from pydantic import Field

from eval.measuring.intervals import Floats, interval, resamples
from eval.measuring.records import PromptRecord, Strict, check_identity


class Metrics(Strict):
    """The published metrics of one method on one dataset.

    A rate whose denominator is zero is None (nothing drafted, nothing timed, no plain run to
    compare with, no bias measured) and has no interval; nor has any of too few prompts
    (`eval.measuring.intervals`). N is the number of emitted tokens.

    Attributes:
        tokens: N.
        rounds: forwards of the target, each with the draft before it; N_target in the paper.
        n_draft: drafted nodes, of which `n_discarded` were not accepted.
        block_efficiency: tokens per target call, the bonus token included.
        acceptance_rate: accepted over drafted tokens, by depth.
        acceptance_by_position: marginal: among the rounds that drafted position i + 1, the share
            that accepted it, so it falls with i even if every position is equally easy.
        discard_rate: N_discarded / N.
        verification_rate: N_target / N.
        tokens_per_second: emitted tokens over wall time, prefills included.
        speedup: tokens_per_second over that of plain decoding of the same prompts.
        total_variation: of a biased verifier, the mean total variation between the distribution
            of an emitted token and the target's, given the tokens before it.
        scores: means of the texts' scores by name.
        seconds: summed times: "total", and in it "draft", "target" and "overhead".
    """

    prompts: int
    tokens: int
    rounds: int
    n_target: int
    n_draft: int
    n_discarded: int
    draft_forwards: int
    block_efficiency: float
    acceptance_rate: float | None
    acceptance_by_position: list[float]
    discard_rate: float
    verification_rate: float
    tokens_per_second: float | None
    speedup: float | None
    total_variation: float | None
    scores: dict[str, float] = Field(default_factory=dict)
    intervals: dict[str, tuple[float, float]]
    seconds: dict[str, float]


RATES = {
    "block_efficiency": ("tokens", "rounds"),
    "acceptance_rate": ("accepted", "depth"),
    "discard_rate": ("n_discarded", "tokens"),
    "verification_rate": ("rounds", "tokens"),
    "tokens_per_second": ("tokens", "seconds"),
    "total_variation": ("variation", "variation_tokens"),
}
"""Rates as numerator / denominator, fields of PromptRecord; a denominator of zero makes it None."""
COUNTS = tuple(sorted(set(chain.from_iterable(RATES.values()))))
_counts_of = attrgetter(*COUNTS)


def compute_metrics(
    records: Sequence[PromptRecord], plain: Sequence[PromptRecord] | None = None
) -> Metrics:
    """Every metric of one method on one dataset; `plain` is plain decoding in the same run."""
    for record in records:
        check_identity(record)
    timed = all(record.seconds for record in (*records, *(plain or ())))
    prompts = prompt_ids(records)
    rates = rates_of(resampled_counts(records, prompts))
    if plain is not None and timed:
        base = rates_of(resampled_counts(plain, prompts))
        rates["speedup"] = rates["tokens_per_second"] / base["tokens_per_second"]
    scores = resampled_scores(records, prompts)
    drafted, accepted = by_position(records, prompts).sum(axis=1)
    values: dict[str, Any] = dict.fromkeys((*RATES, "speedup"))
    values |= {name: float(each[0]) for name, each in rates.items()}
    rounds = sum(r.rounds for r in records)
    return Metrics(
        prompts=len(prompts),
        tokens=sum(r.tokens for r in records),
        rounds=rounds,
        n_target=rounds,  # one forward of the target a round
        n_draft=sum(r.n_draft for r in records),
        n_discarded=sum(r.n_discarded for r in records),
        draft_forwards=sum(r.draft_forwards for r in records),
        acceptance_by_position=divide(accepted, drafted).tolist(),
        **values,
        scores={name: float(each[0]) for name, each in scores.items()},
        intervals={
            name: ends
            for name, each in (rates | scores).items()
            if not np.isnan((ends := interval(each[1:]))[0])
        },
        # What is left of the total was not measured apart, as prefill.
        seconds={
            "total": sum(r.seconds for r in records),
            "draft": sum(r.draft_seconds for r in records),
            "target": sum(r.target_seconds for r in records),
            "overhead": sum(r.overhead_seconds for r in records),
        },
    )


def prompt_ids(records: Sequence[PromptRecord]) -> list[str]:
    """Distinct prompts in the order they came."""
    return list(dict.fromkeys(record.prompt_id for record in records))


def by_position(records: Sequence[PromptRecord], prompts: Sequence[str]) -> Floats:
    """Rounds of each prompt that drafted each position, and that accepted it: (2, P, depth)."""
    row = {prompt_id: index for index, prompt_id in enumerate(prompts)}
    counts = np.zeros((2, len(prompts), max(len(each.drafted_by_position) for each in records)))
    for each in records:
        by_depth = each.drafted_by_position, each.accepted_by_position
        counts[:, row[each.prompt_id], : len(by_depth[0])] += by_depth
    return counts


def resampled_counts(
    records: Sequence[PromptRecord],
    prompts: Sequence[str],
    seed: int = 0,
    sets: tuple[int, ...] = (),
) -> dict[str, Floats]:
    """Sum each of COUNTS over all prompts and then over each resample: (1 + RESAMPLES,).

    Methods that are compared share the order of the prompts. `sets` are as in `resamples`.
    """
    if odd := {record.prompt_id for record in records} ^ set(prompts):
        raise ValueError(
            "a speed-up compares the same prompts, but the two methods differ in"
            f" {len(odd)} of them (first: {min(odd)!r}); run both on one prompt set"
        )
    row = {prompt_id: index for index, prompt_id in enumerate(prompts)}
    columns = np.zeros((len(COUNTS), len(prompts)))
    for record in records:
        columns[:, row[record.prompt_id]] += _counts_of(record)
    return dict(zip(COUNTS, columns @ resamples(len(prompts), seed, sets).T, strict=True))


def resampled_scores(records: Sequence[PromptRecord], prompts: Sequence[str]) -> dict[str, Floats]:
    """Mean of each score over prompts, as `resampled_counts` resamples."""
    scores: dict[str, dict[str, float]] = {prompt: {} for prompt in prompts}
    for record in records:  # of a conversation its last prompt has them
        scores[record.prompt_id] |= record.scores
    means = {}
    for name in dict.fromkeys(chain.from_iterable(scores.values())):
        has = np.array([name in scores[prompt] for prompt in prompts], dtype=np.float64)
        values = np.array([scores[prompt].get(name, 0.0) for prompt in prompts])
        weights = resamples(len(prompts), sets=(int(has.sum()),))
        means[name] = divide(weights @ values, weights @ has)
    return means


def rates_of(sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """The RATES that sums (1 + RESAMPLES,) have; NaN in a resample without the denominator."""
    rates = {name: divide(sums[above], sums[below]) for name, (above, below) in RATES.items()}
    return {name: values for name, values in rates.items() if not np.isnan(values[0])}


def divide(above: Floats, below: Floats) -> Floats:
    """Divide; NaN where nothing was counted, as in a resample without the rounds in question."""
    quotient: Floats = np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
    return quotient
