"""SpecDec++'s sweep over acceptance heads (arXiv:2405.19715, Table 3), on labels.

    draftsmith sweep LABELS --draft DRAFT --out runs/sweep

Every depth with every weight of rejections is trained on the first rollouts of each prompt set, and
replayed on dev rows at every threshold. The fastest of them is trained once more, on all rollouts,
and judged on test rows. A head that is finished is kept, so the same command goes on after a kill.
--draft-seconds is the time of one more drafted token, as in replay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.expectation import Traces, expected_counts
from eval.analysis.replay import check_labelling_draft, rows_of_split
from eval.drafting.stopping.head import Head
from heads.config import HeadConfig
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from specdata.terminal import accept_any_text, tell, whole_number

DEPTHS, WEIGHTS = (0, 1, 2, 3, 4), (1.0, 3.0, 6.0, 12.0)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
COLUMNS = ("depth", "weight", "kl", "auroc", "h", "verified", "discarded", "speed")
BEST = "best"


def sweep(given: argparse.Namespace, *, grid_alone: bool = False) -> list[dict[str, Any]]:
    """Train and judge the grid, then, unless it alone is asked for, the winner at full length.

    Raises:
        ConfigError: if labels or draft cannot be used.
        ManifestError: if the output holds heads of other settings, rows or draft.
    """
    from eval.analysis.traces import acceptance_traces
    from heads import BaseHead
    from heads.train import train_head
    from specdata.labels.make import sampling_of
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    if given.draft_seconds <= 0 or given.target_seconds <= 0:
        raise ConfigError("--draft-seconds and --target-seconds must be positive")
    labels, sampling = stream_stored(given.labels), sampling_of(given.labels)
    few, train, dev, test = (
        rows_of_split(labels, given.labels, split, most)
        for split, most in (
            ("train", given.rows),
            ("train", sys.maxsize),
            ("dev", given.judged_rows),
            ("test", given.judged_rows),
        )
    )
    check_labelling_draft(given.labels, given.draft)
    draft = load_model(given.draft, dtype="float32")

    def row_of(config: HeadConfig, folder: Path, train: Any, judged: Any) -> dict[str, Any]:
        trained = train_head(
            draft=draft,
            train=train,
            dev=dev,
            out=folder,
            config=config,
            seed=given.seed,
            sampling=sampling,
        )
        head, after = BaseHead.from_pretrained(folder), trained.after
        traces = acceptance_traces(judged, draft=draft, sampling=sampling, head=head)
        points = [point(traces, h, given) for h in given.thresholds]
        sets = {
            name: traces.select(np.array(judged["dataset"]) == name)
            for name in dict.fromkeys(judged["dataset"])
        }
        return {
            "depth": config.depth,
            "weight": config.rejection_weight,
            "kl": after.kl_raw,
            "auroc": after.auroc,
            **max(points, key=lambda each: each["speed"]),
            "head": asdict(after),
            "steps": trained.steps,
            "points": points,
            "sets": {
                name: [point(of_set, h, given) for h in given.thresholds]
                for name, of_set in sets.items()
            },
        }

    grid: dict[tuple[int, float], HeadConfig] = {
        (depth, weight): HeadConfig.model_validate(
            {"depth": depth, "rejection_weight": weight, "epochs": given.epochs}
        )
        for depth in given.depths
        for weight in given.weights
    }
    rows = [
        row_of(config, given.out / f"depth-{depth}-weight-{weight:g}", few, dev)
        for (depth, weight), config in grid.items()
    ]
    if grid_alone:
        return rows
    won = max(rows, key=lambda row: float(row["speed"]))
    winner = grid[won["depth"], won["weight"]]
    name = f"{BEST}-depth-{winner.depth}-weight-{winner.rejection_weight:g}"
    rows.append(row_of(winner, given.out / name, train, test))
    settings = {name: str(value) for name, value in vars(given).items()}
    stored = {"settings": settings, "grid": rows[:-1], BEST: {**rows[-1], "folder": name}}
    write_json(given.out / "sweep.json", json.loads(json.dumps(stored)))
    return rows


def point(traces: Traces, h: float, given: argparse.Namespace) -> dict[str, float]:
    """A head's replay at a threshold; the speed is a multiple of the target's alone."""
    lengths = Head(threshold=h).recorded_lengths(traces.tokens)
    assert lengths is not None
    counts = expected_counts(traces, lengths)
    tokens = float(counts.tokens.sum())
    return {
        "h": h,
        "verified": float(counts.n_target.sum()) / tokens,
        "discarded": float(counts.n_discarded.sum()) / tokens,
        "speed": given.target_seconds
        / counts.seconds_per_token(given.draft_seconds, given.target_seconds),
    }


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.analysis.sweep"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("labels", type=Path, help="folder of a dataset of labels, with train, dev and test rows")
    add("--draft", required=True, help="the draft that made them")
    add("--out", type=Path, default=Path("runs/sweep"), help="folder of heads and results")
    add("--rows", type=whole_number, default=512, help="training rollouts of a set, for the grid")
    add("--judged-rows", type=whole_number, default=256, help="dev and test rollouts of a set")
    add("--depths", type=whole_number, nargs="+", default=DEPTHS)
    add("--weights", type=float, nargs="+", default=WEIGHTS, help="of rejections in the loss")
    add("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    add("--epochs", type=whole_number, default=3, help="over the rows (default: the paper's 3)")
    add("--draft-seconds", type=float, default=0.1, help="t_d (default: %(default)s)")
    add("--target-seconds", type=float, default=1.0, help="t_t (default: 1)")
    add("--seed", type=whole_number, default=0, help="of the heads (default: 0)")
    given = parser.parse_args(arguments)
    try:
        rows = sweep(given)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error, ValueError)
    view = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in COLUMNS:
        view.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown = (row[column] for column in COLUMNS)
        view.add_row(*("" if value is None else f"{value:.3g}" for value in shown))
    console = Console(highlight=False)
    console.print(view)
    console.print(
        "on dev rows; the last row is the fastest head, trained on all rollouts and judged on test "
        f"rows (all points: {given.out / 'sweep.json'})",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
