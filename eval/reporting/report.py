"""From results.json to a table in the terminal and one HTML page.

The page is the answer on one screen and then folded sections. A section is a `Fold`: a title, one
sentence, a table (columns with how to read them, rows), and perhaps `bars`, a picture that stands
above the fold (`eval/reporting/rendering.py`). To add one, write a function that returns a `Fold`,
and name it in `folds`; what the results do not know comes with `Context`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.analysis.head_verdict import HeadVerdict
from eval.measuring.intervals import Interval, resamples
from eval.measuring.metrics import divide, prompt_ids
from eval.measuring.pooled import ALL_SETS, fastest, medians, pool
from eval.measuring.results import Results, Run
from eval.measuring.samples import Samples
from eval.reporting import verifiers
from eval.reporting.recommendation import (
    WIDE,
    answer,
    best_of,
    head_predictors,
    head_rivals,
    is_wide,
)
from eval.reporting.rendering import NOT_MEASURED, Bar, Fold, public_name, render
from eval.reporting.table import shown_methods
from specdata.storage.files import write_text

PAGE = "report.html"
POOLING = "Every set counts alike: the rates of a text with equally many tokens of each."
RATES_SHOWN = {
    "speedup": 2,
    "tokens_per_second": 1,
    "block_efficiency": 2,
    "acceptance_rate": 3,
    "discard_rate": 3,
    "verification_rate": 3,
}
"""The rates in the columns, each with its decimals."""
MARKS = {
    "★": "fastest lossless method, green if it is faster than the target alone",
    "≈": "not told apart from it, by a paired 95 % interval",
    "†": "biased: changes the target's distribution, never counted as fastest",
    "TV": "total variation between the distribution of an emitted token and the target's, given"
    " the tokens before it, on average, with its 95 % bootstrap interval over prompts",
    "~": f"wide interval: wider than {100 * WIDE:.0f} % of the value",
}
"""The marks of tables, and what they mean."""
MIN_ROUNDS = 10
"""Positions drafted in fewer rounds than this are not shown."""
SHORT, FEW_ROWS = 4, 8
"""Columns of the table in a terminal, and most of its rows: a run's end has 25 lines."""

# Heading of a column, and how to read it.
COLUMNS = (
    (
        "speed-up",
        "Tokens per second over those of the target alone, same prompts, same run. Brackets, here"
        " and elsewhere, hold the 95 % bootstrap interval over prompts.",
    ),
    ("tokens/s", "Emitted tokens over the wall time of the whole call, prefill included."),
    (
        "block efficiency",
        "Emitted tokens per forward of the target, the bonus token included; the target alone has"
        " 1.",
    ),
    (
        "acceptance",
        "Accepted tokens over drafted depth: the share of drafted positions that ended in the"
        " text; a tree counts its depth, not its nodes.",
    ),
    ("discard", "Drafted tokens thrown away per emitted token (N discarded / N); lower is better."),
    (
        "verification",
        "Forwards of the target per emitted token (N target / N); lower is better.",
    ),
)


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a report beside the results, all optional.

    Args:
        verdict: how well the head predicts, and whether it pays.
        command: the command line that measured this.
        samples: the texts of a few prompts.
    """

    verdict: HeadVerdict | None = None
    command: str = ""
    samples: Samples | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One method over one prompt set, or over all.

    Args:
        method: its name.
        figures: its metrics as text in the order of COLUMNS, with their 95 % intervals in brackets,
            and a "~" where that is wide.
        mark: "★" for the fastest method, "≈" for one that cannot be told apart from it.
        note: "†" for a biased verifier, with its measured bias; else empty.
        wins: whether it is the fastest, and its speed-up's interval lies above 1.
    """

    method: str
    figures: tuple[str, ...]
    mark: str
    note: str
    wins: bool

    @property
    def title(self) -> str:
        """Name and marks."""
        return " ".join(filter(None, (self.method, self.mark, self.note)))


def rows_of(results: Results, datasets: Sequence[str] = ()) -> list[ReportRow]:
    """Every method over some prompt sets together, by default all."""
    pooled = pool(results, datasets)
    best, ties = fastest(pooled) or (None, [])
    rows = []
    for row in pooled:
        mark = "★" if row is best else "≈" if any(row is tie for tie in ties) else ""
        note, bias = "" if row.method.lossless else "†", row.rate("total_variation")
        if note and bias is not None:
            note += f" TV {bias.value:.3f} [{bias.low:.3f}, {bias.high:.3f}]"
        figures = []
        for name, decimals in RATES_SHOWN.items():
            if (rate := row.rate(name)) is None:
                figures.append(NOT_MEASURED)
                continue
            unit = "x" if name == "speedup" else ""
            wide = "~" if name == "speedup" and is_wide(rate) else ""
            within = f"[{rate.low:.{decimals}f}, {rate.high:.{decimals}f}]{wide}"
            figures.append(f"{rate.value:.{decimals}f}{unit} {within}")
        speedup = row.rate("speedup")
        gain = row is best and speedup is not None and speedup.low > 1
        rows.append(ReportRow(row.name, tuple(figures), mark, note, gain))
    return rows


