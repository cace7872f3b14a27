"""How far stopping rules are from the oracle, on recorded acceptance.

    python -m eval.analysis.replay LABELS --draft DRAFT --head HEAD

Counts are expectations over all outcomes of acceptance (`eval.analysis.expectation`).
--draft-seconds is the time of one more drafted token, including the time that the target takes
longer for a longer draft, as the cost rule measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from eval.analysis.expectation import Counts, Traces, dinkelbach, expected_counts, oracle_counts
from eval.drafting.stopping import StoppingRule
from eval.drafting.stopping.calibration import fit_calibration
from eval.drafting.stopping.confidence import Confidence
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.cumulative import Cumulative
from eval.drafting.stopping.entropy import Entropy
from eval.drafting.stopping.fixed import Fixed
from eval.drafting.stopping.head import Head
from eval.drafting.stopping.logit import Logit
from eval.drafting.stopping.recorded import Lengths, constant_length, until_product_below
from specdata.errors import ConfigError, ManifestError
from specdata.storage.files import atomic_write, write_json
from specdata.storage.manifest import read_manifest
from specdata.terminal import accept_any_text

if TYPE_CHECKING:  # help is shown without torch, so what works imports where it works
    import datasets

THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
NATS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
COST_RULE = "cost rule"
LENGTHS = range(1, 21)


@dataclass(frozen=True, slots=True)
class RuleResult:
    """A replayed rule.

    Args:
        family: name of the stopping rule; "oracle", or "plain" for the target alone.
        setting: its length or threshold, or "cost rule".
        counts: expected counts of each rollout.
    """

    family: str
    setting: str
    counts: Counts


def replay_rules(
    traces: Traces,
    calibration: tuple[float, float],
    *,
    draft_seconds: float,
    target_seconds: float,
    limit: int = 20,
) -> list[RuleResult]:
    """Replay every rule at every setting, each as the decoder applies it.

    "perfect head" is SpecDec++'s rule with the acceptance probabilities themselves, one token late
    like a head; "perfect, no lag" knows that of the newest token, too.

    Args:
        traces: of at least one rollout.
        calibration: intercept and slope of the logistic model on max q.
        draft_seconds: t_d.
        target_seconds: t_t.
        limit: most tokens of a draft whose length a rule decides; the oracle has no limit.
    """
    tokens = traces.tokens
    results = [
        RuleResult("oracle", "", oracle_counts(traces)),
        RuleResult("plain", "", expected_counts(traces, constant_length(tokens, 0))),
    ]
    for rule, setting in _settings(calibration, limit):
        lengths = rule.recorded_lengths(tokens)
        if lengths is not None:
            results.append(RuleResult(rule.name, setting, expected_counts(traces, lengths)))
    for family, lag in (("perfect head", 1), ("perfect, no lag", 0)):
        for h in THRESHOLDS:
            lengths = until_product_below(tokens, traces.accept, 1 - h, limit=limit, lag=lag)
            results.append(RuleResult(family, f"h={h:g}", expected_counts(traces, lengths)))
    mean = traces.mean_accept()

    def best_cost_rule(lengths: Callable[[float], Lengths]) -> Counts:
        return dinkelbach(
            traces, lengths, draft_seconds=draft_seconds, target_seconds=target_seconds
        )[0]

    for family, in_use in (("logit", False), ("head", True)):
        if in_use and tokens.head is None:
            continue

        def cost_lengths(seconds: float, in_use: bool = in_use) -> Lengths:
            rule = Cost(
                draft_seconds=draft_seconds,
                token_seconds=seconds,
                mean_acceptance=mean,
                head=in_use,
                calibration=calibration,
                limit=limit,
            )
            lengths = rule.recorded_lengths(tokens)
            assert lengths is not None
            return lengths

        results.append(RuleResult(family, COST_RULE, best_cost_rule(cost_lengths)))

    def perfect(seconds: float) -> Lengths:
        least = draft_seconds / (seconds * mean)
        return until_product_below(tokens, traces.accept, least, limit=limit)

    results.append(RuleResult("perfect, no lag", COST_RULE, best_cost_rule(perfect)))
    return results


def _settings(calibration: tuple[float, float], limit: int) -> Iterator[tuple[StoppingRule, str]]:
    """Each rule at each setting that is replayed, and what the setting is called."""
    for length in LENGTHS:
        yield Fixed(length=length), f"K={length}"
    for threshold in THRESHOLDS:
        yield Confidence(threshold=threshold, limit=limit), f"{threshold:g}"
        yield Cumulative(threshold=threshold, limit=limit), f"{threshold:g}"
    for nats in NATS:
        yield Entropy(threshold=nats, limit=limit), f"{nats:g}"
    for h in THRESHOLDS:
        yield Logit(threshold=h, limit=limit, calibration=calibration), f"h={h:g}"
        yield Head(threshold=h, limit=limit), f"h={h:g}"


def result_rows(
    results: Sequence[RuleResult], draft_seconds: float, target_seconds: float
) -> list[dict[str, Any]]:
    """The rows that are printed and stored; the first result must be the oracle's."""
    ideal = results[0].counts.seconds_per_token(draft_seconds, target_seconds)
    rows = []
    for result in results:
        counts = result.counts
        seconds = counts.seconds_per_token(draft_seconds, target_seconds)
        rows.append(
            {
                "rule": result.family,
                "setting": result.setting,
                **{name: float(value.sum()) for name, value in asdict(counts).items()},
                "verification_rate": float(counts.n_target.sum() / counts.tokens.sum()),
                "discard_rate": float(counts.n_discarded.sum() / counts.tokens.sum()),
                "seconds_per_token": seconds,
                "of_the_oracles_speed": ideal / seconds,
            }
        )
    return rows


