"""The report of results.json: a table in the terminal and one HTML page.

The page is the verdict on one screen, a text a prompt set, and then folded sections (`Section`: a
title, one sentence and a `Table`). To add one, write a function that returns it, and name it in
`sections`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import rich.table
from rich import box
from rich.console import Group
from rich.text import Text

from eval.measuring.intervals import Interval, resamples
from eval.measuring.metrics import by_position, divide, prompt_ids
from eval.measuring.pooled import ALL_SETS, fastest, medians, pool
from eval.measuring.results import Results, Run
from eval.reporting import verifiers
from eval.reporting.rendering import NOT_MEASURED, Bar, Section, Table, public_name, render
from eval.reporting.table import conditions, results_table, shown_methods
from eval.reporting.texts import SampledText
from eval.reporting.verdict import best_of, verdict
from specdata.storage.files import write_text

PAGE = "report.html"
RATES_SHOWN = {
    "speedup": (
        "speed-up",
        "x",
        2,
        "Tokens per second over those of the target alone, same prompts, same run. Brackets, here"
        " and elsewhere, hold the 95 % bootstrap interval over prompts.",
    ),
    "tokens_per_second": (
        "tokens/s",
        "",
        1,
        "Emitted tokens over the wall time of the whole call, prefill included.",
    ),
    "block_efficiency": (
        "tokens per target call",
        "",
        2,
        "Emitted tokens per forward of the target, the bonus token included; the target alone has"
        " 1. Engines call it the mean acceptance length, papers block efficiency.",
    ),
    "acceptance_rate": (
        "acceptance",
        "",
        3,
        "Accepted tokens over drafted depth: the share of drafted positions that ended in the"
        " text; a tree counts its depth, not its nodes.",
    ),
    "discard_rate": (
        "discard",
        "",
        3,
        "Drafted tokens thrown away per emitted token (N discarded / N); lower is better.",
    ),
    "verification_rate": (
        "verification",
        "",
        3,
        "Forwards of the target per emitted token (N target / N); lower is better.",
    ),
}
"""Rate -> its column's heading, unit and decimals, and how to read it."""
MARKS = {
    "★": "fastest lossless method, green if it is faster than the target alone",
    "≈": "not told apart from it, by a paired 95 % interval",
    "†": "biased: changes the target's distribution, never counted as fastest",
}
"""The marks of tables, and what they mean."""
MIN_ROUNDS = 10
"""Positions drafted in fewer rounds than this are not shown."""
SHORT, FEW_ROWS = 4, 8
"""Columns of the table in a terminal, and most of its rows: a run's end has 25 lines."""


def methods_table(
    results: Results, datasets: Sequence[str] = (), methods: Sequence[str] = ()
) -> Table:
    """Methods over some prompt sets together, by default all over all, with their marks."""
    pooled = pool(results, datasets)
    best, ties = fastest(pooled) or (None, [])
    rows, wins = [], []
    for row in pooled:
        if methods and row.name not in methods:
            continue
        speedup = row.rate("speedup")
        mark = "★" if row is best else "≈" if any(row is tie for tie in ties) else ""
        mark *= speedup is None or speedup.exists
        name = f"{row.name} {mark if row.method.lossless else '†'}".strip()
        rates = [(row.rate(rate), *how) for rate, how in RATES_SHOWN.items()]
        cells = [
            x.within(decimals, unit) if x else NOT_MEASURED for x, _, unit, decimals, _ in rates
        ]
        rows.append((name, cells))
        if row is best and speedup and speedup.low > 1:
            wins.append(name)
    shown = " ".join(text for name, cells in rows for text in (name, *cells))
    note = "; ".join(f"{mark} {words}" for mark, words in MARKS.items() if mark in shown)
    columns = [(heading, meaning) for heading, _, _, meaning in RATES_SHOWN.values()]
    return Table(columns, rows, note=note, wins=wins)


def terminal(results: Results) -> Group:
    """The verdict and one table for `rich.print`, at most 80 columns wide.

    The table is over all prompt sets: of many methods the best setting of each kind, the target
    alone and the fastest of them.
    """
    table = methods_table(results, methods=shown_methods(results)[:FEW_ROWS])
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column(ALL_SETS, max_width=28, overflow="fold")
    for name, _ in table.columns[:SHORT]:
        shown.add_column(name.replace("per target", "per\ntarget"), justify="right", no_wrap=True)
    for name, (first, *others) in table.rows:
        # There is room for one interval.
        cells = (name, first, *(each.partition(" [")[0] for each in others[: SHORT - 1]))
        style = "bold green" if name in table.wins else ""
        # Text, not str: a name may hold what rich would take for markup.
        shown.add_row(*(Text(each, style=style) for each in cells))
    brief = re.sub("[,:][^;]*", "", table.note)
    return Group(Text(verdict(results), style="bold"), "", shown, brief)