def legend(text: str) -> str:
    """The meaning of the marks that a table shows."""
    return "; ".join(f"{mark} {words}" for mark, words in MARKS.items() if mark in text)


def terminal(results: Results, context: Context) -> Group:
    """The answer and one table for `rich.print`, at most 80 columns wide.

    The table is over all prompt sets: of many methods the best setting of each kind, the target
    alone and the fastest of them.
    """
    shown = shown_methods(results)[:FEW_ROWS]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(ALL_SETS, max_width=28, overflow="fold")
    for name, _ in COLUMNS[:SHORT]:
        table.add_column(
            name.replace("block efficiency", "tokens a call"), justify="right", no_wrap=True
        )
    marks = ""
    for row in rows_of(results):
        if row.method not in shown:
            continue
        style = "bold green" if row.wins else ""
        # There is room for one interval.
        first, *others = row.figures[:SHORT]
        cells = [first, *(each.partition(" [")[0] for each in others)]
        # Text, not str: a name may hold what rich would take for markup.
        name = f"{row.method} {row.mark or row.note[:1]}"
        table.add_row(*(Text(each, style=style) for each in (name, *cells)))
        marks += name + first
    first_lines = answer(results, context.verdict)
    sentences = filter(None, (first_lines.finding, first_lines.head))
    brief = re.sub("[,:][^;]*", "", legend(marks))
    return Group(*(Text(words, style="bold") for words in sentences), "", table, brief, "")


def write_report(results: Results, folder: Path, context: Context | None = None) -> Path:
    """Write report.html into `folder`; return its path.

    Args:
        results: what to show.
        folder: created if missing.
        context: what the results do not know.
    """
    path = folder / PAGE
    write_text(path, render_page(results, context or Context()))
    return path


def render_page(results: Results, context: Context) -> str:
    """One self-contained HTML page: no script, no font, no image outside it."""
    target = results.runs[0].target
    drafts = dict.fromkeys(public_name(run.draft) for run in results.runs if run.draft)
    return render(
        "report.html.jinja",
        title=" with ".join(filter(None, (public_name(target), ", ".join(drafts)))),
        context=context,
        answer=answer(results, context.verdict),
        picture=picture(results),
        folds=folds(results, context),
        texts=_texts(context.samples, results) if context.samples else [],
    )


def folds(results: Results, context: Context) -> list[Fold]:
    """The sections of the page, in its order."""
    sections = [verifiers.fold(results), _all_sets(results), _each_set(results)]
    sections += [head_rivals(context.verdict), head_predictors(context.verdict)]
    sections += [_positions(results), _scores(results), _where(results, context)]
    return [fold for fold in sections if fold]


PICTURE = {
    "speedup": ("x", "the speed of the target alone,"),
    "tokens_per_second": (" tokens/s", ""),
    "block_efficiency": (" tokens", "a forward of the target,"),
}
"""What the bars of the first screen show, the first that there is -> unit, and of what."""


