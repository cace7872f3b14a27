"""From the records of generations to the published metrics, with intervals.

Every rate is a ratio of sums over prompts, never a mean of ratios: a prompt weighs as much as the
work it caused. Every interval is a 95 % percentile bootstrap that resamples prompts, because the
tokens of one prompt depend on each other (`eval.measuring.intervals`). All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from eval.measuring.intervals import Array, bootstrap_weights, interval
from eval.measuring.records import PromptRecord, Strict, check_identity


class Metrics(Strict):
    """The published metrics of one method on one dataset.

    A rate whose denominator is zero is None (nothing drafted, nothing timed, no plain run to
    compare with, no bias measured) and has no interval. N is the number of emitted tokens.

    Attributes:
        prompts: distinct prompts.
        tokens: emitted tokens, N.
        rounds: forwards of the target, each with the draft before it.
        n_target: N_target, the same number in the paper's letters.
        n_draft: N_draft, drafted nodes.
        n_discarded: N_discarded, drafted nodes that were not accepted.
        draft_forwards: forwards of the draft.
        block_efficiency: emitted tokens a round, the bonus token included.
        acceptance_rate: accepted over drafted tokens, by depth.
        acceptance_by_position: marginal: among the rounds that drafted position i + 1, the share
            that accepted it, so it falls with i even if every position is equally easy.
        conditional_by_position: the same share among the rounds that also accepted all positions
            before it; None if there is none.
        discard_rate: N_discarded / N.
        verification_rate: N_target / N.
        tokens_per_second: emitted tokens over wall time, prefills included.
        speedup: tokens_per_second over that of plain decoding of the same prompts.
        total_variation: of a biased verifier, the mean total variation between the distribution
            of an emitted token and the target's, given the tokens before it.
        intervals: 95 % intervals of the rates by name.
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
    conditional_by_position: list[float | None]
    discard_rate: float
    verification_rate: float
    tokens_per_second: float | None
    speedup: float | None
    total_variation: float | None
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
_SCALARS = tuple(sorted({name for rate in RATES.values() for name in rate}))
_scalars = attrgetter(*_SCALARS)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Counts summed over something, with one leading shape (...) for all of them.

    `scalars` maps a field of PromptRecord to (...); the others are (..., positions).
    """

    scalars: dict[str, Array]
    drafted: Array
    reached: Array
    accepted: Array

    def weighted(self, weights: Array) -> _Sums:
        """Sum over prompts (P, ...) with weights (B, P)."""
        return _Sums(
            {name: weights @ column for name, column in self.scalars.items()},
            weights @ self.drafted,
            weights @ self.reached,
            weights @ self.accepted,
        )

    def rate(self, name: str) -> Array:
        """One of RATES, (...)."""
        above, below = RATES[name]
        return _divide(self.scalars[above], self.scalars[below])


def compute_metrics(
    records: Sequence[PromptRecord], plain: Sequence[PromptRecord] | None = None, *, seed: int = 0
) -> Metrics:
    """Return every metric of one method on one dataset.

    Args:
        records: the method's generations.
        plain: plain decoding of the same prompts in the same run, or None.
        seed: of the bootstrap.

    Raises:
        ValueError: if there are no generations or no tokens, if counts contradict each other, or if
            `plain` covers other prompts, or if only some of the generations were timed.
    """
    for record in records:
        check_identity(record)
    timed = _timed([*records, *(plain or ())])
    prompts = _prompt_ids(records)
    sums = _sums(records, prompts)
    weights = bootstrap_weights(len(prompts), seed)
    total, resampled = _whole(sums), sums.weighted(weights)
    if total.scalars["tokens"] == 0:
        raise ValueError("no method can be rated on zero emitted tokens; raise max_new_tokens")
    rates = {name: value for name in RATES if not np.isnan(value := float(total.rate(name)))}
    intervals = {name: interval(resampled.rate(name)) for name in rates}
    speedup = None
    if plain is not None and timed:
        base = _sums(plain, prompts)
        speedup = rates["tokens_per_second"] / float(_whole(base).rate("tokens_per_second"))
        intervals["speedup"] = _ratio_interval(resampled, base.weighted(weights))
    return Metrics(
        prompts=len(prompts),
        **_counts(records),
        block_efficiency=rates["block_efficiency"],
        acceptance_rate=rates.get("acceptance_rate"),
        acceptance_by_position=_divide(total.accepted, total.drafted).tolist(),
        conditional_by_position=_or_none(_divide(total.accepted, total.reached)),
        discard_rate=rates["discard_rate"],
        verification_rate=rates["verification_rate"],
        tokens_per_second=rates.get("tokens_per_second"),
        speedup=speedup,
        total_variation=rates.get("total_variation"),
        intervals=intervals,
        seconds=_seconds(records),
    )


def speed_ratio_interval(
    records: Sequence[PromptRecord], other: Sequence[PromptRecord], *, seed: int = 0
) -> tuple[float, float]:
    """Interval of tokens/s over `other`'s tokens/s, paired by prompt.

    Raises:
        ValueError: if the two cover different prompts.
    """
    prompts = _prompt_ids(records)
    weights = bootstrap_weights(len(prompts), seed)
    mine, theirs = _sums(records, prompts), _sums(other, prompts)
    return _ratio_interval(mine.weighted(weights), theirs.weighted(weights))


def _timed(records: Sequence[PromptRecord]) -> bool:
    """Whether these generations were timed: all of them, or none."""
    without = sum(record.seconds == 0 for record in records)
    if 0 < without < len(records):
        raise ValueError(
            f"{without} of {len(records)} generations have no time: speeds need all, counts none"
        )
    return without == 0


def _counts(records: Sequence[PromptRecord]) -> dict[str, int]:
    """Sums of the integer counts."""
    rounds = sum(r.rounds for r in records)
    return {
        "tokens": sum(r.tokens for r in records),
        "rounds": rounds,
        "n_target": rounds,  # one forward of the target a round
        "n_draft": sum(r.n_draft for r in records),
        "n_discarded": sum(r.n_discarded for r in records),
        "draft_forwards": sum(r.draft_forwards for r in records),
    }


def _seconds(records: Sequence[PromptRecord]) -> dict[str, float]:
    """Sums of the times; what is left of the total was not measured apart, as prefill."""
    return {
        "total": sum(r.seconds for r in records),
        "draft": sum(r.draft_seconds for r in records),
        "target": sum(r.target_seconds for r in records),
        "overhead": sum(r.overhead_seconds for r in records),
    }


def _prompt_ids(records: Sequence[PromptRecord]) -> list[str]:
    """Distinct prompts in the order they came."""
    if not records:
        raise ValueError("metrics need at least one generation, got none")
    return list(dict.fromkeys(record.prompt_id for record in records))


def _sums(records: Sequence[PromptRecord], prompts: list[str]) -> _Sums:
    """Sum each prompt's generations, rows in the order of `prompts`: scalars (P,)."""
    odd = {record.prompt_id for record in records} ^ set(prompts)
    if odd:
        raise ValueError(
            "a speed-up compares the same prompts, but the two methods differ in"
            f" {len(odd)} of them (first: {min(odd)!r}); run both on one prompt set"
        )
    row = {prompt_id: index for index, prompt_id in enumerate(prompts)}
    deepest = max(len(record.drafted_by_position) for record in records)
    scalars = {name: np.zeros(len(prompts)) for name in _SCALARS}
    positions = np.zeros((3, len(prompts), deepest))
    for record in records:
        index = row[record.prompt_id]
        for name, value in zip(_SCALARS, _scalars(record), strict=True):
            scalars[name][index] += value
        positions[0, index, : len(record.drafted_by_position)] += record.drafted_by_position
        positions[1, index, : len(record.reached_by_position)] += record.reached_by_position
        positions[2, index, : len(record.accepted_by_position)] += record.accepted_by_position
    return _Sums(scalars, *positions)


