"""Print a finished evaluation as a table for a README, and copy what to commit of it.

python benchmarks/table.py RESULTS ... [--method NAME ...] [--brief] [--out FOLDER | --beside]

Of several evaluations of the same settings it shows the median of each figure and the spread, of
several of other settings (--beside) each in a column, by the name of its folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from eval.measuring.methods import PLAIN
from eval.measuring.pooled import medians
from eval.measuring.records import PromptRecord
from eval.measuring.results import Results, Setup, check_metrics, read_results
from eval.reporting.rendering import Bar, Table, escape_markdown, longest
from eval.reporting.report import picture
from eval.reporting.table import conditions, readme_table, shown_methods, speedup_cell
from recipes.config import RESULTS
from specdata.errors import ConfigError
from specdata.storage.files import atomic_write, read_object, write_json, write_text
from specdata.terminal import accept_any_text, tell

PICTURE, RECIPE = "speedup.png", "recipe.json"
STAGES = ("rollouts", "draft", "labels", "head")
INK, GRID = "#24292f", "#d0d7de"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
"""The look of figures, in matplotlib's terms."""
COLOURS = {"": "#56B4E9", "first": "#0072B2", "best": "#009E73", "biased": "#808080"}
"""The look of a bar -> its colour: Okabe and Ito's, which the colour-blind can tell apart, too."""


def together(evaluations: Sequence[Results]) -> Results:
    """Several evaluations of the same settings as one: the first, the others its `repeats`.

    Of dev, where each timed again what may be the best, it has the methods that all timed.
    """
    alone = [each for evaluation in evaluations for each in evaluation.repetitions()]
    common = set.intersection(*({(run.dataset, run.name) for run in each.runs} for each in alone))

    def kept(each: Results) -> Results:
        dev = each.chosen_on()
        runs = [r for r in each.runs if r.dataset not in dev or (r.dataset, r.name) in common]
        return each.model_copy(update={"runs": runs})

    first, *others = map(kept, alone)
    ours, _ = _shared_and_own(first)
    repeats = []
    for number, (theirs, own) in enumerate(map(_shared_and_own, others), start=2):
        if odd := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
            raise ConfigError(
                f"evaluation {number} must have the first one's settings and counts, and differs in"
                f" {odd[0]}: measure both with the same models, prompts and methods"
            )
        repeats.append(own)
    return first.model_copy(update={"repeats": repeats})


def _shared_and_own(results: Results) -> tuple[dict[str, Any], list[dict[str, list[Any]]]]:
    """What all evaluations of some settings share, by a name for it; and one's `repeats`."""
    same = results.environment.model_copy(update={"date": ""})
    shared: dict[str, list[Any]] = {"machine, packages or commit": [same]}
    own = []
    for run in results.runs:
        columns = {
            name: [getattr(each, name) for each in run.generations]
            for name in PromptRecord.__dataclass_fields__
        }
        kept = [name for name in columns if not name.endswith("seconds")]
        kept = ["prompt_id"] if run.method.stop.measured else kept
        settings = [getattr(run, name) for name in Setup.model_fields]
        shared[f"{run.dataset}, {run.name}"] = [*settings, *(columns.pop(name) for name in kept)]
        own.append(columns)
    return shared, own


def beside_table(evaluations: Mapping[str, Results], methods: Sequence[str] = ()) -> str:
    """Markdown with a column for each evaluation of the same prompts in other settings.

    A cell has the speed-up over all prompt sets, then the tokens per target call. Without methods
    it has all but plain decoding.
    """
    pooled = [{row.name: row for row in medians(each)} for each in evaluations.values()]
    rows = []
    for name in methods or dict.fromkeys(name for each in pooled for name in each if name != PLAIN):
        found = [each.get(name) for each in pooled]
        tokens = [f"; {row.value('block_efficiency'):.2f}" if row else "" for row in found]
        rows.append(
            (name, [speedup_cell(row) + more for row, more in zip(found, tokens, strict=True)])
        )
    note = (
        "Speed-up over the target alone, which decodes the same prompts in turns, over all prompt "
        "sets; brackets hold 95 % bootstrap intervals over prompts; then tokens per target call. "
        f"{conditions(*evaluations.values())}"
    )
    table = Table([(heading, "") for heading in evaluations], rows, note=note)
    return f"{table.markdown()}\n{escape_markdown(note)}\n"


