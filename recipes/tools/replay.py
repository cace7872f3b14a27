"""The distance of stopping rules from the oracle, on recorded acceptance.

    draftsmith replay LABELS --draft DRAFT --head HEAD

Counts are expectations over all outcomes of acceptance (`eval.analysis.expectation`). Rules with
something to fit are fitted on dev rows, held out from the draft, and the setting of each rule is
chosen on those; test rows are replayed. --draft-seconds is the time of one more drafted token,
including the time that the target takes longer for a longer draft, as the cost rule measures it.
With a head, rules pay for each question as much of a draft step as is measured here
(`eval.measuring.question`).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.expectation import Times, Traces
from eval.analysis.replay import (
    best_settings,
    bounds,
    check_labelling_draft,
    every_setting,
    fit_all_rules,
    replay_rules,
    result_rows,
    rows_of_split,
)
from eval.drafting.stopping.head import Head
from eval.measuring.intervals import Interval
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from specdata.terminal import positive_number, whole_number

if TYPE_CHECKING:
    import datasets

ALL_ROLLOUTS = "all rollouts"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("labels", type=Path, help="folder of a dataset of labels")
    add("--draft-seconds", type=positive_number, default=0.1, help="t_d (default: %(default)s)")
    add("--target-seconds", type=positive_number, default=1.0, help="t_t (default: 1)")
    add(
        "--question-share",
        type=float,
        help="what asking the head costs, as a share of t_d (default: as it is measured here)",
    )
    add("--rows", type=whole_number, default=256, help="most of a prompt set (default: 256)")
    add("--draft", help="the draft, for the head")
    add("--head", help="an acceptance head of that draft")
    add("--out", type=Path, default=Path("runs/replay"), help="folder for the JSON")


def main(given: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    try:
        shown = _run(given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    console = Console(highlight=False)
    for name, rows in shown.items():
        view = Table(title=name, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        # N target and N discarded for each emitted token, and the share of the oracle's speed.
        for column in ("rule", "setting", "target", "disc.", "oracle"):
            view.add_column(column, no_wrap=True)
        view.add_column("saves over best K", no_wrap=True, justify="right")
        for row in rows:
            metrics = (row["verification_rate"], row["discard_rate"])
            percent = f"{100 * row['of_the_oracles_speed']:.0f} %"
            saved = str(Interval(**row["saving_over_best_length"]))
            view.add_row(
                row["rule"], row["setting"], *(f"{x:.3f}" for x in metrics), percent, saved
            )
        console.print(view)
        free = [
            f"{row['setting']} {Interval(**row['were_questions_free'])}"
            for row in rows
            if row["rule"] == Head.name
        ]
        if free:
            console.print(f"were the head asked for nothing: {', '.join(free)}")
    console.print(f"every setting: {given.out / 'replay.json'}")
    return 0


def _run(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Replay, store every row, and return those that are shown of each prompt set."""
    from eval.analysis.traces import acceptance_traces
    from eval.measuring.question import question_seconds
    from heads import BaseHead
    from specdata.labels.make import sampling_of
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    share = given.question_share
    if share is not None and not (given.head and 0.0 <= share < math.inf):
        raise ConfigError(
            "--question-share is what asking --head costs, 0 or more of a draft step; got "
            f"{share:g} and {'a' if given.head else 'no'} head"
        )
    if given.head and not given.draft:
        raise ConfigError("--head reads the hidden states of the draft: give --draft too")
    check_labelling_draft(given.labels, given.draft)
    # Not by `load_stored`, which would leave a copy in a folder that is only read.
    labels = stream_stored(given.labels)
    judged, held_out = (
        rows_of_split(labels, given.labels, split, given.rows) for split in ("test", "dev")
    )
    models: dict[str, Any] = {}
    if given.draft:
        models["draft"] = load_model(given.draft, dtype="float32")
        models["sampling"] = sampling_of(given.labels)
    if given.head:
        models["head"] = BaseHead.from_pretrained(given.head).eval()
    traces, dev = (acceptance_traces(rows, **models) for rows in (judged, held_out))
    fitted, times = fit_all_rules(dev), Times(given.draft_seconds, given.target_seconds)
    questions: dict[str, float] = {}
    if given.head:
        rules = every_setting(fitted)
        asked, step = question_seconds(models["draft"], models["head"], models["sampling"], rules)
        questions = {name: given.draft_seconds * each.value / step for name, each in asked.items()}
        if share is not None:
            questions |= {r.title: given.draft_seconds * share for r in rules if r.reads_head}

    def rows_of(traces: Traces, rows: datasets.Dataset, name: str) -> list[dict[str, Any]]:
        of_set = np.array([name in (ALL_ROLLOUTS, each) for each in rows["dataset"]])
        selected = traces.select(of_set)
        results = bounds(selected, times) + replay_rules(selected, fitted, times, questions)
        return result_rows(results, times, np.array(rows["example_id"])[of_set].tolist())

    sets = [name for name in dict.fromkeys(judged["dataset"]) if name in held_out["dataset"]]
    rows, shown = {}, {}
    for name in [ALL_ROLLOUTS, *(sets if len(sets) > 1 else ())]:
        rows[name] = rows_of(traces, judged, name)
        shown[name] = best_settings(rows[name], rows_of(dev, held_out, name))
    stored = {
        "settings": {name: str(value) for name, value in vars(given).items()},
        "question_seconds": questions,
        "fitted": fitted,
        "rows": rows,
        "shown": shown,
    }
    write_json(given.out / "replay.json", json.loads(json.dumps(stored)))
    return shown
