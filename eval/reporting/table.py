"""The table of a finished evaluation, for its page, cards and a README (benchmarks/table.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eval.decode_config import Method
from eval.measuring.methods import PLAIN
from eval.measuring.pooled import ALL_SETS, PooledRow, medians, merit
from eval.measuring.results import Results
from eval.reporting.rendering import NOT_MEASURED, Table, escape_markdown
from eval.reporting.verdict import busy
from specdata.config import nearest
from specdata.errors import ConfigError

MOST_ROWS = 14
"""Most methods of a table that nobody chose."""


def results_table(
    results: Results, methods: Sequence[str] = (), *, is_brief: bool = False
) -> Table:
    """A method a row: its speed-up on each prompt set, and its counts over all.

    Of several evaluations (`together`) it shows the medians and their spread. Without methods it
    has of each kind of method the one setting that is fastest over all prompt sets, plain decoding
    first, at most ROWS. A brief one has the speed-up over all prompt sets, without its spread, and
    the tokens.
    """
    sets, pooled = results.datasets(), {row.name: row for row in medians(results)}
    of_set = {each: {row.name: row for row in medians(results, [each])} for each in sets}
    if results.repeats and len(sets) > 1:
        of_set[ALL_SETS] = pooled
    counts = COUNT_COLUMNS
    if is_brief:
        pooled = {name: replace(row, spread=None) for name, row in pooled.items()}
        of_set, counts = {ALL_SETS: pooled}, dict([*COUNT_COLUMNS.items()][:1])
    rows, shown = [], shown_methods(results, methods)
    for name in shown:
        found = [of_method.get(name) for of_method in of_set.values()]
        biased = any(row is not None and not row.method.lossless for row in found)
        cells = [speedup_cell(row) for row in found]
        for rate, decimals in counts.values():
            value = pooled[name].value(rate) if name in pooled else None
            cells.append(NOT_MEASURED if value is None else f"{value:.{decimals}f}")
        rows.append((name + " †" * biased, cells))
    columns = [(heading, "") for heading in (*of_set, *counts)]
    note = _footnote(results, shown, chosen=not methods, is_brief=is_brief)
    return Table(columns, rows, note=note)


def readme_table(results: Results, methods: Sequence[str] = (), *, is_brief: bool = False) -> str:
    """The same as Markdown, with its note."""
    table = results_table(results, methods, is_brief=is_brief)
    return f"{table.markdown()}\n{escape_markdown(table.note)}\n"


def speedup_cell(row: PooledRow | None) -> str:
    """The speed-up with its interval, and the spread of several evaluations."""
    if row is None or (speed := row.rate("speedup")) is None:
        return NOT_MEASURED
    spread = f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})" if row.spread else ""
    return speed.within(2, "x") + spread


COUNT_COLUMNS = {
    "tokens per target call": ("block_efficiency", 2),
    "acceptance": ("acceptance_rate", 3),
    "discard": ("discard_rate", 2),
}
"""Heading -> a rate over all prompt sets, and its decimals."""


def shown_methods(results: Results, methods: Sequence[str] = ()) -> list[str]:
    """The names of the rows of `results_table`."""
    measured = list(dict.fromkeys(run.name for run in results.runs))
    for name in methods:
        if name not in measured:
            raise ConfigError(f"no method {name!r} was measured: {nearest(name, measured)}")
    if methods:
        return list(methods)
    kinds: dict[tuple[str, ...], list[PooledRow]] = {}
    for row in medians(results):
        method = row.method
        if method.name != PLAIN:
            kind: tuple[str, ...]
            asks = "asks the head" * method.stop.reads_head + "lookup" * bool(method.lookup)
            asks += "own head" * method.mtp
            kind = (method.decoder, method.drafter, method.verifier, method.stop.name, asks)
            if method.decoder == "assisted":  # with a draft, or without: the rest are settings
                kind = ("assisted", "lookup" if method.lookup else "draft")
            kinds.setdefault(kind, []).append(row)
    best = sorted((max(rows, key=merit) for rows in kinds.values()), key=merit, reverse=True)
    plain = [PLAIN] if PLAIN in measured else []
    return plain + [row.name for row in best][: MOST_ROWS - len(plain)]


def described(method: Method) -> str:
    """What a method does, in a few words."""
    if method.decoder == "plain":
        return "the target alone"
    if method.decoder == "server":
        return "a served engine"
    if method.decoder == "generate":
        return "the target alone in transformers' own loop"
    tokens = f"{method.deepest} drafted token{'s' * (method.deepest > 1)} a round"
    if method.stop.adaptive:
        tokens = f"drafted tokens until {method.stop.until}"
        if method.stop.reads_head and not method.stop.needs_head:
            tokens += ", as the acceptance head expects"
    words = {
        "chain": tokens,
        "paths": f"{method.paths} drafts side by side, {tokens} each",
        "tree": "a drafted tree of one shape",
        "dynamic_tree": f"a tree of the draft's {method.nodes} likeliest continuations",
        "lookup": "tokens that followed where the text had the same before, no draft model",
    }[method.drafter]
    if method.decoder == "assisted":
        words = f"transformers' own loop, {words if method.uses_draft else 'prompt lookup'}"
    elif method.lookup and method.uses_draft:
        words += ", or what followed where the text had the same before"
    words += ", of the target's own head" * method.mtp
    return words if method.lossless else f"{words}; biased"


def conditions(results: Results, *others: Results) -> str:
    """The prompts, the sampler and the machine of an evaluation, or what several have alike."""
    where, samplings = results.environment, [each.runs[0].sampling for each in (results, *others)]
    prompts = ", ".join(f"{each} {results.of(each)[0].prompts}" for each in results.datasets())
    settings = ", ".join(
        f"{name} {value}"
        for name, value in samplings[0].items()
        if all(each[name] == value for each in samplings)
    )
    hardware = where.hardware
    machine = hardware.get("gpu") or f"{hardware.get('cores')} cores of {hardware.get('cpu')}"
    threads = f", {hardware['threads']} torch threads" if hardware.get("threads") else ""
    ours = "" if others else f"{threads}, {where.dtype}"  # several are of engines
    ours += f", {found}" if not others and (found := busy(results)) else ""
    commit = f", commit {where.git_commit[:7]}" if where.git_commit else ""
    commit += " with uncommitted changes" * bool(where.git_commit and where.git_dirty)
    return f"Prompts: {prompts}; {settings}. {machine}{ours}{commit}."


def _footnote(results: Results, shown: Sequence[str], *, chosen: bool, is_brief: bool) -> str:
    text = (
        "Speed-up over the target alone, which decodes the same prompts in turns; brackets hold"
        " 95 % bootstrap intervals over prompts. "
    )
    if not is_brief:
        if any("block_efficiency" not in run.intervals for run in results.judged):
            text += "Sets of too few prompts for one have none. "
        text += "Counts are over all prompt sets. "
    text += conditions(results)
    if results.repeats:
        text += (
            " Each speed-up, with its interval, is that of the median of"
            f" {1 + len(results.repeats)} runs in separate processes"
        )
        text += "." if is_brief else "; parentheses hold the lowest and the highest run."
    measured = {run.name: run.method for run in results.runs}
    if chosen and len(shown) < len(measured):
        on = f"on {', '.join(results.chosen_on())}" if results.chosen_on() else "on these prompts"
        text += f" Of each kind of method the setting that was fastest {on}."
    drafters = {measured[name].drafter for name in shown}
    if not is_brief and "chain" in drafters and any("tree" in each for each in drafters):
        text += (
            " A tree's acceptance counts each level once, so it does not compare with a chain's."
        )
    if any(not run.method.lossless for run in results.runs):
        text += " † changes the target's distribution."
    return text
