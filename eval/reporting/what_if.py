"""Which method would be fastest if the draft were cheaper or dearer: words and tables.

    python -m eval.reporting.what_if RESULTS [--machine FILE] [--ratio R]

The speed-up of every method over the target alone, predicted from the counts of one evaluation
(eval.analysis.what_if): at this machine's own times beside what the clock measured, at other ratios
t_draft/t_target, and with the forward times of other machines. FILE is JSON or YAML:

    name: some GPU
    target: {1: 0.021, 5: 0.022, 9: 0.024, 64: 0.030}   # tokens of a forward: seconds
    draft: {1: 0.0021, 64: 0.0025}
    overhead: 0.0004                                    # seconds of a round beside its forwards
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.analysis.what_if import (
    PAPERS_RATIO,
    Machine,
    Priced,
    WhatIf,
    on_machine,
    what_if,
)
from eval.measuring.intervals import Interval
from eval.measuring.results import read_results
from eval.reporting.rendering import NOT_MEASURED
from specdata.errors import ConfigError, ManifestError
from specdata.terminal import accept_any_text

CHEAP_RATIO = 0.05
"""A ratio that is shown beside the papers'."""
OUTSIDE = "≠"
"""Marks a prediction outside the clock's interval."""

# Heading of a column, and how to read it.
WHAT_IF_COLUMNS = (
    (
        "predicted here",
        "Speed-up over the target alone by the counts and the mean forward times of this run;"
        " brackets hold the paired 95 % bootstrap interval over prompts, forward times held."
        f" {OUTSIDE} marks a prediction outside the clock's interval.",
    ),
    ("by the clock", "The measured speed-up of the same prompts, with its own interval."),
    (
        f"at {CHEAP_RATIO:g}",
        f"Predicted for t_draft/t_target = {CHEAP_RATIO:g}, all else as measured.",
    ),
    (f"at {PAPERS_RATIO:g}", "The same at the ratio of the pair of most papers."),
    (
        "pays below",
        "The ratio t_draft/t_target below which the method is faster than the target alone.",
    ),
)


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """A method in the table; its cells are in the order of `WHAT_IF_COLUMNS`."""

    method: str
    cells: tuple[str, ...]
    is_best: bool


def what_if_rows(shown: WhatIf) -> list[WhatIfRow]:
    """Every method but the target alone, in the order they were run."""
    best = shown.fastest()
    rows = []
    for method in shown.methods:
        mark = "" if shown.agrees(method) else f" {OUTSIDE}"
        cells = (
            _times(shown.speedup(method)) + mark,
            _times(shown.clocked(method)),
            _times(shown.speedup(method, CHEAP_RATIO)),
            _times(shown.speedup(method, PAPERS_RATIO)),
            _below(shown.break_even(method)),
        )
        name = method.run.method + ("" if method.run.lossless else " †")
        rows.append(WhatIfRow(name, cells, method is best))
    return rows


def headline(shown: WhatIf) -> str:
    """Who wins at which ratio, and below which speculation pays: sentences."""
    here, there = shown.fastest(), shown.fastest(PAPERS_RATIO)
    return (
        f"At this machine's ratio t_draft/t_target of {shown.ratio:.2g} the counts predict"
        f" {_named(shown, here, None)} to be fastest, at the papers' {PAPERS_RATIO:g}"
        f" {_named(shown, there, PAPERS_RATIO)}. {_by_ratio(shown)} {_pays(shown)}"
    )


def agreement(shown: WhatIf) -> str:
    """How the predictions at this machine's own ratio compare with the clock."""
    off = {
        method.run.method: abs(shown.speedup(method).value / shown.clocked(method).value - 1.0)
        for method in shown.methods
    }
    outside = [method.run.method for method in shown.methods if not shown.agrees(method)]
    farthest = max(off, key=lambda name: off[name])
    text = (
        f"At this machine's own ratio {len(off) - len(outside)} of {len(off)} predictions lie in"
        f" the clock's 95 % interval; they are {100 * float(np.median(list(off.values()))):.1f} %"
        f" off by the median, at most {100 * off[farthest]:.1f} % ({farthest})"
    )
    return f"{text}; outside: {', '.join(outside)}." if outside else f"{text}."


def basis(shown: WhatIf) -> str:
    """What the predictions rest on."""
    text = (
        "A forward takes its mean over all methods of the prompt set, by the number of tokens that"
        " the target scores. Prefill, stopping rules (a head, for one) and rounds beside their"
        " forwards are taken as measured; only forwards of the draft, its prefill among them, are"
        " scaled."
    )
    by_cost = [m.run.method for m in shown.methods if m.run.stop == "cost"]
    text += " Every method keeps the lengths that it drafted here"
    text += f", also {', '.join(by_cost)}, which would choose others at another ratio" * bool(
        by_cost
    )
    text += ", and thresholds that were chosen for this machine's times stay."
    if any(m.run.drafter == "transformers" for m in shown.methods):
        text += " transformers' own loop costs so much a call, a round and a draft forward, fitted."
    if not all(m.run.lossless for m in shown.methods):
        text += " † biased: never named as fastest."
    return text