def write_evidence(results: Results, out: Path, methods: Sequence[str]) -> None:
    """The files of an evaluation to commit: results, counts in columns, and the table's picture.

    Args:
        results: of one evaluation.
        out: folder, created if missing.
        methods: those of the picture.
    """
    values = results.model_dump(mode="json")
    for run in values["runs"]:
        rows = run["generations"]
        run["generations"] = {name: [row[name] for row in rows] for name in rows[0]}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_text(out / RESULTS, text + "\n")
    bars = [
        replace(bar, group=dataset)
        for dataset in results.datasets()
        for bar in picture(results, methods, [dataset])
    ]
    write_bars(out / PICTURE, bars, "speed-up over the target alone")


def draw_bars(bars: Sequence[Bar], meaning: str) -> Figure:
    """Bars from the top, a gap between groups, each with its whisker, mark and value.

    `meaning` is of their length, and of the mark.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    rows = [number + 0.7 * groups.index(bar.group) for number, bar in enumerate(bars)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.8 + 0.26 * rows[-1]), layout="constrained")
        axes = figure.add_subplot()
        for row, bar in zip(rows, bars, strict=True):
            hatch, edge = ("////", "white") if bar.look == "biased" else ("", "none")
            value, low, high = bar.value.value, bar.value.low, bar.value.high
            axes.barh(row, value, color=COLOURS[bar.look], height=0.8, hatch=hatch, edgecolor=edge)
            axes.plot([low, high], [row, row], color=INK, linewidth=1.1)
            if bar.mark is not None:
                axes.plot([bar.mark, bar.mark], [row - 0.45, row + 0.45], color=INK)
            end = (longest([bar]), row)
            axes.annotate(
                bar.text, end, (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        names = [f"{bar.group}: {bar.name}" if bar.group else bar.name for bar in bars]
        axes.set_yticks(rows, names, parse_math=False)
        axes.set_ylim(rows[-1] + 0.6, -0.6)
        axes.set_xlim(0.0, 1.15 * longest(bars))
        axes.set_xlabel(meaning)
        axes.grid(axis="y", visible=False)
    return figure


def write_bars(path: Path, bars: Sequence[Bar], meaning: str) -> None:
    """Draw bars and save them at 150 dots an inch on white, whole or not at all."""
    look: dict[str, Any] = {"dpi": 150, "facecolor": "white", "metadata": {"Software": None}}
    with atomic_write(path) as temporary:
        draw_bars(bars, meaning).savefig(temporary, format="png", **look)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status, 2 for unusable input."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        help="results.json, or the folder that holds it; again for more of the same settings",
    )
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="NAME",
        help="a row; again for more. By default the fastest setting of each kind of method",
    )
    parser.add_argument("--brief", action="store_true", help="all prompt sets together alone")
    made = parser.add_mutually_exclusive_group()
    made.add_argument("--beside", action="store_true", help="a column for each evaluation")
    made.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"also write what to commit there: {RESULTS}, {PICTURE}, and in {RECIPE} the settings "
        "that the run's rollouts, draft, labels and head were made with",
    )
    accept_any_text()
    try:
        sys.stdout.write(_shown(parser.parse_args(arguments)))
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    return 0


def _shown(given: argparse.Namespace) -> str:
    """Return what is printed; evidence is written on the way."""
    paths = [each / RESULTS if each.is_dir() else each for each in given.results]
    evaluations = [read_results(path) for path in paths]
    for each, path in zip(evaluations, paths, strict=True):
        check_metrics(each, path)
    if given.beside:
        names = [path.parent.name for path in paths]
        if len({*names}) < len(names):
            names = [str(path.parent) for path in paths]
        return beside_table(dict(zip(names, evaluations, strict=True)), given.method)
    results = together(evaluations)
    methods = shown_methods(results, given.method)
    if given.out is not None:
        if not results.timed:
            raise ConfigError(f"{paths[0]} holds no speeds to draw: measure with eval.batch 1")
        if given.out.resolve() in [path.parent.resolve() for path in paths]:
            raise ConfigError(f"--out must be another folder than that of {paths[0]}")
        write_evidence(results, given.out, methods)
        run = paths[0].resolve().parents[1]
        ran = {each: run / each / "run.json" for each in STAGES}
        if (measured := paths[0].with_name("run.json")).is_file():
            folder = (read_object(measured)["config"]["head"] or {}).get("folder")
            ran["head"] = run / (folder or "head") / "run.json"
        kept = {each: read_object(file)["config"] for each, file in ran.items() if file.is_file()}
        if kept:
            write_json(given.out / RECIPE, {each: config[each] for each, config in kept.items()})
    return readme_table(results, given.method, is_brief=given.brief)


if __name__ == "__main__":
    raise SystemExit(main())
