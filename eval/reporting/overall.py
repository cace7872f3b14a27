"""First lines of a report: what is fastest, by how much, how sure that is, if it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.measuring.intervals import Interval
from eval.measuring.pooled import PooledRow, fastest, merit, pool
from eval.measuring.results import Results

FEW_PROMPTS = 24
"""Sets with fewer prompts than this carry a warning."""
WIDE = 0.2
"""So does a speed-up whose interval is wider than this share of its value."""
MOST_NAMED = 3
"""Methods that are named of those that cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Overall:
    """The first lines, over all prompt sets together (`eval.measuring.pooled`).

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
    """The answer in a few plain sentences."""
    rows = pool(results)
    best = best_of(rows)
    return Overall(
        finding(rows, batch=results.environment.batch_size),
        _exactness(best, rows),
        _basis(results),
        tuple(_cautions(results, best)),
    )


def best_of(rows: Sequence[PooledRow]) -> PooledRow | None:
    """The lossless drafting method of most tokens a second, or a forward where none is timed."""
    drafting = [row for row in rows if row.lossless and row.draft]
    return max(drafting, key=merit, default=None)


def finding(rows: Sequence[PooledRow], batch: int) -> str:
    """The fastest method that drafts, over the target alone and over transformers' own loop.

    Args:
        rows: methods on the same prompt sets.
        batch: prompts that were decoded together; times of more than one are not measured.
    """
    best, winner = best_of(rows), fastest(rows)
    if best is None:
        alone = any(row.drafter is None for row in rows)
        return f"{'Only the target alone' if alone else 'No lossless method'} was measured."
    if winner is None:
        said = "Speeds were not measured"
        said += f" ({batch} prompts were decoded together)" if batch > 1 else ""
        tokens = best.rate("block_efficiency")
        assert tokens is not None
        return (
            f"{said}: counts alone, which say nothing of the draft's cost. Most tokens a forward of"
            f" the target: {best.method}, {tokens.value:.2f} {_within(tokens)}."
        )
    plain = next((row for row in rows if row.drafter is None), None)
    who = f"transformers' own {best.method}" if best.drafter == "transformers" else best.method
    if plain is None:
        text = (
            f"{who} is fastest, {best.speed():.1f} tokens/s; the target alone was not measured, so"
            " there is no speed-up."
        )
    else:
        text = _over_plain(who, best.over(plain, "tokens_per_second"), winner[1])
    assisted = [row for row in rows if row.drafter == "transformers" and row.draft]
    theirs = max(assisted, key=PooledRow.speed, default=None)
    if theirs is best:
        ours = best_of([row for row in rows if row.drafter != "transformers"])
        if ours is not None:
            ratio = ours.over(theirs, "tokens_per_second")
            text += f" The best of ours, {ours.method}, runs at {ratio.value:.2f} times its speed"
            text += f" {_within(ratio)}."
    elif theirs is not None:
        ratio = best.over(theirs, "tokens_per_second")
        told = "" if ratio.low > 1 else "; the two are not told apart"
        text += (
            f" Against transformers' own assisted generation at its best ({theirs.method}) it is"
            f" {ratio.value:.2f} times as fast {_within(ratio)}{told}."
        )
    return text


def _over_plain(who: str, ratio: Interval, ties: Sequence[PooledRow]) -> str:
    """The best method over the target alone, and the methods that may be as fast."""
    if ratio.high < 1:
        return (
            f"Nothing is faster than the target alone: the best method, {who}, is slower, at"
            f" {ratio.value:.2f} times its speed {_within(ratio)}."
        )
    if ratio.low <= 1:
        return (
            f"No method is shown to be faster than the target alone: the best, {who}, ran at"
            f" {ratio.value:.2f} times its speed {_within(ratio)}."
        )
    text = f"{who} is fastest: {ratio.value:.2f} times the speed of the target alone"
    text += f" {_within(ratio)}."
    if others := [row.method for row in ties if row.draft]:
        named = ", ".join(others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        text += f" Not told apart from it: {named}{more}."
    return text


def _exactness(best: PooledRow | None, rows: Sequence[PooledRow]) -> str:
    """True if the best method's text is the target's, and what biased methods did."""
    text = ""
    if best is not None:
        by = f"the verifier {best.runs[0].verifier}"
        if best.drafter == "transformers":
            by = "transformers' own verification"
        text = f"It is exact: {by} is proved to leave the target's distribution as it is."
    for row in rows:
        if row.lossless:
            continue
        speed, bias = row.value("speedup"), row.rate("total_variation")
        ran = "" if speed is None else f" ran at {speed:.2f} times the target's speed, but"
        text += f" Not exact: {row.method}{ran} changes the target's distribution"
        if bias is not None:
            text += f" (total variation {bias.value:.3f} a token,"
            text += f" 95 % interval {bias.low:.3f} to {bias.high:.3f})"
        text += "."
    return text.strip()


def _basis(results: Results) -> str:
    """On what, with which models and sampler, where."""
    where, sampling = results.environment, results.runs[0].sampling
    sets = [f"{results.of(name)[0].prompts} of {name}" for name in results.datasets()]
    equally = ", each set counting alike" if len(sets) > 1 else ""
    temperature = sampling.get("temperature")
    sampler = "greedily" if temperature == 0 else f"at temperature {temperature}"
    if temperature != 0:
        sampler += f", top-k {sampling['top_k']}" if sampling.get("top_k") else ""
        sampler += f", top-p {sampling['top_p']}" if sampling.get("top_p") not in (None, 1) else ""
    drawn = sampling.get("max_new_tokens")
    limit = "" if drawn is None else f", at most {drawn} new tokens"
    machine, threads = where.hardware.get("gpu"), None
    if not where.device.startswith("cuda"):
        machine, threads = (where.hardware.get(name) for name in ("cpu", "threads"))
    return (
        f"Measured on the same prompts for all ({', '.join(sets)}{equally}), {sampler}{limit};"
        f" {where.dtype} on {machine or where.device}"
        + (f", {threads} thread{'' if threads == 1 else 's'}" if threads else "")
        + f". Intervals are 95 %, paired by prompt; of {len({run.method for run in results.runs})}"
        " measured, the fastest is chosen on the prompts that it is judged on."
    )


def is_wide(speedup: Interval | None) -> bool:
    """True if an interval is wider than WIDE of its value."""
    return speedup is not None and speedup.high - speedup.low > WIDE * speedup.value


def _cautions(results: Results, best: PooledRow | None) -> list[str]:
    """Few prompts, wide intervals, and a head that was not judged here."""
    said = []
    counts = {name: results.of(name)[0].prompts for name in results.datasets()}
    if few := [f"{name} {count}" for name, count in counts.items() if count < FEW_PROMPTS]:
        said.append(
            f"Few prompts ({', '.join(few)}; fewer than {FEW_PROMPTS} a set): intervals over so few"
            " prompts are rough and tend to be too narrow; do not generalise from them."
        )
    wide = [
        f"{run.method} on {run.dataset}"
        for run in results.runs
        if run.speedup is not None and is_wide(Interval(run.speedup, *run.intervals["speedup"]))
    ]
    if wide:
        named = wide[0] if len(wide) == 1 else f"{len(wide)} of {len(results.runs)} speed-ups"
        said.append(
            f"Wide intervals ({named}): wider than {100 * WIDE:.0f} % of the value, marked ~ in the"
            " tables; more prompts would narrow them."
        )
    if results.timed and best is not None and best.runs[0].head is not None:
        said.append(
            f"The fastest on these prompts, {best.method}, stops by a head. Whether the head pays"
            " is judged on other prompts, too, and can come out otherwise."
        )
    return said


def _within(ratio: Interval) -> str:
    return f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
