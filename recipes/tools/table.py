"""Print a finished evaluation as a table for a README, and copy what to commit of it.

draftsmith table RESULTS ... [--method NAME ...] [--out FOLDER] [--format vllm]

Of several evaluations of the same settings it shows the median of each figure and the spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.measuring.results import Results, check_metrics, read_results, together
from eval.reporting.report import picture
from eval.reporting.table import readme_table, shown_methods
from eval.reporting.vllm_metrics import vllm_metrics
from recipes.layout import RESULTS
from specdata.errors import ConfigError
from specdata.storage.files import write_text

PICTURE = "speedup.png"


def write_evidence(results: Results, out: Path, methods: Sequence[str]) -> None:
    """The files of an evaluation to commit: results, counts in columns, and the table's picture.

    Args:
        results: of one evaluation.
        out: folder, created if missing.
        methods: those of the picture.
    """
    from eval.reporting.charts import write_bars  # imports matplotlib

    values = results.model_dump(mode="json")
    for run in values["runs"]:
        rows = run["generations"]
        run["generations"] = {name: [row[name] for row in rows] for name in rows[0]}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_text(out / RESULTS, text + "\n")
    bars = [
        replace(bar, group=dataset)
        for dataset in results.datasets()
        for bar in picture(results, methods, [dataset])[1]
    ]
    write_bars(out / PICTURE, bars, "speed-up over the target alone")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
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
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"also write what to commit there: {RESULTS} and {PICTURE}",
    )
    parser.add_argument(
        "--format",
        choices=("markdown", "vllm"),
        default="markdown",
        help="vllm: JSON with the acceptance of every method and request under vLLM's names",
    )


def main(given: argparse.Namespace) -> int:
    """Print the table; returns the exit status, 2 for unusable input."""
    paths = [each / RESULTS if each.is_dir() else each for each in given.results]
    evaluations = [read_results(path) for path in paths]
    for each, path in zip(evaluations, paths, strict=True):
        check_metrics(each, path)
    results = together(evaluations)
    methods = shown_methods(results, given.method)
    table = readme_table(results, given.method)
    if given.out is not None:
        if not results.timed:
            raise ConfigError(f"{paths[0]} holds no speeds to draw: measure with eval.batch 1")
        if given.out.resolve() in [path.parent.resolve() for path in paths]:
            raise ConfigError(f"--out must be another folder than that of {paths[0]}")
        write_evidence(results, given.out, methods)
    if given.format == "vllm":
        runs = [run for run in results.runs if run.name in given.method or not given.method]
        drafting = [vllm_metrics(run) for run in runs if run.n_draft]
        table = json.dumps({"format": "vLLM 0.32.0", "runs": drafting}, indent=1) + "\n"
    sys.stdout.write(table)
    return 0
