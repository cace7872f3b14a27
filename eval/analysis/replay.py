"""How far stopping rules are from the oracle, on recorded acceptance.

python -m eval.analysis.replay runs/toy/labels --draft runs/toy/draft/model --head runs/toy/head/model

All rules meet the same outcomes (`eval.analysis.traces`). --draft-seconds is what one more drafted token
costs, the target's share of a longer draft included, as the cost rule measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from eval.analysis import oracle
from eval.analysis.oracle import Plan, ReplayCounts, dinkelbach, replay
from eval.analysis.traces import AcceptanceTrace, acceptance_traces
from eval.drafting.stopping.calibration import Calibration, fit_calibration
from heads import AcceptanceHead
from specdata.errors import ConfigError, ManifestError
from specdata.models import load_model
from specdata.storage.dataset import load_stored
from specdata.storage.files import atomic_write, write_json

THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
FIXED = range(1, 21)


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One rule: the family it belongs to, its setting, and what it did."""

    family: str
    setting: str
    counts: ReplayCounts


def compare(
    texts: Sequence[AcceptanceTrace],
    calibration: Calibration,
    *,
    draft_seconds: float,
    target_seconds: float,
    limit: int = 20,
) -> list[RuleResult]:
    """Replay every rule over all texts.

    Args:
        texts: at least one.
        calibration: the logistic model on max q.
        draft_seconds: t_d.
        target_seconds: t_t.
        limit: most tokens of a draft that a rule ends; the oracle has none.
    """

    def run(family: str, setting: str, plans: Sequence[Plan]) -> RuleResult:
        found = (replay(one.accepted, plan) for one, plan in zip(texts, plans, strict=True))
        return RuleResult(family, setting, sum(found, ReplayCounts()))

    rows = [
        run("oracle", "", [oracle.oracle(one.accepted) for one in texts]),
        run("plain", "", [oracle.fixed_length(0)] * len(texts)),
        *(run("fixed", f"K={k}", [oracle.fixed_length(k)] * len(texts)) for k in FIXED),
    ]
    for least in THRESHOLDS:
        plans = [oracle.first_below(one.chance, least, limit=limit) for one in texts]
        rows.append(run("confidence", f"{least:g}", plans))
    mean = float(np.mean([value for one in texts for value in one.accept]))
    for family, estimates, newest in _judges(texts, calibration):
        lag = 1 if family == "head" else 0
        for h in THRESHOLDS:
            plans = [oracle.while_alive(e, 1 - h, limit=limit, lag=lag) for e in estimates]
            rows.append(run(family, f"h={h:g}", plans))

        def price_of(
            text: int,
            price: float,
            estimates: Sequence[Sequence[float]] = estimates,
            newest: Sequence[Sequence[float]] | None = newest,
            lag: int = lag,
        ) -> Plan:
            least = draft_seconds / (price * mean)
            last = newest[text] if newest else None
            return oracle.while_alive(estimates[text], least, limit=limit, lag=lag, newest=last)

        counts, _ = dinkelbach(
            [one.accepted for one in texts],
            price_of,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
        )
        rows.append(RuleResult(family, "cost rule", counts))
    return rows


def _judges(
    texts: Sequence[AcceptanceTrace], calibration: Calibration
) -> Iterator[tuple[str, list[list[float]], list[list[float]] | None]]:
    """Family, its estimates of acceptance, and what judges the newest token if it cannot."""
    logit = [[calibration.accept(q) for q in one.q_max] for one in texts]
    if all(one.q_max for one in texts):
        yield "logit", logit, None
    if all(one.head for one in texts):
        yield "head", [one.head for one in texts], logit
    yield "perfect head", [one.accept for one in texts], None


def shown(
    rows: Sequence[RuleResult], draft_seconds: float, target_seconds: float
) -> list[dict[str, Any]]:
    """What is printed and stored of each row."""
    ideal = rows[0].counts.seconds_per_token(draft_seconds, target_seconds)
    table = []
    for row in rows:
        counts, seconds = row.counts, row.counts.seconds_per_token(draft_seconds, target_seconds)
        table.append(
            {
                "rule": row.family,
                "setting": row.setting,
                **asdict(counts),
                "verification_rate": counts.n_target / counts.tokens,
                "discard_rate": counts.n_discarded / counts.tokens,
                "seconds_per_token": seconds,
                "of_the_oracles_speed": ideal / seconds,
            }
        )
    return table


