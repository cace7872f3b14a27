"""What an evaluation found: one verdict, the same in the log, on the page, on cards, by `publish`.

Over all that was measured it says what is fastest, whether the head (or else the draft) pays, and
where nothing is faster than the target alone what to try next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.measuring.busy import busy
from eval.measuring.intervals import LEAST_COVERAGE, Interval, coverage, prompts_needed
from eval.measuring.pooled import PooledRow, fastest, merit, pool
from eval.measuring.results import Results

FEW_PROMPTS = 24
"""Sets with fewer prompts than this carry a warning."""
MOST_NAMED = 3
"""Methods that are named of those that cannot be told apart."""
MOST_LENGTHS = 5
"""Lengths whose cost of verification is given, from the shortest."""
MOST_TOKENS = 64
"""Drafted tokens beyond which no length is suggested."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first lines wherever results are shown.

    But for names of methods the words hold nothing that Markdown or HTML would write otherwise.
    """

    sentence: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"Warning: {each}" for each in self.warnings)])


def verdict(results: Results) -> Verdict:
    """What is fastest, whether it pays, and why not to trust it too far."""
    counts = {name: results.of(name)[0].prompts for name in results.datasets()}
    warnings = []
    if found := busy(results) if results.timed else "":
        warnings.append(f"{found.capitalize()}: measure again while nothing else runs.")
    few = [f"{name} {count}" for name, count in counts.items() if count < FEW_PROMPTS]
    if few and coverage((*counts.values(),)) >= LEAST_COVERAGE:
        warnings.append(f"Few prompts ({', '.join(few)}): intervals over so few are rough.")
    return Verdict(_sentence(results, counts), tuple(warnings))


def best_of(rows: Sequence[PooledRow]) -> PooledRow | None:
    """The lossless drafting method of most tokens a second, or a forward where none is timed."""
    drafting = [row for row in rows if row.method.lossless and row.method.speculates]
    return max(drafting, key=merit, default=None)


def fixed_lengths(rows: Sequence[PooledRow]) -> list[PooledRow]:
    """Each lossless chain of a fixed length that was measured on every prompt set."""
    return [
        row
        for row in rows
        if row.method.lossless and row.method.fixed_length and not row.method.branches
    ]


def _sentence(results: Results, counts: Mapping[str, int]) -> str:
    rows = pool(results)
    best, plain = best_of(rows), next((row for row in rows if row.method.decoder == "plain"), None)
    if best is None:
        beside = " beside served engines" * any(row.method.decoder == "server" for row in rows)
        alone = "Only the target alone" if plain else "No lossless method of ours"
        return f"{alone} was measured{beside}."
    who = f"{best.name}{' (of transformers)' * (best.method.decoder == 'assisted')}"
    if (found := fastest(rows)) is None:
        batch = results.environment.batch_size
        together = f" ({batch} prompts were decoded together)" if batch > 1 else ""
        tokens = Interval.of(best.rates["block_efficiency"])
        return (
            f"Speeds were not measured{together}: counts alone, which say nothing of the cost of a"
            f" draft. Most tokens a forward of the target: {who},"
            f" {tokens.value:.2f}{_within(tokens)}."
        )
    if (share := coverage((*counts.values(),))) < LEAST_COVERAGE:
        named = ", ".join(f"{name} {count}" for name, count in counts.items())
        needed, sets = prompts_needed(len(counts)), " of each set" * (len(counts) > 1)
        return (
            f"No verdict, for too few prompts ({named}): a 95 % interval over so few would hold"
            f" the truth {100 * share:.0f} % of the time. Measure {needed} or more{sets}"
            " (eval.sets)."
        )
    if plain is None:
        return (
            f"{who} is fastest, {best.speed():.1f} tokens/s; the target alone was not measured, so"
            " there is no speed-up."
        )
    ratio = best.over(plain, "tokens_per_second")
    times = f"{ratio.value:.2f} times"
    if ratio.low <= 1.0:
        shown = "is faster" if ratio.high < 1.0 else "is shown to be faster"
        return (
            f"Nothing {shown} than the target alone: the best method, {who}, ran at {times} its"
            f" speed{_within(ratio)}. {_advice(results, rows, plain)}"
        )
    text = f"{who} is fastest: {times} the speed of the target alone{_within(ratio)}."
    if others := [row.name for row in found[1] if row.method.speculates]:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        text += f" Not told apart from it: {', '.join(others[:MOST_NAMED])}{more}."
    return f"{text} {_pays(rows)}"


def _pays(rows: Sequence[PooledRow]) -> str:
    """Whether the head pays, or the draft where no method asks a head.

    It pays if it is surely faster than the target alone and than every measured method that does
    without it, and does not if it is surely slower than one; "surely" is a 95 % interval that does
    not hold 1. The best of several measurements is favoured by their noise, and there are more
    rivals than heads: "does not pay" is said a little too readily.
    """
    rows = [row for row in rows if row.method.lossless and row.method.decoder != "server"]
    drafts = [row for row in rows if row.method.uses_draft]
    heads = [row for row in drafts if row.runs[0].head is not None]
    what, without = ("the head", "asks none") if heads else ("the draft", "needs none")
    if not drafts:
        return "It needs no draft."
    asker, names = max(heads or drafts, key=merit), {row.name for row in heads or drafts}
    # The rival that decides: one that is surely faster, else not told apart, else the closest.
    over, rival = min(
        ((asker.over(row, "tokens_per_second"), row) for row in rows if row.name not in names),
        key=lambda each: (each[0].high >= 1, each[0].low > 1, each[0].value),
    )
    missing = lengths_to_measure(rows)
    pays = f"It is not shown that {what} pays"
    if over.high < 1:
        pays = f"{what} does not pay".capitalize()
    elif missing:
        pays = f"Whether {what} pays is not known"
    elif over.low > 1:
        pays = f"{what} pays".capitalize()
    given = not heads and rival.method.decoder == "plain"  # as the best method's speed
    text = f"{pays}."
    if not given:
        text = (
            f"{pays}: {asker.name} is {over.value:.2f} times as fast as {rival.name}, which"
            f" {without}{_within(over)}."
        )
    if missing:
        best = max(fixed_lengths(rows), key=merit, default=None)
        lacks = "No fixed length was measured"
        if best is not None:
            lacks = f"The best fixed length, K = {best.method.deepest}, lacks a measured neighbour"
        text += (
            f" {lacks}: to find the best, add {missing} to eval.methods and measure into another"
            " eval.folder."
        )
    return text


def lengths_to_measure(rows: Sequence[PooledRow]) -> str:
    """Fixed lengths without which the best is not known, as entries of eval.methods.

    The best one needs a shorter measured neighbour, unless it is 1, and a longer one, unless the
    draft can propose no more. All that halve it are named, so that one more evaluation may do.
    """
    fixed = fixed_lengths(rows)
    best = max(fixed, key=merit, default=None)
    most = min(row.runs[0].longest_draft or MOST_TOKENS for row in rows)
    if best is None:
        return ", ".join(f"{{name: K={k}, length: {k}}}" for k in (1, 2, 3, 5) if k <= most)
    method, longest = best.method, best.method.deepest
    measured = {row.method.deepest for row in fixed if row.method.decoder == method.decoder}
    wanted = []
    if min(measured) == longest:
        wanted += [longest >> by for by in range(longest.bit_length() - 1, 0, -1)]
    if max(measured) == longest < most:
        wanted.append(min(most, longest + max(1, longest // 2)))
    name = f"{method.verifier} " * (method.verifier != "token")
    how = f"verifier: {method.verifier}, " if name else ""
    if method.decoder == "assisted":
        name, how = "transformers ", "decoder: assisted, "
    return ", ".join(f"{{name: {name}K={k}, {how}length: {k}}}" for k in wanted)


def _advice(results: Results, rows: Sequence[PooledRow], plain: PooledRow) -> str:
    """What to try where nothing is faster than the target alone, from the run's own figures."""

    def each(row: PooledRow, part: str, count: str) -> float:
        """Seconds of a part of decoding for one of what is counted."""
        counted: int = sum(getattr(run, count) for run in row.runs)
        return sum(run.seconds[part] for run in row.runs) / max(1, counted)

    def verifying(row: PooledRow) -> float:
        """Seconds of a forward of the target, but for those that read a prompt."""
        records = [each for run in row.runs for each in run.generations]
        seconds = sum(each.target_seconds - each.prompt_seconds for each in records)
        return seconds / max(1, sum(each.rounds - (each.prompt_seconds > 0) for each in records))

    lengths = [row for row in fixed_lengths(rows) if all(run.n_draft for run in row.runs)]
    lengths = [row for row in lengths if row.method.decoder == "speculative"]
    lengths.sort(key=lambda row: row.method.deepest)
    said, tries = "", []
    if missing := lengths_to_measure(rows):
        tries.append(f"other numbers of drafted tokens (add {missing} to eval.methods)")
    if lengths and (alone := verifying(plain)):
        token = each(plain, "total", "tokens")
        best = max(lengths, key=merit)
        first = np.mean([run.acceptance_by_position[0] for run in best.runs])
        shown = {row.method.deepest + 1: row for row in lengths[:MOST_LENGTHS]}
        costs = [verifying(row) / alone for row in shown.values()]
        drafted = each(best, "draft", "n_draft") / token
        # Tokens a round over what it would cost if drafting took no time.
        free = max(
            token / (each(row, "total", "tokens") - each(row, "draft", "tokens")) for row in lengths
        )
        said = (
            f"Of {best.name} {100 * first:.0f} % of first drafted tokens were accepted, and a round"
            f" emitted {best.value('block_efficiency'):.2f}; a drafted token costs {drafted:.2f} of"
            f" a token of the target alone, and verifying {_listed([*shown])} tokens"
            f" {_listed([f'{cost:.2f}' for cost in costs])} times what one costs. "
        )
        learn = "more rollouts (rollouts.sets) or passes (draft.epochs)"
        if free <= 1:
            said += f"Even a draft that costs nothing would not pay ({free:.2f} times). "
            tries.insert(0, f"what raises acceptance: {learn}")
            if best.runs[0].sampling["temperature"]:
                tries.append("a lower temperature, if you can serve with one")
            slow = best.runs[0].engine == "eager" and results.environment.device == "cpu"
            engine = "eval.engine: captured, or " * slow + "another engine (docs/engines.md)"
            tries.append(f"{engine}, where verifying several tokens costs less")
        else:
            said += f"A draft that costs nothing would run at {free:.2f} times. "
            cheaper = "fewer layers (draft.init.layers), a smaller vocabulary"
            tries.insert(0, f"a cheaper draft: {cheaper} (draft.init.vocabulary)")
            tries.append(learn)
    if not any(row.method.lookup for row in rows):
        tries.append("lookup, which needs no draft (decoder: assisted, lookup: 3)")
    return f"{said}Try {'; '.join(tries)}." if tries else said.strip()


def _listed(words: Sequence[object]) -> str:
    """Such as "2, 3 and 5"."""
    *others, last = map(str, words)
    return f"{', '.join(others)} and {last}" if others else last


def _within(ratio: Interval) -> str:
    return f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio.exists else ""
