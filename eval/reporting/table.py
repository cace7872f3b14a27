"""The table and picture of a finished evaluation for a README.

python -m eval.reporting.table RESULTS [--method NAME ...] [--out FOLDER] [--format vllm]
draftsmith table RESULTS [--method NAME ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.measuring.methods import PLAIN
from eval.measuring.pooled import PooledRow, merit, pool
from eval.measuring.results import Results, check_metrics, read_results
from eval.reporting.rendering import NOT_MEASURED, escape_markdown
from eval.reporting.vllm_metrics import vllm_metrics
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.storage.files import write_text
from specdata.terminal import tell

ROWS = 14
"""Most methods of a table that nobody chose."""
RESULTS, PICTURE = "results.json", "speedup.png"


def readme_table(results: Results, methods: Sequence[str] = ()) -> str:
    """A Markdown table: a method a row, its speed-up on each prompt set and its counts over all.

    Args:
        results: of one evaluation.
        methods: which, in this order; by default of each kind of method the one setting that is
            fastest over all prompt sets, plain decoding first, at most ROWS.

    Raises:
        ConfigError: if a method is not in the results.
    """
    sets, pooled = results.datasets(), {row.method: row for row in pool(results)}
    lines = [
        _line("method", *(escape_markdown(name) for name in sets), *COUNTS),
        _line("---", *["---:"] * (len(sets) + len(COUNTS))),
    ]
    for name in chosen(results, methods):
        runs = {run.dataset: run for run in results.runs if run.method == name}
        mark = "" if all(run.lossless for run in runs.values()) else " †"
        cells = [escape_markdown(name) + mark]
        for each in sets:
            cell = NOT_MEASURED
            if each in runs and (speed := runs[each].speedup) is not None:
                low, high = runs[each].intervals["speedup"]
                cell = f"{speed:.2f}x [{low:.2f}, {high:.2f}]"
            cells.append(cell)
        for rate, decimals in COUNTS.values():
            value = pooled[name].value(rate) if name in pooled else None
            cells.append(NOT_MEASURED if value is None else f"{value:.{decimals}f}")
        lines.append(_line(*cells))
    return "\n".join([*lines, "", _footnote(results, by_hand=bool(methods))]) + "\n"


COUNTS = {
    "tokens a target call": ("block_efficiency", 2),
    "acceptance": ("acceptance_rate", 3),
    "discard": ("discard_rate", 2),
}
"""Heading -> a rate over all prompt sets, and its decimals."""


def chosen(results: Results, methods: Sequence[str] = ()) -> list[str]:
    """The names of the rows of `readme_table`."""
    known = list(dict.fromkeys(run.method for run in results.runs))
    for name in methods:
        if name not in known:
            raise ConfigError(f"no method {name!r} was measured: {nearest(name, known)}")
    if methods:
        return list(methods)
    kinds: dict[tuple[str | None, ...], list[PooledRow]] = {}
    for row in pool(results):
        run = row.runs[0]
        if run.method != PLAIN:
            kinds.setdefault((run.drafter, run.verifier, run.stop), []).append(row)
    best = sorted((max(rows, key=merit) for rows in kinds.values()), key=merit, reverse=True)
    plain = [PLAIN] if PLAIN in known else []
    return plain + [row.method for row in best][: ROWS - len(plain)]


def _footnote(results: Results, *, by_hand: bool) -> str:
    where, first = results.environment, results.runs[0]
    prompts = ", ".join(f"{each} {results.of(each)[0].prompts}" for each in results.datasets())
    settings = ", ".join(f"{name} {value}" for name, value in first.sampling.items())
    hardware = where.hardware
    machine = hardware.get("gpu") or f"{hardware.get('cores')} cores of {hardware.get('cpu')}"
    threads = f", {hardware['threads']} of torch's threads" if hardware.get("threads") else ""
    commit = f", commit {where.git_commit[:7]}" if where.git_commit else ""
    text = (
        f"Speed-up over the target alone, same prompts, interleaved; brackets hold 95 % bootstrap"
        f" intervals over prompts. Counts are over all prompt sets. Prompts: {prompts}; {settings}."
        f" {machine}{threads}, {where.dtype}{commit}."
    )
    if not by_hand:
        text += " Of each kind of method the setting that was fastest on these prompts."
    if any(not run.lossless for run in results.runs):
        text += " † changes the target's distribution."
    return escape_markdown(text)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def write_evidence(results: Results, out: Path, methods: Sequence[str]) -> None:
    """The files of an evaluation to commit: results, counts in columns, and the table's picture.

    Args:
        results: of one evaluation.
        out: folder, created if missing.
        methods: those of the picture.
    """
    from eval.reporting.charts import plot, write_png  # imports matplotlib

    values = results.model_dump(mode="json")
    for run in values["runs"]:
        rows = run["generations"]
        run["generations"] = {name: [row[name] for row in rows] for name in rows[0]}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_text(out / RESULTS, text + "\n")
    shown = [run for run in results.runs if run.method in methods]
    picture = plot("speedup", results.model_copy(update={"runs": shown}), results.datasets())
    write_png(out / PICTURE, picture)


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Print the table; returns the exit status, 2 for unusable input."""
    parser = argparse.ArgumentParser(
        program or "python -m eval.reporting.table",
        description="Print a finished evaluation as a Markdown table, for a README.",
    )
    parser.add_argument("results", type=Path, help="results.json, or the folder that holds it")
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
    asked = parser.parse_args(arguments)
    try:
        path = asked.results / RESULTS if asked.results.is_dir() else asked.results
        results = read_results(path)
        check_metrics(results, path)
        methods = chosen(results, asked.method)
        table = readme_table(results, asked.method)
        if asked.out is not None:
            if not results.timed:
                raise ConfigError(f"{path} holds no speeds to draw: measure with eval.batch 1")
            if asked.out.resolve() == path.parent.resolve():
                raise ConfigError(f"--out must be another folder than that of {path}")
            write_evidence(results, asked.out, methods)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    if asked.format == "vllm":
        runs = [run for run in results.runs if run.method in asked.method or not asked.method]
        drafting = [vllm_metrics(run) for run in runs if run.n_draft]
        table = json.dumps({"format": "vLLM 0.32.0", "runs": drafting}, indent=1) + "\n"
    sys.stdout.write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
