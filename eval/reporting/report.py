"""From results.json to a table in the terminal and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.analysis.head_verdict import QUALITY_COLUMNS, HeadVerdict
from eval.measuring.pooled import ALL_SETS, PooledRow, fastest, pool
from eval.measuring.results import Results
from eval.measuring.samples import Samples
from eval.reporting.lengths import measured_lengths
from eval.reporting.overall import FEW_PROMPTS, WIDE, finding, is_wide, overall
from eval.reporting.rendering import NOT_MEASURED, render
from eval.reporting.table import chosen
from eval.reporting.what_if import what_if
from specdata.storage.files import write_text

PAGE = "report.html"
POOLING = (
    "Every set counts alike: these are the rates of a text with equally many tokens of each, so no"
    " set counts more for having more prompts or longer answers."
)
RATES_SHOWN = {
    "speedup": 2,
    "tokens_per_second": 1,
    "block_efficiency": 2,
    "acceptance_rate": 3,
    "discard_rate": 3,
    "verification_rate": 3,
}
"""The rates in the columns, each with its decimals."""
UNTIMED = "not measured"
"""A speed in results without times."""
SHORT = 4
"""Columns of the table in a terminal."""

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
        title: heading of the page.
        stages: wall seconds of each stage of the pipeline.
        draft: measure of the draft -> its value before and after training.
        verdict: how well the head predicts, and whether it pays.
        command: the command line that measured this.
        samples: the texts of a few prompts.
    """

    title: str = "Speculative decoding report"
    stages: Mapping[str, float] = field(default_factory=dict)
    draft: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    verdict: HeadVerdict | None = None
    command: str = ""
    samples: Samples | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One method in the table of a section.

    Args:
        method: its name.
        figures: its metrics as text in the order of COLUMNS, each with its 95 % interval in
            brackets, and a "~" if that is wide; the interval is empty where there is none.
        mark: "★" for the fastest method, "≈" for one that cannot be told apart from it.
        note: "†" for a biased verifier, with its measured bias; else empty.
    """

    method: str
    figures: tuple[tuple[str, str], ...]
    mark: str
    note: str


@dataclass(frozen=True, slots=True)
class Section:
    """One dataset, or all together, as a report presents it.

    Args:
        dataset: its name.
        summary: the finding, a sentence.
        rows: its table.
        footnote: the conditions of the measurement, and what the marks mean.
    """

    dataset: str
    summary: str
    rows: tuple[ReportRow, ...]
    footnote: str


def sections_of(results: Results) -> list[Section]:
    """The words and numbers of a report: all sets together if there are several, then each."""
    sections, sets = [], results.datasets()
    if len(sets) > 1:
        rows = _rows(pool(results))
        prompts = sum(results.of(name)[0].prompts for name in sets)
        footnote = f"{prompts} prompts of {len(sets)} sets." + _marks(rows)
        sections.append(Section(ALL_SETS, POOLING, rows, footnote))
    for name in sets:
        pooled, run = pool(results, [name]), results.of(name)[0]
        rows = _rows(pooled)
        settings = ", ".join(f"{key} {value}" for key, value in run.sampling.items())
        footnote = f"{run.prompts} prompts, {settings}."
        if run.prompts < FEW_PROMPTS:
            footnote += f" Fewer than {FEW_PROMPTS} prompts: intervals are rough."
        footnote += _marks(rows)
        if (fit := results.latency.get(name)) is not None:
            footnote += (
                f" Fitted times: {1000 * fit.t_draft:.2f} ms a drafted token,"
                f" {1000 * fit.t_target:.2f} ms a target forward (R² = {fit.r_squared:.3f})."
            )
        summary = finding(pooled, batch=results.environment.batch_size)
        sections.append(Section(name, summary, rows, footnote))
    return sections


def _rows(pooled: Sequence[PooledRow]) -> tuple[ReportRow, ...]:
    best, ties = fastest(pooled) or (None, [])
    rows = []
    for row in pooled:
        mark = "★" if row is best else "≈" if any(row is tie for tie in ties) else ""
        note, bias = "" if row.lossless else "†", row.rate("total_variation")
        if note and bias is not None:
            note += f" TV {bias.value:.3f} [{bias.low:.3f}, {bias.high:.3f}]"
        figures = []
        for name, decimals in RATES_SHOWN.items():
            rate, is_speed = row.rate(name), name in ("speedup", "tokens_per_second")
            if rate is None:
                untimed = is_speed and row.rate("tokens_per_second") is None
                figures.append((UNTIMED if untimed else NOT_MEASURED, ""))
                continue
            unit = "x" if name == "speedup" else ""
            wide = "~" if name == "speedup" and is_wide(rate) else ""
            within = f"[{rate.low:.{decimals}f}, {rate.high:.{decimals}f}]{wide}"
            figures.append((f"{rate.value:.{decimals}f}{unit}", within))
        rows.append(ReportRow(row.method, tuple(figures), mark, note))
    return tuple(rows)


def _marks(rows: Sequence[ReportRow]) -> str:
    """The meaning of the marks in a table."""
    text = ""
    if any(row.mark for row in rows):
        text += " ★ fastest lossless method;"
        text += " ≈ not told apart from it by a paired 95 % interval."
    if any(row.note for row in rows):
        text += " † biased: changes the target's distribution, never counted as fastest."
    if any("TV" in row.note for row in rows):
        text += (
            " TV: total variation between the distribution of an emitted token and the target's,"
            " given the tokens before it, on average; brackets hold its 95 % bootstrap interval."
        )
    if any("~" in within for row in rows for _, within in row.figures):
        text += f" ~ interval wider than {100 * WIDE:.0f} % of the value."
    return text


def terminal(results: Results, context: Context | None = None) -> Group:
    """The answer and one table for `rich.print`, at most 80 columns wide.

    The table is over all prompt sets; of many methods it shows the best setting of each kind.
    """
    section = sections_of(results)[0]
    shown = chosen(results)
    rows = [row for row in section.rows if row.method in shown]
    table = Table(
        title=Text(section.dataset, style="bold"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("method", max_width=28, overflow="fold")
    for name, _ in COLUMNS[:SHORT]:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        style = "bold green" if row.mark == "★" else ""
        # Text, not str: a name may hold what rich would take for markup.
        method = Text(" ".join(filter(None, (row.method, row.mark, row.note))), style=style)
        # There is room for one interval.
        first, *others = row.figures[:SHORT]
        cells = [" ".join(first).rstrip(), *(value for value, _ in others)]
        table.add_row(method, *(Text(cell, style=style) for cell in cells))
    said = [overall(results).finding]
    if context and context.verdict:
        said.append(context.verdict.sentence)
    return Group(*(Text(words, style="bold") for words in said), table)


def write_report(results: Results, folder: Path, context: Context | None = None) -> Path:
    """Write report.html into `folder`; return its path.

    Args:
        results: what to show.
        folder: created if missing.
        context: title and the figures of earlier stages.
    """
    path = folder / PAGE
    write_text(path, render_page(results, context or Context()))
    return path


def render_page(results: Results, context: Context) -> str:
    """One self-contained HTML page: no script, no font, no image outside it."""
    from eval.reporting.charts import PLOTS, drawings, kinds  # imports matplotlib

    models = {
        role: dict.fromkeys(filter(None, (getattr(run, role) for run in results.runs)))
        for role in ("target", "draft", "head")
    }
    return render(
        "report.html.jinja",
        context=context,
        overall=overall(results),
        sections=sections_of(results),
        columns=COLUMNS,
        # Safe: the words of a drawing are drawn as paths or escaped.
        plots=[(PLOTS[kind], map(Markup, drawings(kind, results))) for kind in kinds(results)],
        lengths=[best for best in measured_lengths(results).values() if best],
        environment=environment_rows(results),
        models=[(role, ", ".join(names)) for role, names in models.items() if names],
        quality_columns=QUALITY_COLUMNS,
        what_if=what_if(results),
        texts=_texts(context.samples, results) if context.samples else [],
    )


def _texts(samples: Samples, results: Results) -> list[tuple[str, str, str, str]]:
    """Prompt set, prompt, method and text: what the best lossless method made of a few prompts."""
    texts = []
    for dataset in results.datasets():
        drafting = [run for run in results.of(dataset) if run.lossless and run.drafter is not None]
        drafting.sort(key=lambda r: (r.tokens_per_second or 0.0, r.block_efficiency), reverse=True)
        for sample in samples.of(dataset):
            made = [run.method for run in drafting if run.method in sample.methods]
            if made:
                text = sample.methods[made[0]]
                texts.append((dataset, sample.prompt, made[0], text))
    return texts


def environment_rows(results: Results) -> list[tuple[str, str]]:
    """Where it was measured, as name and value."""
    where = results.environment
    rows: list[tuple[str, object]]
    rows = [(name.replace("_", " "), value) for name, value in where.hardware.items()]
    rows += [("device", where.device), ("data type", where.dtype), ("batch", where.batch_size)]
    if len(where.devices) > 1:
        rows.append(("processes", f"{len(where.devices)} ({', '.join(where.devices)})"))
    ours = [run.parameters for run in results.runs if run.drafter != "transformers"]
    engines = dict.fromkeys(parameters.get("engine", "eager") for parameters in ours)
    rows.append(("engine", ", ".join(engines) or None))
    rows += list(where.software.items())
    commit = where.git_commit
    if commit is not None and where.git_dirty:
        commit += " with uncommitted changes"
    rows += [("commit", commit), ("date", where.date)]
    return [(name, str(value)) for name, value in rows if value is not None]