def write_report(
    results: Results,
    folder: Path,
    command: str = "",
    unapplied: str = "",
    texts: Sequence[SampledText] = (),
) -> Path:
    """Write report.html into a folder, which is created if missing; return its path.

    `command` is what made the results; `unapplied` says in a sentence what the target's generation
    configuration asks for and no method applies.
    """
    path = folder / PAGE
    write_text(path, render_page(results, command, unapplied, texts))
    return path


def render_page(
    results: Results, command: str = "", unapplied: str = "", texts: Sequence[SampledText] = ()
) -> str:
    """One self-contained HTML page: no script, no font, no image outside it."""
    target = results.runs[0].target
    drafts = dict.fromkeys(public_name(run.draft) for run in results.runs if run.draft)
    return render(
        "report.html.jinja",
        title=" with ".join(filter(None, (public_name(target), ", ".join(drafts)))),
        verdict=verdict(results),
        basis=f"{exactness(results)} {basis(results)}",
        rows=picture(results),
        where=" on dev" if results.chosen_on() else "",
        texts=texts,
        sections=sections(results, command, unapplied),
    )


def sections(results: Results, command: str = "", unapplied: str = "") -> list[Section]:
    """The sections of the page, in its order."""
    several = len(results.datasets()) > 1
    pooling = "Every set counts alike: the rates of a text with equally many tokens of each."
    pooling = pooling if several else "Rates are ratios of sums over prompts."
    made = [verifiers.section(results)]
    made.append(Section(f"Every method, {ALL_SETS}", pooling, methods_table(results)))
    if several:
        each = results_table(results, list(dict.fromkeys(run.name for run in results.runs)))
        made.append(Section("Each prompt set", "Speed-up over the target alone.", each))
    made += [acceptance_by_position(results), _scores(results)]
    made.append(_where(results, command, unapplied))
    return [section for section in made if section]


def exactness(results: Results) -> str:
    """The sentence on exactness: of the best method, and of biased ones."""
    text, rows = "", pool(results)
    if (best := best_of(rows)) is not None:
        ours = best.method.decoder == "speculative"
        by = f"the verifier {best.method.verifier}" if ours else "transformers' own verification"
        text = f"{best.name} is exact: {by} is proved to leave the target's distribution as it is."
    for row in (row for row in rows if not row.method.lossless):
        bias = row.rate("total_variation")
        text += f" Not exact: {row.name} changes the target's distribution"
        text += f" (total variation {bias.within(3)} a token)." if bias is not None else "."
    return text.strip()


def basis(results: Results) -> str:
    """On what, with which models and sampler, where, and on which prompts methods were chosen."""
    alike = ", and each set counts alike" if len(results.datasets()) > 1 else ""
    chosen = "the prompts that it is judged on"
    if others := results.chosen_on():
        chosen = f"other prompts ({', '.join(f'{x} {results.of(x)[0].prompts}' for x in others)})"
    return (
        f"{conditions(results)} Every method decoded the same prompts{alike}. Intervals are 95 %,"
        f" paired by prompt; of {len({run.name for run in results.runs})} measured, the fastest is"
        f" chosen on {chosen}."
    )


PICTURE = {"speedup": "x", "tokens_per_second": " tokens/s", "block_efficiency": " tokens"}
"""The rates that bars of the first screen may show, the first that there is -> unit."""


