"""The verdict of an evaluation, the same in the log, on the page, on cards and by `publish`.

Over all that was measured it says what is fastest, whether the head (or else the draft) pays, and
where nothing is faster than the target alone what to try next. But for names of methods its words
hold nothing that Markdown or HTML would write otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.decode_config import Method
from eval.measuring.intervals import LEAST_COVERAGE, Interval, coverage, prompts_needed
from eval.measuring.lengths import fixed_lengths, lengths_to_measure
from eval.measuring.methods import SERVED
from eval.measuring.pooled import PooledRow, fastest, merit, pool
from eval.measuring.results import Results
from eval.reporting.rendering import public_name
from specdata.processes import IDLE

MOST_SPREAD = 0.3
"""Interquartile range over median of plain decoding's seconds a token, over the prompts of a set.
Evaluations on idle machines had .02 to .18; a busy one, unevenly, .6 and more."""
MOST_NAMED = 3
"""Methods that are named of those that cannot be told apart."""
MOST_LENGTHS = 5
"""Lengths whose cost of verification is given."""


def verdict(results: Results) -> str:
    """Say what is fastest and whether it pays; warn of a busy machine and drafts that end early."""
    text = _verdict(results)
    if results.timed and (found := busy(results)):
        text += f" This was {found}: measure again while nothing else runs."
    for row in pool(results):
        records = [record for run in row.runs for record in run.generations]
        if beyond := sum(record.beyond for record in records):
            text += (
                f" {row.name} drafted nothing in {beyond:,} of"
                f" {sum(record.rounds for record in records):,} rounds:"
                f" {public_name(str(row.runs[0].draft))} has no positions for texts that long."
            )
    return text


def busy(results: Results) -> str:
    """Signs that a machine was busy, in words with figures; empty where there are none.

    A thread that waits for a core, or sleeps at a barrier for a partner that waits, does not run:
    its CPU time falls behind the wall time. That of the process does not, for waiting threads spin.
    On two cores (a target of 2 layers, captured) the decoding thread ran for 99 to 100 % of its
    time alone, for 89 % beside a little other work, and for 75 % or less beside a busy loop.
    """
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


def best_of(rows: Sequence[PooledRow]) -> PooledRow | None:
    """The lossless drafting method of most tokens a second; untimed, of most per target call."""
    drafting = [row for row in rows if row.method.lossless and row.method.speculates]
    return max(drafting, key=merit, default=None)


def _verdict(results: Results) -> str:
    rows = pool(results)
    best, plain = best_of(rows), next((row for row in rows if row.method.decoder == "plain"), None)
    if best is None and any(row.method.decoder == "server" for row in rows):
        return f"Nothing drafted here; the speed-ups of served engines are over {SERVED!r}."
    if plain is None:
        return "The target alone was not measured, so there is no speed-up."
    if best is None:
        return "Only the target alone was measured here."
    who = f"{best.name}{' (of transformers)' * (best.method.decoder == 'assisted')}"
    if (found := fastest(rows)) is None:
        batch = results.environment.batch_size
        together = f" ({batch} prompts were decoded together)" * (batch > 1)
        tokens = Interval.of(best.rates["block_efficiency"])
        return (
            f"Speeds were not measured{together}: counts alone, which say nothing of the cost of a"
            f" draft. Most tokens per target call: {who},"
            f" {tokens.value:.2f}{_within(tokens)}."
        )
    counts = {name: results.of(name)[0].prompts for name in results.datasets()}
    if (share := coverage(tuple(counts.values()))) < LEAST_COVERAGE:
        named = ", ".join(f"{name} {count}" for name, count in counts.items())
        needed, each = prompts_needed(len(counts)), " of each set" * (len(counts) > 1)
        return (
            f"No verdict, for too few prompts ({named}): a 95 % interval over so few would hold"
            f" the truth {100 * share:.0f} % of the time. Measure {needed} or more{each}"
            " (eval.sets)."
        )
    ratio = best.over(plain, "tokens_per_second")
    times, within = f"{ratio.value:.2f} times", _within(ratio)
    if ratio.low <= 1:
        shown = "is faster" if ratio.high < 1 else "is shown to be faster"
        return (
            f"Nothing {shown} than the target alone: the best method, {who}, ran at {times} its"
            f" speed{within}.{_own_head(rows, plain)} {_advice(results, rows, plain)}"
        )
    where = " on dev, and has on test" if results.chosen_on() else ":"
    text = f"{who} is fastest{where} {times} the speed of the target alone{within}."
    if found[0].name != best.name:
        text = (
            f"On dev the target alone is fastest; of what drafts {who} is, and has on test {times}"
            f" its speed{within}."
        )
    elif others := [row.name for row in found[1] if row.method.speculates]:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        text += f" Not told apart from it: {', '.join(others[:MOST_NAMED])}{more}."
    return f"{text}{_own_head(rows, plain)} {_pays(results, rows)}"


def _own_head(rows: Sequence[PooledRow], plain: PooledRow) -> str:
    """What the head that the target brings along gives, and what the draft; empty without it."""
    drafting = [row for row in rows if row.method.lossless and row.method.uses_draft]
    shown = []
    for what, is_own in (("the target's own head", True), ("the draft", False)):
        if row := max((r for r in drafting if r.method.mtp == is_own), key=merit, default=None):
            ratio = row.over(plain, "tokens_per_second")
            shown.append(f"{what} gives {ratio.value:.2f}x{_within(ratio)} with {row.name}")
    text = "; ".join(shown)
    return f" {text[0].upper()}{text[1:]}." if any(r.method.mtp for r in drafting) else ""


def _pays(results: Results, rows: Sequence[PooledRow]) -> str:
    """Say whether the head pays, or the draft where no method asks a head.

    It pays if it is surely faster than the target alone and than every measured method that does
    without it, and does not if it is surely slower than one; "surely" is a 95 % interval that does
    not hold 1. The best of several measurements is favoured by their noise, and there are more
    rivals than heads: "does not pay" is said a little too readily. Where lengths are missing that
    may be faster, only that a head does not pay is said: they could but help its rivals.
    """
    rows = [row for row in rows if row.method.lossless and row.method.decoder != "server"]
    drafts = [row for row in rows if row.method.uses_draft and not row.method.mtp]
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
    missing = _entries(lengths_to_measure(results))
    pays = f"it is not shown that {what} pays"
    if over.high < 1 and (heads or not missing):
        pays = f"{what} does not pay"
    elif missing:
        pays = f"whether {what} pays is not known"
    elif over.low > 1:
        pays = f"{what} pays"
    text = pays.capitalize()
    if heads or rival.method.decoder != "plain":  # the draft over that one was given
        text += f": {asker.name} is {over.value:.2f} times as fast as {rival.name}, which {without}"
        text += _within(over)
    if missing:
        text += f"; to find the best, measure {missing} too"
    return f"{text}."


def _entries(methods: Sequence[Method]) -> str:
    """Fixed lengths as entries of eval.methods."""
    texts = []
    for each in methods:
        how = "decoder: assisted, " * (each.decoder == "assisted")
        if each.verifier != "token":
            how += f"verifier: {each.verifier}, "
        if each.verifier_args:
            given = ", ".join(f"{name}: {value}" for name, value in each.verifier_args.items())
            how += f"verifier_args: {{{given}}}, "
        texts.append(f"{{name: {each.name}, {how}length: {each.deepest}}}")
    return ", ".join(texts)


def _advice(results: Results, rows: Sequence[PooledRow], plain: PooledRow) -> str:
    """Suggest what to try where nothing is faster than the target alone, from the run's figures."""

    def cost(row: PooledRow, part: str, count: str) -> float:
        """Seconds of a part of decoding for one of what is counted."""
        counted: int = sum(getattr(run, count) for run in row.runs)
        return sum(run.seconds[part] for run in row.runs) / counted

    def verifying(row: PooledRow) -> float:
        """Seconds of a forward of the target, but for those that read a prompt."""
        records = [record for run in row.runs for record in run.generations]
        seconds = sum(record.target_seconds - record.prompt_seconds for record in records)
        return seconds / max(1, sum(r.rounds - (r.prompt_seconds > 0) for r in records))

    chains = [
        row
        for row in fixed_lengths(rows)
        if row.method.decoder == "speculative" and all(run.n_draft for run in row.runs)
    ]
    text, tries, more = "", [], _entries(lengths_to_measure(results))
    others = [f"other numbers of drafted tokens ({more} among eval.methods)"] if more else []
    if chains and (alone := verifying(plain)):
        token, best = cost(plain, "total", "tokens"), chains[0]
        first = np.mean([run.acceptance_by_position[0] for run in best.runs])
        shown = sorted(chains, key=lambda row: row.method.deepest)[:MOST_LENGTHS]
        costs = _listed([f"{verifying(row) / alone:.2f}" for row in shown])
        free = max(
            token / (cost(row, "total", "tokens") - cost(row, "draft", "tokens")) for row in chains
        )
        text = (
            f"With {best.name} {100 * first:.0f} % of first drafted tokens were accepted, a round"
            f" emitted {best.value('block_efficiency'):.2f}; a drafted token costs"
            f" {cost(best, 'draft', 'n_draft') / token:.2f} of a token of the target alone, and"
            f" verifying {_listed([row.method.deepest + 1 for row in shown])} tokens {costs} times"
            " what one costs. "
        )
        learn = "more rollouts (rollouts.sets) or passes (draft.epochs)"
        if free > 1:
            text += f"A draft that costs nothing would run at {free:.2f} times. "
            tries = ["a cheaper draft (fewer draft.init.layers, a smaller draft.init.vocabulary)"]
            others.append(learn)
        else:
            text += f"Even a draft that costs nothing would not pay ({free:.2f} times). "
            tries = [f"what raises acceptance: {learn}"]
            if best.runs[0].sampling["temperature"]:
                others.append("a lower temperature, if you can serve with one")
            slow = best.runs[0].engine == "eager" and results.environment.device == "cpu"
            engine = "eval.engine: captured, or " * slow + "another engine (docs/engines.md)"
            others.append(f"{engine}, where verifying several tokens costs less")
    tries += others
    if not any(row.method.lookup for row in rows):
        tries.append("lookup, which needs no draft (drafter: lookup, lookup: 8)")
    return f"{text}Try {'; '.join(tries)}." if tries else text.strip()


def _listed(words: Sequence[object]) -> str:
    """Words as a list, such as "2, 3 and 5"."""
    *others, last = map(str, words)
    return f"{', '.join(others)} and {last}" if others else last


def _within(ratio: Interval) -> str:
    return f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio.exists else ""
