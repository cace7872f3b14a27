"""What a report says first: what is fastest, by how much, how sure that is, if it is exact.

Over all prompt sets together, each counting as much as any other (`eval.measuring.pooled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.measuring.pooled import PooledRow, fastest_pooled, pool
from eval.measuring.results import Results

FEW_PROMPTS = 24
"""Sets with fewer prompts than this carry a warning."""
WIDE = 0.2
"""So does a speed-up whose interval is wider than this share of its value."""
MOST_NAMED = 3
"""Methods that are named of those that cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Overall:
    """The first lines of a report.

    Args:
        finding: what is fastest and by how much, with intervals.
        exactness: whether its text is the target's; empty where there is nothing to say.
        basis: what was measured, and where.
        cautions: why not to trust it too far; none if prompts and intervals are as they should be.
    """

    finding: str
    exactness: str
    basis: str
    cautions: tuple[str, ...]


def overall(results: Results) -> Overall:
    """Say first what matters, in a few plain sentences."""
    rows = pool(results)
    plain = next((row for row in rows if row.drafter is None), None)
    if results.timed:
        winner = fastest_pooled(rows)
        drafting = [row for row in rows if row.lossless and row.drafter is not None]
        best = max(drafting, key=_speed, default=None)
        finding = "No lossless method was measured."
        if best is None and plain is not None:
            finding = "Only the target alone was measured."
        elif best is not None and winner is not None:
            finding = _finding(best, plain, winner[1])
            finding += _against_transformers(best, rows)
    else:
        best = max(
            (row for row in rows if row.lossless and row.drafter is not None),
            key=lambda row: row.value("block_efficiency") or 0.0,
            default=None,
        )
        finding = _finding_of_counts(best, results.environment.batch_size)
    return Overall(
        finding,
        _exactness(best, rows),
        _basis(results),
        (*_few(results), *_wide(results), *_uncertain(best, plain), *_with_head(results, best)),
    )


def _speed(row: PooledRow) -> float:
    return row.value("tokens_per_second") or 0.0


