"""From results.json to a table in the terminal, one HTML page, and PNG files."""

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
from eval.measuring.metrics import latency_intervals
from eval.measuring.pooled import ALL_SETS, PooledRow, fastest_pooled, pool
from eval.measuring.results import Results, Run, fastest, fitted
from eval.measuring.samples import Samples
from eval.reporting.lengths import measured_lengths
from eval.reporting.overall import FEW_PROMPTS, WIDE, is_wide, overall
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
"""What the columns show, each with its decimals."""
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
    """What a report shows beside the results, all optional.

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
class Figure:
    """One figure of a table, as text.

    Args:
        value: the figure.
        interval: its 95 % interval in brackets, with a "~" if it is wide; empty if it has none.
    """

    value: str
    interval: str = ""

    def __str__(self) -> str:
        """The figure and its interval."""
        return f"{self.value} {self.interval}".rstrip()


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One method in the table of a dataset.

    Args:
        method: its name.
        figures: its metrics, in the order of COLUMNS.
        mark: "★" for the fastest method, "≈" for one that cannot be told apart from it.
        note: "†" for a biased verifier, with its measured bias; else empty.
    """

    method: str
    figures: tuple[Figure, ...]
    mark: str
    note: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Its metrics as text where there is little room: the speed-up alone with its interval."""
        first, *others = self.figures
        return (str(first), *(figure.value for figure in others))


@dataclass(frozen=True, slots=True)
class DatasetSection:
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


def sections_of(results: Results) -> list[DatasetSection]:
    """The words and numbers of a report, one section a dataset."""
    return [_section(results, dataset) for dataset in results.datasets()]


def pooled_section(results: Results) -> DatasetSection | None:
    """All prompt sets together; None if there is but one."""
    if len(results.datasets()) < 2:
        return None
    pooled = pool(results)
    rows = _rows(pooled, fastest_pooled(pooled))
    prompts = sum(results.of(name)[0].prompts for name in results.datasets())
    footnote = f"{prompts} prompts of {len(results.datasets())} sets."
    return DatasetSection(ALL_SETS, POOLING, rows, footnote + _marks(rows))


def _section(results: Results, dataset: str) -> DatasetSection:
    runs = results.of(dataset)
    rows = _rows(runs, fastest(runs))
    settings = ", ".join(f"{name} {value}" for name, value in runs[0].sampling.items())
    footnote = f"{runs[0].prompts} prompts, {settings}."
    if runs[0].prompts < FEW_PROMPTS:
        footnote += f" Fewer than {FEW_PROMPTS} prompts: intervals are rough."
    footnote += _marks(rows)
    fit = results.latency.get(dataset)
    if fit is not None:
        draft, target = latency_intervals(fitted(results, dataset))
        footnote += (
            f" Fitted times: {_milliseconds(fit.t_draft, draft)} a drafted token,"
            f" {_milliseconds(fit.t_target, target)} a target forward (R² = {fit.r_squared:.3f})."
        )
    return DatasetSection(dataset, _summary(results, dataset), tuple(rows), footnote)


def _milliseconds(seconds: float, within: tuple[float, float]) -> str:
    low, high = (1000 * end for end in within)
    return f"{1000 * seconds:.2f} ms [{low:.2f}, {high:.2f}]"


def _rows(
    runs: Sequence[Run | PooledRow], winner: tuple[object, Sequence[object]] | None
) -> tuple[ReportRow, ...]:
    rows = []
    for run in runs:
        mark = ""
        if winner is not None:
            best, ties = winner
            mark = "★" if run is best else "≈" if any(run is tie for tie in ties) else ""
        rows.append(ReportRow(run.method, _figures(run), mark, _note(run)))
    return tuple(rows)


def _marks(rows: Sequence[ReportRow]) -> str:
    """What the marks in a table mean."""
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
    if any("~" in figure.interval for row in rows for figure in row.figures):
        text += f" ~ interval wider than {100 * WIDE:.0f} % of the value."
    return text


def _summary(results: Results, dataset: str) -> str:
    """The finding in one sentence."""
    if not results.timed:
        return _summary_of_counts(results, dataset)
    winner, plain = fastest(results.of(dataset)), results.plain(dataset)
    if winner is None:
        return "No lossless method was measured."
    best, ties = winner
    if best is plain:
        return "No method was faster than the target alone."
    text = f"Fastest lossless method: {best.method}, {best.tokens_per_second:.1f} tokens/s"
    if best.speedup is not None:
        low, high = best.intervals["speedup"]
        text += f", {best.speedup:.2f}x the target alone (95 % interval {low:.2f} to {high:.2f})"
        if low <= 1:
            text += ", which may be no gain at all"
    if ties:
        text += f"; {len(ties)} other method{'s are' if len(ties) > 1 else ' is'} as fast"
        text += " within the measurement"
    return text + "."


def _summary_of_counts(results: Results, dataset: str) -> str:
    """The finding where nothing was timed."""
    batch = results.environment.batch_size
    text = f"Speeds were not measured: {batch} prompts were decoded together."
    drafting = [run for run in results.of(dataset) if run.lossless and run.drafter is not None]
    if not drafting:
        return text
    best = max(drafting, key=lambda run: run.block_efficiency)
    low, high = best.intervals["block_efficiency"]
    return (
        f"{text} Most tokens a forward of the target among lossless methods: {best.method},"
        f" {best.block_efficiency:.2f} (95 % interval {low:.2f} to {high:.2f})."
    )


def _note(run: Run | PooledRow) -> str:
    """The mark of a biased verifier, with its measured bias."""
    if run.lossless:
        return ""
    value, within = run.rate("total_variation")
    if value is None:
        return "†"
    note = f"† TV {value:.3f}"
    if within is not None:
        note += f" [{within[0]:.3f}, {within[1]:.3f}]"
    return note


def _figures(run: Run | PooledRow) -> tuple[Figure, ...]:
    """Metrics as text, in the order of COLUMNS."""
    timed = run.rate("tokens_per_second")[0] is not None
    figures = []
    for name, decimals in RATES_SHOWN.items():
        value, within = run.rate(name)
        unit = "x" if name == "speedup" else ""
        if value is None:
            is_speed = name in ("speedup", "tokens_per_second")
            figures.append(Figure(UNTIMED if is_speed and not timed else NOT_MEASURED))
        elif within is None:
            figures.append(Figure(f"{value:.{decimals}f}{unit}"))
        else:
            low, high = within
            wide = "~" if name == "speedup" and is_wide(value, within) else ""
            text = f"[{low:.{decimals}f}, {high:.{decimals}f}]{wide}"
            figures.append(Figure(f"{value:.{decimals}f}{unit}", text))
    return tuple(figures)


def terminal(results: Results, context: Context | None = None) -> Group:
    """The answer and one table for `rich.print`, at most 80 columns wide.

    The table is over all prompt sets; of many methods it shows the best setting of each kind.
    """
    section = pooled_section(results) or sections_of(results)[0]
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
        table.add_row(method, *(Text(cell, style=style) for cell in row.cells[:SHORT]))
    said = [overall(results).finding]
    if context and context.verdict:
        said.append(context.verdict.sentence)
    return Group(*(Text(words, style="bold") for words in said), table)


def write_report(results: Results, folder: Path, context: Context | None = None) -> Path:
    """Write report.html and one PNG a plot into `folder`; return the path of the page.

    Args:
        results: what to show.
        folder: created if missing; older files of the same names are replaced.
        context: title and the figures of earlier stages.
    """
    from eval.reporting.charts import kinds, plot, write_png  # imports matplotlib

    for kind in kinds(results):
        write_png(folder / f"{kind}.png", plot(kind, results, results.datasets()))
    path = folder / PAGE
    write_text(path, render_page(results, context or Context()))
    return path


def render_page(results: Results, context: Context) -> str:
    """One self-contained HTML page: no script, no font, no image outside it."""
    from eval.reporting.charts import PLOTS, drawings, kinds  # imports matplotlib

    pooled = pooled_section(results)
    return render(
        "report.html.jinja",
        context=context,
        overall=overall(results),
        sections=[*([pooled] if pooled else []), *sections_of(results)],
        columns=COLUMNS,
        # Safe: the words of a drawing are drawn as paths or escaped.
        plots=[(PLOTS[kind], map(Markup, drawings(kind, results))) for kind in kinds(results)],
        lengths=[best for best in measured_lengths(results).values() if best],
        environment=environment_rows(results),
        models=_models(results),
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


def _models(results: Results) -> list[tuple[str, str]]:
    """Role and names of the models, in the order they were run."""
    runs = results.runs
    roles = {
        "target": dict.fromkeys(run.target for run in runs),
        "draft": dict.fromkeys(run.draft for run in runs if run.draft is not None),
        "head": dict.fromkeys(run.head for run in runs if run.head is not None),
    }
    return [(role, ", ".join(names)) for role, names in roles.items() if names]


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