def picture(
    results: Results, methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> tuple[str, list[Bar]]:
    """What the bars of the first screen are of, and the bars: methods that draft.

    Args:
        results: of one evaluation.
        methods: which; by default the best setting of each kind.
        datasets: prompt sets that they are over together; by default all.
    """
    rows = {row.name: row for row in medians(results, datasets)}
    shown = next(name for name in PICTURE if any(name in row.rates for row in rows.values()))
    best = best_of(list(rows.values()))
    unit, of_what = PICTURE[shown]
    bars = []
    for row in (rows[name] for name in shown_methods(results, methods) if name in rows):
        value = row.rate(shown)
        if row.method.decoder == "plain" or value is None:
            continue
        text = f"{value.value:.{RATES_SHOWN[shown]}f}{unit}"
        look = "" if row.method.lossless else "biased"
        if row is best:
            look = "best" if shown == "speedup" and value.low > 1 else "first"
        mark = None if shown == "tokens_per_second" else 1.0
        bars.append(Bar(row.name, value, text, mark, look))
    return of_what, bars


def _all_sets(results: Results) -> Fold:
    rows = rows_of(results)
    return Fold(
        f"Every method, {ALL_SETS}",
        POOLING if len(results.datasets()) > 1 else "Rates are ratios of sums over prompts.",
        COLUMNS,
        [(row.title, row.figures) for row in rows],
        note=legend(" ".join([each for row in rows for each in (row.title, *row.figures)])),
        wins=[row.title for row in rows if row.wins],
    )


def _each_set(results: Results) -> Fold | None:
    """Speed-up and block efficiency of every method on each prompt set."""
    sets = results.datasets()
    if len(sets) < 2:
        return None
    columns: list[tuple[str, str]] = []
    cells: dict[str, list[str]] = {}
    for name in sets:
        columns += [(f"{name}, speed-up", ""), (f"{name}, tokens a forward", "")]
        rows = rows_of(results, [name])
        for row in rows:
            speedup, _, tokens, *_ = row.figures
            mark = f"{row.mark} " if row.mark else ""
            cells.setdefault(row.method + (" †" if row.note else ""), []).extend(
                [mark + speedup, tokens]
            )
    return Fold(
        "Each prompt set",
        "Speed-up, and tokens per forward of the target.",
        columns,
        [(name, row) for name, row in cells.items() if len(row) == len(columns)],
        note=legend(" ".join(each for name, row in cells.items() for each in (name, *row))),
    )


def _positions(results: Results) -> Fold | None:
    """Acceptance by position of the longest run of each kind that drafts every position.

    An adaptive rule goes on where it expects acceptance: the tokens that it drafts far out are the
    easy ones, and its share lies higher for that alone. So adaptive rules are not shown.
    """
    longest: dict[tuple[object, ...], Run] = {}
    fixed = [run for run in results.runs if run.method.fixed_length]
    sets = results.datasets()
    for run in sorted(fixed, key=lambda run: (sets.index(run.dataset), run.method.deepest)):
        method = run.method
        kind = (run.draft, method.decoder, method.verifier, str(method.verifier_args))
        longest[run.dataset, *((method.name,) if method.branches else kind)] = run
    cells = {f"{run.dataset}, {run.name}": positions_of(run) for run in longest.values()}
    if not any(cells.values()):
        return None
    deepest = max(map(len, cells.values()))
    return Fold(
        "Acceptance by position",
        "The share accepted with all before it.",
        [(f"{place}", "") for place in range(1, deepest + 1)],
        [
            (name, [f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]" for x in shares])
            for name, shares in cells.items()
        ],
        note="Fixed lengths and trees, which draft every position in every round; the longest run"
        " of each kind. Of the rounds drafting this deep, at least"
        f" {MIN_ROUNDS}, the share that accepted the position and all before it, with its 95 %"
        " interval.",
    )


def positions_of(run: Run) -> list[Interval]:
    """Share of the rounds drafting each position that accepted it and all before it.

    Positions that fewer than MIN_ROUNDS rounds drafted are left out.
    """
    prompts = prompt_ids(run.generations)
    row = {name: index for index, name in enumerate(prompts)}
    drafted, accepted = np.zeros((2, len(prompts), len(run.acceptance_by_position)))
    for each in run.generations:
        depth = len(each.drafted_by_position)
        drafted[row[each.prompt_id], :depth] += each.drafted_by_position
        accepted[row[each.prompt_id], :depth] += each.accepted_by_position
    enough = int((drafted.sum(axis=0) >= MIN_ROUNDS).sum())  # deeper ones are drafted less often
    weights = resamples(len(prompts))
    shares = divide(weights @ accepted, weights @ drafted)
    return [Interval.of(shares[:, place]) for place in range(enough)]


def _scores(results: Results) -> Fold | None:
    """Each score of each method on each prompt set that has it."""
    names = list(dict.fromkeys(name for run in results.runs for name in run.scores))
    rows = []
    for run in results.runs:
        cells = [NOT_MEASURED] * len(names)
        for place, name in enumerate(names):
            if name in run.scores:
                low, high = run.intervals[name]
                cells[place] = f"{run.scores[name]:.3f} [{low:.3f}, {high:.3f}]"
        if run.scores:
            rows.append((f"{run.dataset}, {run.name}", cells))
    sentence = "What the texts are worth; a lossless method has the target's scores but for luck."
    columns = [(name.replace("_", " "), SCORES[name]) for name in names]
    return Fold("Scores of the texts", sentence, columns, rows) if rows else None


SCORES = {
    "rougeL": "ROUGE-L F-measure against the reference, mean over prompts that have one.",
    "bleu": "Sentence BLEU against the reference, as a share, mean over prompts.",
    "exact_match": "Share of prompts whose answer is the reference's.",
    "reward": "Mean reward of the reward model.",
    "win_rate": "Share of prompts whose text has a higher reward than plain sampling's; half for"
    " equal ones, so that .5 is no difference.",
}
"""Score -> how to read it."""


def _where(results: Results, context: Context) -> Fold:
    """Machine, models and command."""
    rows = environment_rows(results)
    for role in ("target", "draft", "head"):
        names = dict.fromkeys(filter(None, (getattr(run, role) for run in results.runs)))
        rows += [(role, name) for name in names]
    if context.command:
        rows.append(("command", context.command))
    sentence = "Machine, models, command. Every figure can be recomputed from results.json."
    return Fold(
        "What was measured, and where", sentence, rows=[(name, [value]) for name, value in rows]
    )


def _texts(samples: Samples, results: Results) -> list[tuple[str, str, str, str]]:
    """Prompt set, prompt, method and text: what the best lossless method made of a first prompt."""
    texts = []
    for dataset in results.datasets():
        drafting = [run for run in results.of(dataset) if run.method.lossless and run.draft]
        drafting.sort(key=lambda r: (r.tokens_per_second or 0.0, r.block_efficiency), reverse=True)
        for sample in samples.of(dataset)[:1]:
            shown = [run.name for run in drafting if run.name in sample.methods]
            if shown:
                text = sample.methods[shown[0]]
                texts.append((dataset, sample.prompt, shown[0], text))
    return texts


def environment_rows(results: Results) -> list[tuple[str, str]]:
    """Where it was measured, as name and value."""
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