def _finding(best: PooledRow, plain: PooledRow | None, ties: Sequence[PooledRow]) -> str:
    """The fastest method that drafts, over the target alone."""
    who = f"transformers' own {best.method}" if best.drafter == "transformers" else best.method
    if plain is None:
        return (
            f"{who} is fastest, {_speed(best):.1f} tokens/s; the target alone was not measured, so"
            " there is no speed-up."
        )
    ratio = best.over(plain, "tokens_per_second")
    value, within = ratio.value, (ratio.low, ratio.high)
    if within[1] < 1:
        return (
            f"Nothing is faster than the target alone: the best method, {who}, is slower, at"
            f" {value:.2f} times its speed {_interval(within)}."
        )
    if within[0] <= 1:
        return (
            f"No method is shown to be faster than the target alone: the best, {who}, ran at"
            f" {value:.2f} times its speed {_interval(within)}."
        )
    text = f"{who} is fastest: {value:.2f} times the speed of the target alone {_interval(within)}."
    others = [row.method for row in ties if row.drafter is not None]
    if others:
        named = ", ".join(others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        text += f" Not told apart from it: {named}{more}."
    return text


def _against_transformers(best: PooledRow, rows: Sequence[PooledRow]) -> str:
    """The best method over transformers' own best, if that was measured and is another."""
    theirs = max((r for r in rows if r.drafter == "transformers"), key=_speed, default=None)
    if theirs is None:
        return ""
    if theirs is best:
        ours = [r for r in rows if r.lossless and r.drafter not in (None, "transformers")]
        if not ours:
            return ""
        best = max(ours, key=_speed)
        ratio = best.over(theirs, "tokens_per_second")
        return f" The best of ours, {best.method}, runs at {ratio.value:.2f} times its speed" + (
            f" {_interval((ratio.low, ratio.high))}."
        )
    ratio = best.over(theirs, "tokens_per_second")
    told = "" if ratio.low > 1 else "; the two are not told apart"
    return (
        f" Against transformers' own assisted generation at its best ({theirs.method}) it is"
        f" {ratio.value:.2f} times as fast {_interval((ratio.low, ratio.high))}{told}."
    )


def _finding_of_counts(best: PooledRow | None, batch: int) -> str:
    text = f"Speeds were not measured ({batch} prompts were decoded together)"
    if best is None:
        return text + "."
    value, within = best.value("block_efficiency"), best.interval("block_efficiency")
    return (
        f"{text}: counts alone, which say nothing of the draft's cost. Most tokens a forward of"
        f" the target: {best.method}, {value:.2f} {_interval(within)}."
    )


def _exactness(best: PooledRow | None, rows: Sequence[PooledRow]) -> str:
    """Whether the best method's text is the target's, and what biased methods did."""
    text = ""
    if best is not None:
        by = f"the verifier {best.runs[0].verifier}"
        if best.drafter == "transformers":
            by = "transformers' own verification"
        text = f"It is exact: {by} is proved to leave the target's distribution as it is."
    for row in rows:
        if row.lossless:
            continue
        speed = row.value("speedup")
        ran = "" if speed is None else f" ran at {speed:.2f} times the target's speed, but"
        text += f" Not exact: {row.method}{ran} changes the target's distribution"
        if (bias := row.value("total_variation")) is not None:
            low, high = row.interval("total_variation")
            text += f" (total variation {bias:.3f} a token, 95 % interval {low:.3f} to {high:.3f})"
        text += "."
    return text.strip()


def _basis(results: Results) -> str:
    """On what, with which models and sampler, where."""
    first, where = results.runs[0], results.environment
    sets = [f"{results.of(name)[0].prompts} of {name}" for name in results.datasets()]
    equally = ", each set counting alike" if len(sets) > 1 else ""
    sampling = dict(first.sampling)
    temperature = sampling.get("temperature")
    sampler = "greedily" if temperature == 0 else f"at temperature {temperature}"
    if temperature != 0:
        if sampling.get("top_k"):
            sampler += f", top-k {sampling['top_k']}"
        if sampling.get("top_p") not in (None, 1.0, 1):
            sampler += f", top-p {sampling['top_p']}"
    hardware = where.hardware
    machine = hardware.get("gpu") if where.device.startswith("cuda") else hardware.get("cpu")
    threads = hardware.get("threads") if not where.device.startswith("cuda") else None
    methods = {run.method for run in results.runs}
    drawn = sampling.get("max_new_tokens")
    limit = "" if drawn is None else f", at most {drawn} new tokens"
    return (
        f"Measured on the same prompts for all ({', '.join(sets)}{equally}), {sampler}{limit};"
        f" {where.dtype} on {machine or where.device}"
        + (f", {threads} thread{'' if threads == 1 else 's'}" if threads else "")
        + f". Intervals are 95 %, paired by prompt; {len(methods)} methods were"
        " compared, and the fastest is chosen on the prompts it is judged on."
    )


def _few(results: Results) -> list[str]:
    few = few_prompts(results)
    if not few:
        return []
    named = ", ".join(f"{name} {count}" for name, count in few.items())
    return [
        f"Few prompts ({named}; fewer than {FEW_PROMPTS} a set): intervals over so few prompts are"
        " rough and tend to be too narrow; do not generalise from them."
    ]


def few_prompts(results: Results) -> dict[str, int]:
    """Set -> prompts, of the sets with fewer than FEW_PROMPTS."""
    counts = {name: results.of(name)[0].prompts for name in results.datasets()}
    return {name: count for name, count in counts.items() if count < FEW_PROMPTS}


def is_wide(value: float | None, within: tuple[float, float] | None) -> bool:
    """Whether an interval is wider than WIDE of its value."""
    return bool(value and within and within[1] - within[0] > WIDE * value)


def _wide(results: Results) -> list[str]:
    wide = [
        f"{run.method} on {run.dataset}"
        for run in results.runs
        if is_wide(run.speedup, run.intervals.get("speedup"))
    ]
    if not wide:
        return []
    named = wide[0] if len(wide) == 1 else f"{len(wide)} of {len(results.runs)} speed-ups"
    return [
        f"Wide intervals ({named}): wider than {100 * WIDE:.0f} % of the value, marked ~ in the"
        " tables; more prompts would narrow them."
    ]


def _uncertain(best: PooledRow | None, plain: PooledRow | None) -> list[str]:
    if best is None or plain is None or "speedup" not in best.rates:
        return []
    low, high = best.interval("speedup")
    if low <= 1 <= high:
        return ["Too uncertain to tell whether anything is gained: the interval contains 1."]
    return []


def _with_head(results: Results, best: PooledRow | None) -> list[str]:
    if not results.timed or best is None or best.runs[0].head is None:
        return []
    return [
        f"The fastest on these prompts, {best.method}, stops by a head. Whether the head pays is"
        " judged on other prompts, too, and can come out otherwise."
    ]


def _interval(within: tuple[float, float]) -> str:
    return f"(95 % interval {within[0]:.2f} to {within[1]:.2f})"