def _named(shown: WhatIf, method: Priced, ratio: float | None) -> str:
    if method is shown.plain:
        return "the target alone"
    return f"{method.run.method} ({_times(shown.speedup(method, ratio))})"


def _by_ratio(shown: WhatIf) -> str:
    """Who is fastest up to which ratio."""
    found = shown.winners()
    parts = [
        f"{method.run.method} up to {upto:.2g}"
        for method, _, upto in found
        if method is not shown.plain
    ]
    return f"Fastest by ratio: {', '.join(parts)}." if len(parts) > 1 else ""


def _pays(shown: WhatIf) -> str:
    """Below which ratio any lossless method beats the target alone."""
    most = max((shown.break_even(m) for m in shown.methods if m.run.lossless), default=0.0)
    if most <= 0.0:
        return "Speculation pays at no ratio: not even with a draft that takes no time."
    if most > 1.0:
        return "Speculation pays at every ratio up to 1."
    return f"Speculation pays below a ratio of {most:.2g}."


def _times(speedup: Interval) -> str:
    return f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"


def _below(ratio: float) -> str:
    if ratio <= 0.0:
        return "never"
    return NOT_MEASURED if np.isinf(ratio) else f"{ratio:.2g}"


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.reporting.what_if"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        tables, words = _run(given)
    except (ConfigError, ManifestError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # Tables may be wider than the 80 columns that a file or a pipe is taken to have.
    console = Console(highlight=False, width=max(120, Console().width))
    for table in tables:
        console.print(table)
    for line in words:
        console.print(Text(line), soft_wrap=True)
    return 0


def _run(given: argparse.Namespace) -> tuple[list[Table], list[str]]:
    if any(not ratio > 0.0 or np.isinf(ratio) for ratio in given.ratio):
        raise ConfigError(f"--ratio is t_draft/t_target, above 0; got {given.ratio}")
    machines = [Machine.read(path) for path in given.machine]
    path = given.results / "results.json" if given.results.is_dir() else given.results
    results = read_results(path)
    found = what_if(results)
    if not found:
        raise ConfigError(
            f"{path} cannot tell what forwards took: it must hold times, not counts of batches, of"
            " the target alone and of a method that drafts, by a version that records them by the"
            " number of tokens; run the evaluation again into another folder (--eval.folder NAME)"
        )
    elsewhere = [(machine.name, on_machine(results, machine)) for machine in machines]
    tables = []
    for name, shown in found.items():
        there = [(machine, sets[name]) for machine, sets in elsewhere]
        tables.append(_table(name, shown, given.ratio, there))
    whole = next(iter(found.values()))
    words = [headline(whole), agreement(whole), basis(whole)]
    for machine, sets in elsewhere:
        other = next(iter(sets.values()))
        words.append(
            f"{machine}: ratio {other.ratio:.2g}, fastest {_named(other, other.fastest(), None)}."
        )
    return tables, words


def _table(
    name: str, shown: WhatIf, ratios: Sequence[float], machines: Sequence[tuple[str, WhatIf]]
) -> Table:
    view = Table(title=Text(name), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    view.add_column("method")
    columns = [f"here ({shown.ratio:.2g})", "clock", *(f"at {ratio:g}" for ratio in ratios)]
    for column in [*columns, "pays below", *(machine for machine, _ in machines)]:
        view.add_column(Text(column), justify="right")
    for number, method in enumerate(shown.methods):
        mark = "" if shown.agrees(method) else f" {OUTSIDE}"
        cells = [_times(shown.speedup(method)) + mark, _times(shown.clocked(method))]
        cells += [_times(shown.speedup(method, ratio)) for ratio in ratios]
        cells.append(_below(shown.break_even(method)))
        cells += [_times(there.speedup(there.methods[number])) for _, there in machines]
        view.add_row(Text(method.run.method), *cells)
    return view


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("results", type=Path, help="results.json of an evaluation, or its folder")
    add(
        "--machine",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="forward times of another machine, as above; may be given several times",
    )
    add(
        "--ratio",
        type=float,
        nargs="+",
        default=[CHEAP_RATIO, PAPERS_RATIO],
        metavar="R",
        help=f"ratios t_draft/t_target (default: {CHEAP_RATIO:g} {PAPERS_RATIO:g})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