def best_settings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest setting of every family, and the cost rules, fastest first."""
    best = {
        family: min(
            (row for row in rows if row["rule"] == family),
            key=lambda row: float(row["seconds_per_token"]),
        )
        for family in dict.fromkeys(row["rule"] for row in rows)
    }
    kept = [row for row in rows if row in best.values() or row["setting"] == COST_RULE]
    return sorted(kept, key=lambda row: float(row["seconds_per_token"]))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Verification rate against discard rate (the Pareto plot of SpecDec++), as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for family in dict.fromkeys(row["rule"] for row in rows if row["rule"] != "plain"):
        of_family = [row for row in rows if row["rule"] == family]
        swept = [row for row in of_family if row["setting"] != COST_RULE]
        x, y = [row["discard_rate"] for row in swept], [row["verification_rate"] for row in swept]
        (line,) = axes.plot(x, y, marker="*" if family == "oracle" else ".", label=family)
        for row in of_family:
            if row["setting"] == COST_RULE:
                point = row["discard_rate"], row["verification_rate"]
                axes.plot(*point, "v", color=line.get_color(), label=f"{family}, cost rule")
    axes.set_xlabel("discard rate  (N discarded / N)")
    axes.set_ylabel("verification rate  (N target / N)")
    axes.set_title("Replay of recorded acceptance; lower left is better")
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.analysis.replay"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        rows = _run(given)
    except (ConfigError, ManifestError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    view = Table("rule", "setting", "N target/N", "N discarded/N", "s/token", "of the oracle")
    for row in best_settings(rows):
        metrics = (row["verification_rate"], row["discard_rate"], row["seconds_per_token"])
        percent = f"{100 * row['of_the_oracles_speed']:.0f} %"
        view.add_row(row["rule"], row["setting"], *(f"{x:.4g}" for x in metrics), percent)
    console = Console(highlight=False)
    console.print(view)
    console.print(f"every setting: {given.out / 'replay.json'}, {given.out / 'replay.png'}")
    return 0


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    from eval.analysis.traces import acceptance_traces
    from heads import BaseHead
    from specdata.labels.make import sampling_of
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    if given.draft_seconds <= 0 or given.target_seconds <= 0:
        raise ConfigError("--draft-seconds and --target-seconds must be positive")
    if given.head and not given.draft:
        raise ConfigError("--head reads the hidden states of the draft: give --draft too")
    # Not by `load_stored`, which would leave a copy in a folder that is only read.
    labels = stream_stored(given.labels)
    replayed, fitted = (_rows(labels, given, split) for split in (given.split, given.fit_split))
    draft = load_model(given.draft, dtype="float32") if given.draft else None
    if given.draft:
        _check_draft(given.labels, given.draft)
    head = BaseHead.from_pretrained(given.head) if given.head else None
    sampling = sampling_of(given.labels)
    traces = acceptance_traces(replayed, draft=draft, sampling=sampling, head=head)
    fit_traces = acceptance_traces(fitted)
    inside = fit_traces.inside
    fitted_model = fit_calibration(fit_traces.accept[inside], fit_traces.tokens.q_max[inside])
    calibration = fitted_model.intercept, fitted_model.slope
    costs = {"draft_seconds": given.draft_seconds, "target_seconds": given.target_seconds}
    rows = result_rows(replay_rules(traces, calibration, limit=given.limit, **costs), **costs)
    settings = {name: str(value) for name, value in vars(given).items()}
    stored = {"settings": settings, "calibration": asdict(fitted_model), "rows": rows}
    write_json(given.out / "replay.json", json.loads(json.dumps(stored)))
    draw(rows, given.out / "replay.png")
    return rows


def _check_draft(labels: Path, draft: str) -> None:
    """Raise ConfigError if labels say that they were made with another draft.

    Its hidden states would be of other tokens than those that were accepted or not. Labels of
    earlier versions do not say which draft that was.
    """
    from specdata.models import revision_of

    stored, revision = read_manifest(labels)["settings"].get("draft"), revision_of(draft)
    if not isinstance(stored, Mapping):
        return
    if stored.get("revision", revision) != revision:
        raise ConfigError(
            f"--draft must be the draft that {labels} was made with, {stored.get('name')}; the one "
            f"in {draft} is another (contents {stored['revision']} -> {revision}): name that one, "
            "or label the rollouts with this draft"
        )


def _rows(
    labels: datasets.IterableDataset, given: argparse.Namespace, split: str
) -> datasets.Dataset:
    from datasets import Dataset

    rows = list(islice((row for row in labels if row["split"] == split), given.rows))
    if not rows:
        known = ", ".join(sorted({row["split"] for row in labels}))
        raise ConfigError(f"{given.labels} has no rows of split {split!r}, only {known}")
    return Dataset.from_list(rows)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("labels", type=Path, help="folder of a dataset of labels")
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
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="folder for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
