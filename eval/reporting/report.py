"""From results.json to a table in the terminal, one HTML page, and PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.analysis.quality import Quality
from eval.analysis.tree_results import TreeSearch
from eval.measuring.metrics import latency_intervals
from eval.measuring.pooled import PooledRow, fastest_pooled, pool
from eval.measuring.results import Results, Run, fastest, fitted
from eval.measuring.samples import Samples
from eval.reporting.commands import Commands
from eval.reporting.drill_down import drill_down
from eval.reporting.findings import Decision, Finding, decide, findings
from eval.reporting.overall import FEW_PROMPTS, WIDE, is_wide, overall
from eval.reporting.quality import (
    BIN_COLUMNS,
    QUALITY_COLUMNS,
    basis,
    bin_table,
    quality_rows,
)
from eval.reporting.rendering import NOT_MEASURED, render
from eval.reporting.training import (
    TRAINING_COLUMNS,
    HeadTraining,
    training_rows,
    training_summary,
)
from eval.reporting.trees import (
    AGREEMENT_COLUMNS,
    CAPTION,
    TITLE,
    TREE_COLUMNS,
    agreement_rows,
    headline,
    tree_rows,
    widest,
)
from eval.reporting.trees import (
    basis as basis_of_trees,
)
from eval.reporting.trees import (
    described as described_trees,
)
from eval.reporting.verdict import HeadVerdict
from eval.reporting.what_if import panels, what_if_section
from specdata.history import History
from specdata.storage.files import write_text

if TYPE_CHECKING:
    from eval.reporting.plots import Legend

PAGE = "report.html"
ALL_SETS = "all prompt sets"
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
        head: measure of the acceptance head -> value.
        verdict: whether the head pays by the clock.
        quality: how good its probabilities are, and what it saves in replay.
        trainings: name of a training of the draft -> its history.
        objectives: name of a training of the draft -> what was minimised, a sentence.
        head_training: how the acceptance head was trained.
        commands: what makes this report again.
        trees: which draft tree would be best.
        no_trees: why that is not known, a sentence; empty if nothing is to be said.
        samples: the texts of a few prompts.
    """

    title: str = "Speculative decoding report"
    stages: Mapping[str, float] = field(default_factory=dict)
    draft: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    head: Mapping[str, float | None] = field(default_factory=dict)
    verdict: HeadVerdict | None = None
    quality: Quality | None = None
    trainings: Mapping[str, History] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)
    head_training: HeadTraining | None = None
    commands: Commands | None = None
    trees: TreeSearch | None = None
    no_trees: str = ""
    samples: Samples | None = None

    @property
    def findings(self) -> list[Finding]:
        """Whether the head pays, in words; none without a head."""
        return [] if self.verdict is None else findings(self.verdict, self.quality)

    @property
    def decision(self) -> Decision | None:
        """The same in one sentence, with the numbers that decide; None without a head."""
        return None if self.verdict is None else decide(self.verdict, self.quality)


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
    """Tables for `rich.print`, at most 100 columns wide; what is fastest, and if a head pays."""
    tables: list[Table | Text] = []
    pooled, sections = pooled_section(results), sections_of(results)
    for section in [pooled, *sections] if pooled else sections:
        table = Table(
            title=Text(section.dataset, style="bold"),
            caption=Text(f"{section.summary}\n{section.footnote}"),
            box=box.SIMPLE_HEAD,
            caption_justify="left",
            title_justify="left",
            pad_edge=False,
        )
        table.add_column("method", max_width=28, overflow="fold")
        for name, _ in COLUMNS:
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in section.rows:
            style = "bold green" if row.mark == "★" else ""
            # Text, not str: a name may hold what rich would take for markup.
            method = Text(" ".join(filter(None, (row.method, row.mark, row.note))), style=style)
            table.add_row(method, *(Text(cell, style=style) for cell in row.cells))
        tables.append(table)
    first = overall(results)
    tables.append(Text(first.finding, style="bold"))
    tables += [Text(f"  {words}") for words in (first.exactness, *first.cautions) if words]
    if context and context.decision:
        tables.append(Text(context.decision.sentence, style="bold"))
    for finding in context.findings if context else ():
        tables.append(Text(finding.headline, style="bold"))
        tables += [Text(f"  {name}: {words}") for name, words in finding.brief.items()]
    if context and context.trees:
        tables.append(Text(headline(context.trees), style="bold"))
    return Group(*tables)