def picture(
    results: Results, methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> list[Bar]:
    """The bars of the first screen: methods that draft.

    By default the best setting of each kind, over all prompt sets together.
    """
    rows = {row.name: row for row in medians(results, datasets)}
    shown = next(name for name in PICTURE if any(name in row.rates for row in rows.values()))
    best = best_of(list(rows.values()))
    bars = []
    for row in (rows[name] for name in shown_methods(results, methods) if name in rows):
        value = row.rate(shown)
        if row.method.decoder == "plain" or value is None:
            continue
        text = f"{value.value:.{RATES_SHOWN[shown][2]}f}{PICTURE[shown]}"
        look = "" if row.method.lossless else "biased"
        if row is best:
            look = "best" if shown == "speedup" and value.low > 1 else "first"
        mark = None if shown == "tokens_per_second" else 1.0
        bars.append(Bar(row.name, value, text, mark, look))
    return bars


def acceptance_by_position(results: Results) -> Section | None:
    """Acceptance by position of the longest run of each kind that drafts every position.

    An adaptive rule goes on where it expects acceptance: the tokens that it drafts far out are the
    easy ones, and its share lies higher for that alone. So adaptive rules are not shown.
    """
    longest: dict[tuple[object, ...], Run] = {}
    fixed = [run for run in results.judged if run.method.fixed_length]
    sets = results.datasets()
    for run in sorted(fixed, key=lambda run: (sets.index(run.dataset), run.method.deepest)):
        method = run.method
        kind = (run.draft, method.decoder, method.verifier, str(method.verifier_args))
        longest[run.dataset, *((method.name,) if method.branches else kind)] = run
    shares = {f"{run.dataset}, {run.name}": positions_of(run) for run in longest.values()}
    if not (deepest := max(map(len, shares.values()), default=0)):
        return None
    table = Table(
        [(f"{place}", "") for place in range(1, deepest + 1)],
        [
            (name, [x.within(3) for x in of_run] + [NOT_MEASURED] * (deepest - len(of_run)))
            for name, of_run in shares.items()
        ],
        first="prompt set and method",
        note="Fixed lengths and trees, which draft every position in every round; the longest run"
        " of each kind. Of the rounds drafting this deep, at least"
        f" {MIN_ROUNDS}, the share that accepted the position and all before it, with its 95 %"
        " interval.",
    )
    return Section("Acceptance by position", "The share accepted with all before it.", table)


def positions_of(run: Run) -> list[Interval]:
    """Share of the rounds drafting each position that accepted it and all before it.

    Positions that fewer than MIN_ROUNDS rounds drafted are left out.
    """
    prompts = prompt_ids(run.generations)
    drafted, accepted = by_position(run.generations, prompts)
    enough = int((drafted.sum(axis=0) >= MIN_ROUNDS).sum())  # deeper ones are drafted less often
    weights = resamples(len(prompts))
    shares = divide(weights @ accepted, weights @ drafted)
    return [Interval.of(shares[:, place]) for place in range(enough)]


def _scores(results: Results) -> Section | None:
    """The scores of each method on each prompt set that has them."""
    scored = [run for run in results.judged if run.scores]
    names = list(dict.fromkeys(name for run in scored for name in run.scores))
    rows = [
        (
            f"{run.dataset}, {run.name}",
            [
                Interval(run.scores[name], *run.intervals.get(name, ())).within(3)
                if name in run.scores
                else NOT_MEASURED
                for name in names
            ],
        )
        for run in scored
    ]
    sentence = "What the texts are worth; a lossless method has the target's scores but for luck."
    columns = [(name.replace("_", " "), SCORES[name]) for name in names]
    return Section("Scores of the texts", sentence, Table(columns, rows)) if rows else None


SCORES = {
    "rougeL": "ROUGE-L F-measure against the reference, mean over prompts that have one.",
    "bleu": "Sentence BLEU against the reference, as a share, mean over prompts.",
    "exact_match": "Share of prompts whose answer is the reference's.",
}
"""Score -> how to read it."""


def _where(results: Results, command: str, unapplied: str) -> Section:
    """Machine, models and command."""
    rows = environment_rows(results)
    for role in ("target", "draft", "head"):
        names = dict.fromkeys(filter(None, (getattr(run, role) for run in results.runs)))
        rows += [(role, name) for name in names]
    if unapplied:
        rows.append(("not applied", unapplied))
    if command:
        rows.append(("command", command))
    sentence = "Machine, models, command. Every figure can be recomputed from results.json."
    table = Table(rows=[(name, [value]) for name, value in rows])
    return Section("What was measured, and where", sentence, table)


def environment_rows(results: Results) -> list[tuple[str, str]]:
    """The environment as name and value."""
    where = results.environment
    machine = [f"{name.replace('_', ' ')} {x}" for name, x in where.hardware.items() if x]
    rows: list[tuple[str, str | None]] = [
        ("machine", ", ".join(machine)),
        ("decoded on", f"{where.device}, {where.dtype}, batches of {where.batch_size}"),
    ]
    if len(where.devices) > 1:
        rows.append(("processes", f"{len(where.devices)} ({', '.join(where.devices)})"))
    ours = [run for run in results.runs if run.method.decoder in ("plain", "speculative")]
    engines = dict.fromkeys(run.engine for run in ours)
    rows.append(("engine", ", ".join(engines) or None))
    rows.append(("software", ", ".join(f"{name} {v}" for name, v in where.software.items())))
    commit = where.git_commit
    if commit is not None and where.git_dirty:
        commit += " with uncommitted changes"
    rows += [("commit", commit), ("date", where.date)]
    return [(name, value) for name, value in rows if value is not None]