def best_of_each(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest setting of every family, and the cost rules, fastest first."""
    best = {
        family: min(
            (row for row in table if row["rule"] == family),
            key=lambda row: float(row["seconds_per_token"]),
        )
        for family in dict.fromkeys(row["rule"] for row in table)
    }
    kept = [row for row in table if row in best.values() or row["setting"] == "cost rule"]
    return sorted(kept, key=lambda row: float(row["seconds_per_token"]))


def draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Verification rate against discard rate (the Pareto plot of SpecDec++), as PNG."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for family in dict.fromkeys(row["rule"] for row in table if row["rule"] != "plain"):
        mine = [row for row in table if row["rule"] == family and row["setting"] != "cost rule"]
        at = ([row["discard_rate"] for row in mine], [row["verification_rate"] for row in mine])
        (line,) = axes.plot(*at, marker="*" if family == "oracle" else ".", label=family)
        cost = [r for r in table if r["rule"] == family and r["setting"] == "cost rule"]
        for row in cost:
            where = row["discard_rate"], row["verification_rate"]
            axes.plot(*where, "v", color=line.get_color(), label=f"{family}, cost rule")
    axes.set_xlabel("discard rate  (N discarded / N)")
    axes.set_ylabel("verification rate  (N target / N)")
    axes.set_title("Replay of recorded acceptance; lower left is better")
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    given = _parser().parse_args(arguments)
    try:
        table = _run(given)
    except (ConfigError, ManifestError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    view = Table("rule", "setting", "N target/N", "N discarded/N", "s/token", "of the oracle")
    for row in best_of_each(table):
        figures = (row["verification_rate"], row["discard_rate"], row["seconds_per_token"])
        percent = f"{100 * row['of_the_oracles_speed']:.0f} %"
        view.add_row(row["rule"], row["setting"], *(f"{x:.4g}" for x in figures), percent)
    console = Console(highlight=False)
    console.print(view)
    console.print(f"every setting: {given.out / 'replay.json'}, {given.out / 'replay.png'}")
    return 0


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    if given.draft_seconds <= 0 or given.target_seconds <= 0:
        raise ConfigError("--draft-seconds and --target-seconds must be positive")
    if given.head and not given.draft:
        raise ConfigError("--head reads the states of the draft: give --draft too")
    labels = load_stored(given.labels)
    chosen, others = (_rows(labels, given, split) for split in (given.split, given.fit_split))
    draft = load_model(given.draft, dtype="float32") if given.draft else None
    head = AcceptanceHead.from_pretrained(given.head) if given.head else None
    texts = acceptance_traces(chosen, seed=given.seed, draft=draft, head=head)
    fitted = acceptance_traces(others, seed=given.seed)
    accept, q_max = (
        np.concatenate([getattr(one, name) for one in fitted]) for name in ("accept", "q_max")
    )
    calibration = fit_calibration(accept, q_max.clip(max=1.0))
    costs = {"draft_seconds": given.draft_seconds, "target_seconds": given.target_seconds}
    table = shown(compare(texts, calibration, limit=given.limit, **costs), **costs)
    settings = {name: str(value) for name, value in vars(given).items()}
    facts = {"settings": settings, "calibration": asdict(calibration), "rows": table}
    write_json(given.out / "replay.json", json.loads(json.dumps(facts)))
    draw(table, given.out / "replay.png")
    return table


def _rows(labels: datasets.Dataset, given: argparse.Namespace, split: str) -> datasets.Dataset:
    rows = [n for n, name in enumerate(labels["split"]) if name == split][: given.rows]
    if not rows:
        known = ", ".join(sorted(set(labels["split"])))
        raise ConfigError(f"{given.labels} has no rows of split {split!r}, only {known}")
    return labels.select(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.analysis.replay",
        description="Stopping rules against the oracle, replayed.",
    )
    parser.add_argument("labels", type=Path, help="folder of a labels table")
    parser.add_argument(
        "--draft-seconds", type=float, default=0.1, help="t_d (default: %(default)s)"
    )
    parser.add_argument("--target-seconds", type=float, default=1.0, help="t_t (default: 1)")
    parser.add_argument("--split", default="test", help="rows that are replayed (default: test)")
    parser.add_argument(
        "--fit-split",
        default="dev",
        help="rows that the logistic model is fitted on; held out from the draft (default: dev)",
    )
    parser.add_argument("--rows", type=int, default=256, help="most rollouts (default: 256)")
    parser.add_argument("--draft", help="the draft, for the head")
    parser.add_argument("--head", help="an acceptance head of that draft")
    parser.add_argument("--limit", type=int, default=20, help="longest draft (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the coins")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="folder for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