def _whole(sums: _Sums) -> _Sums:
    """Sum over all prompts, each once: scalars ()."""
    return sums.weighted(np.ones(len(sums.drafted)))


def _ratio_interval(resampled: _Sums, base: _Sums) -> tuple[float, float]:
    """Interval of a ratio of speeds; both were resampled with the same weights."""
    return interval(resampled.rate("tokens_per_second") / base.rate("tokens_per_second"))


def _divide(above: Array, below: Array) -> Array:
    """Divide; NaN where nothing was counted, as in a resample without the rounds in question."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    quotient: Array = np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
    return quotient


def _or_none(values: Array) -> list[float | None]:
    """JSON has no NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """Seconds of one draft and one target forward, fitted to whole generations.

    Args:
        t_draft: seconds a drafted token, stop rule included.
        t_target: seconds a round.
        r_squared: share of the variance of the total times that the fit explains.
        generations: how many were fitted.
    """

    t_draft: float
    t_target: float
    r_squared: float
    generations: int

    def seconds_per_token(self, *, discard_rate: float, verification_rate: float) -> float:
        """SpecDec++ Eq. 5.1: t_d + t_d N_discarded/N + (t_t - t_d) N_target/N."""
        return self.t_draft * (1 + discard_rate) + (
            (self.t_target - self.t_draft) * verification_rate
        )


def fit_latency(records: Sequence[PromptRecord]) -> LatencyFit | None:
    """Fit seconds = t_draft * N_draft + t_target * N_target, both non-negative.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 5: one regression over all generations.
    Only meaningful for chains, where a drafted token costs one draft forward.

    Returns:
        None if the counts do not tell the two times apart (fewer than three generations, all plain,
        or one fixed ratio of drafted tokens to rounds), or if all times are equal or unmeasured.
    """
    counts = np.array([[r.n_draft, r.rounds] for r in records], dtype=np.float64).reshape(-1, 2)
    seconds = np.array([r.seconds for r in records], dtype=np.float64)
    if len(records) < 3 or np.linalg.matrix_rank(counts) < 2:
        return None
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    if spread == 0.0:
        return None
    from scipy.optimize import nnls

    times, residual = nnls(counts, seconds)
    return LatencyFit(
        t_draft=float(times[0]),
        t_target=float(times[1]),
        r_squared=1 - float(residual) ** 2 / spread,
        generations=len(records),
    )


def latency_intervals(
    records: Sequence[PromptRecord],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """95 % intervals of t_draft and t_target of `fit_latency`, of which there must be a fit.

    Prompts are resampled with all their generations, whatever the method. Of two times that may not
    be negative, the one that least squares would make so is 0 and the other is fitted alone.
    """
    names = list(dict.fromkeys(record.prompt_id for record in records))
    row = {name: index for index, name in enumerate(names)}
    sums = np.zeros((5, len(names)))
    for record in records:
        drafted, rounds, seconds = record.n_draft, record.rounds, record.seconds
        sums[:, row[record.prompt_id]] += (
            drafted**2,
            drafted * rounds,
            rounds**2,
            drafted * seconds,
            rounds * seconds,
        )
    dd, dr, rr, ds, rs = sums @ bootstrap_weights(len(names)).T
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = dd * rr - dr**2
        draft = (rr * ds - dr * rs) / determinant
        target = (dd * rs - dr * ds) / determinant
        alone = rs / rr, ds / dd
    draft, target = (
        np.where(target < 0, alone[1], np.maximum(draft, 0.0)),
        np.where(draft < 0, alone[0], np.maximum(target, 0.0)),
    )
    return interval(draft), interval(target)