def write_report(results: Results, folder: Path, context: Context | None = None) -> Path:
    """Write report.html and one PNG a plot into `folder`; return the path of the page.

    Args:
        results: what to show.
        folder: created if missing; older files of the same names are replaced.
        context: title and the figures of earlier stages.
    """
    from eval.reporting.plots import (  # imports matplotlib
        QUALITY_PLOTS,
        kinds,
        plot,
        plot_head_training,
        plot_quality,
        plot_training,
        plot_trees,
        plot_what_if,
        training_kinds,
        write_png,
    )

    context = context or Context()
    for kind in kinds(results):
        write_png(folder / f"{kind}.png", plot(kind, results, results.datasets()))
    if quality := context.quality:
        for kind in QUALITY_PLOTS:
            write_png(folder / f"{kind}.png", plot_quality(kind, quality, quality.domains()))
    for name, history in context.trainings.items():
        if drawn := training_kinds(history):
            write_png(folder / f"training-{name}.png", plot_training(history, drawn))
    if context.head_training is not None:
        write_png(folder / "training-head.png", plot_head_training(context.head_training))
    if trees := context.trees:
        write_png(folder / "trees.png", plot_trees(trees))
    if shown := panels(results):
        write_png(folder / "what-if.png", plot_what_if(shown))
    path = folder / PAGE
    write_text(path, render_page(results, context))
    return path


def render_page(results: Results, context: Context) -> str:
    """One self-contained HTML page: no script, no font, no image outside it."""
    from eval.reporting.plots import ADAPTIVE, PLOTS, kinds, plot_apart, to_svg  # matplotlib
    from eval.reporting.positions import position_tables

    plots = []
    for kind in kinds(results):
        what, drawings = PLOTS[kind], []
        figures, legend = plot_apart(kind, results)
        for index, dataset in enumerate(results.datasets()):
            svg = to_svg(
                figures[index],
                prefix=f"{kind}{index}",
                title=f"{what.title}, {dataset}",
                description=f"{what.caption} {_described(results, dataset, kind)}",
            )
            drawings.append(Markup(svg))  # safe: its words are drawn as paths or escaped
        drawn = _figure(kind, what.title, what.caption, drawings, legend)
        if kind in ADAPTIVE:
            drawn["positions"] = position_tables(results, adaptive=ADAPTIVE[kind])
        plots.append(drawn)
    return render(
        "report.html.jinja",
        context=context,
        overall=overall(results),
        pooled=pooled_section(results),
        sections=sections_of(results),
        drill_down=None if context.samples is None else drill_down(context.samples, results),
        columns=COLUMNS,
        plots=plots,
        environment=environment_rows(results),
        models=_models(results),
        quality=None if context.quality is None else _quality_section(context.quality),
        trainings=[
            _training_section(number, name, history, context.objectives.get(name, ""))
            for number, (name, history) in enumerate(context.trainings.items())
        ],
        head_training=None
        if context.head_training is None
        else _head_training_section(context.head_training),
        trees=None if context.trees is None else _tree_section(context.trees, results),
        what_if=what_if_section(results),
    )


def _figure(
    prefix: str, title: str, caption: str, drawings: list[Markup], legend: Legend
) -> dict[str, Any]:
    """Drawings that share their axes, with the one legend of all of them."""
    from eval.reporting.plots import legend_marks

    marks = [(words, Markup(svg)) for words, svg in legend_marks(legend, prefix)]  # safe as above
    return {"title": title, "caption": caption, "drawings": drawings, "legend": marks}


def _tree_section(search: TreeSearch, results: Results) -> dict[str, Any]:
    """The finding, tables and drawing of the search for the best tree."""
    from eval.reporting.plots import plot_trees, to_svg

    svg = to_svg(
        plot_trees(search),
        prefix="trees",
        title=TITLE,
        description=f"{CAPTION} {described_trees(search)}",
    )
    return {
        "headline": headline(search),
        "widest": widest(search),
        "rows": tree_rows(search),
        "columns": TREE_COLUMNS,
        "agreement": agreement_rows(search, results),
        "agreement_columns": AGREEMENT_COLUMNS,
        "title": TITLE,
        "caption": CAPTION,
        "drawing": Markup(svg),  # safe as above
        "footnote": basis_of_trees(search),
    }


def _quality_section(quality: Quality) -> dict[str, Any]:
    """Tables and drawings of how well acceptance is predicted."""
    from eval.reporting.plots import QUALITY_PLOTS, plot_quality_apart, to_svg
    from eval.reporting.quality_charts import described

    plots = []
    for kind, what in QUALITY_PLOTS.items():
        figures, legend = plot_quality_apart(kind, quality)
        drawings = [
            Markup(  # safe as above
                to_svg(
                    figures[index],
                    prefix=f"{kind}{index}",
                    title=f"{what.title}, {domain}",
                    description=f"{what.caption} {described(quality, domain, kind)}",
                )
            )
            for index, domain in enumerate(quality.domains())
        ]
        plots.append(_figure(kind, what.title, what.caption, drawings, legend))
    return {
        "bins": bin_table(quality),
        "bin_columns": BIN_COLUMNS,
        "tables": {domain: quality_rows(quality, domain) for domain in quality.domains()},
        "columns": QUALITY_COLUMNS,
        "plots": plots,
        "footnote": basis(quality),
    }


def _training_section(number: int, name: str, history: History, objective: str) -> dict[str, Any]:
    """Table and drawings of how the draft was trained."""
    from eval.reporting.plots import plot_training_apart, to_svg, training_kinds
    from eval.reporting.training_charts import described_training

    prefix = f"training{number}"
    figures, legend = plot_training_apart(history)
    drawings = [
        Markup(  # safe as above
            to_svg(
                figures[index],
                prefix=f"{prefix}-{index}",
                title=f"{name}, {kind}",
                description=described_training(history, kind),
            )
        )
        for index, kind in enumerate(training_kinds(history))
    ]
    return {
        "name": name,
        "summary": training_summary(history),
        "objective": objective,
        "rows": training_rows(history),
        "columns": TRAINING_COLUMNS,
        "plot": _figure(prefix, name, "", drawings, legend),
    }


def _head_training_section(training: HeadTraining) -> dict[str, Any]:
    """Drawing of how the head was trained."""
    from eval.reporting.plots import plot_head_training, to_svg
    from eval.reporting.training_charts import described_head_loss

    svg = to_svg(
        plot_head_training(training),
        prefix="head-training",
        title="acceptance head, loss",
        description=described_head_loss(training),
    )
    return {"summary": training.summary, "drawing": Markup(svg)}  # safe as above


def _models(results: Results) -> list[tuple[str, str]]:
    """Role and names of the models, in the order they were run."""
    runs = results.runs
    roles = {
        "target": dict.fromkeys(run.target for run in runs),
        "draft": dict.fromkeys(run.draft for run in runs if run.draft is not None),
        "head": dict.fromkeys(run.head for run in runs if run.head is not None),
    }
    return [(role, ", ".join(names)) for role, names in roles.items() if names]


def _described(results: Results, dataset: str, kind: str) -> str:
    """The data of a drawing in words, for those who cannot see it."""
    from eval.reporting.plots import ADAPTIVE
    from eval.reporting.positions import is_adaptive, positions_of

    parts = []
    for run in results.of(dataset):
        if kind == "speedup" and run.speedup is not None:
            parts.append(f"{run.method} {run.speedup:.2f}x")
        elif kind == "pareto" and run.drafter in ("chain", "transformers"):
            parts.append(
                f"{run.method} discards {run.discard_rate:.2f}, verifies"
                f" {run.verification_rate:.2f}"
            )
        elif kind in ADAPTIVE and run.drafter and is_adaptive(run) == ADAPTIVE[kind]:
            found = positions_of(run)
            parts.append(f"{run.method} {' '.join(f'{each.accepted:.2f}' for each in found)}")
        elif kind == "efficiency":
            parts.append(f"{run.method} {run.block_efficiency:.2f}")
        elif kind == "cost":
            parts.append(f"{run.method} {1000 * run.seconds['total'] / run.tokens:.2f} ms")
    return "Values: " + "; ".join(parts) + "."


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
