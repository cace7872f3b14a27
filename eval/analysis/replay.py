"""The distance of stopping rules from the oracle, on recorded acceptance.

    python -m eval.analysis.replay LABELS --draft DRAFT --head HEAD

Counts are expectations over all outcomes of acceptance (`eval.analysis.expectation`). Rules with
something to fit are fitted on the rows of --fit-split, and the setting of each rule is chosen on
those. --draft-seconds is the time of one more drafted token, including the time that the target
takes longer for a longer draft, as the cost rule measures it. With a head, rules pay for each
question as much of a draft step as is measured here (`eval.measuring.question`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.expectation import Counts, Traces, dinkelbach, expected_counts, oracle_counts
from eval.drafting.stopping import STOPPING_RULES, StoppingRule
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import (
    Lengths,
    Reals,
    constant_length,
    until_product_below,
)
from eval.drafting.stopping.thresholds import Confidence, Cumulative, Entropy, Fixed
from eval.measuring.intervals import Interval, resamples
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from specdata.storage.manifest import read_manifest
from specdata.terminal import accept_any_text, tell, whole_number

if TYPE_CHECKING:  # help is shown without torch, so what works imports where it works
    import datasets

THRESHOLDS = (*(step / 20 for step in range(1, 20)), 0.98)
"""Of rules that compare the probability of a rejection."""
CHANCES = (1e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
"""Of rules that compare the draft's probabilities of its tokens; those of a product are small."""
NATS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Of the rule that compares an entropy."""
GRIDS: dict[type[StoppingRule], tuple[str, tuple[float, ...]]] = {
    Confidence: ("", CHANCES),
    Cumulative: ("", CHANCES),
    Entropy: ("", NATS),
}
"""Rules that compare something else than the probability h of a rejection."""
COST_RULE = "cost rule"
ALL_ROLLOUTS = "all rollouts"
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


def fit_all_rules(traces: Traces) -> dict[str, Any]:
    """The parameters that rules fit on labels, by name, of every rule.

    A rule that reads what was not recorded is left as it is without labels.

    Args:
        traces: of held-out rollouts, which the draft was not distilled on.
    """
    values: dict[str, Any] = {}
    for rule in STOPPING_RULES.values():
        if rule.fitted and not values.keys() >= set(rule.fitted):
            try:
                values |= rule.fit(traces.tokens, traces.accept)
            except ValueError:  # what it reads was not recorded
                continue
    return values


def replay_rules(
    traces: Traces,
    fitted: Mapping[str, Any],
    *,
    draft_seconds: float,
    target_seconds: float,
    questions: Mapping[str, float] | None = None,
    limit: int = 20,
) -> list[RuleResult]:
    """Replay every rule at every setting, each as the decoder applies it.

    Args:
        traces: of at least one rollout.
        fitted: values of what rules fit on labels; see `fit_all_rules`.
        draft_seconds: t_d.
        target_seconds: t_t.
        questions: rule -> seconds of asking it about a drafted token; 0 for others.
        limit: most tokens of a draft whose length a rule decides.
    """
    tokens, asking = traces.tokens, questions or {}
    results: list[RuleResult] = []
    settings: list[tuple[StoppingRule, str]]
    settings = [(Fixed(length=length), f"K={length}") for length in LENGTHS]
    for kind in STOPPING_RULES.values():
        if "threshold" in kind.model_fields:
            name, thresholds = GRIDS.get(kind, ("h=", THRESHOLDS))
            for threshold in thresholds:
                rule = kind.model_validate({"threshold": threshold, "limit": limit})
                settings.append((rule.with_fit(fitted), f"{name}{threshold:g}"))
    for rule, setting in settings:
        lengths = rule.recorded_lengths(tokens)
        if lengths is not None:
            counts = expected_counts(traces, lengths)
            counts = replace(counts, question=asking.get(rule.name, 0.0))
            results.append(RuleResult(rule.name, setting, counts))
    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}
    for family, in_use in (("logit", False), ("head", True)):
        cost = Cost(head=in_use, limit=limit).with_fit(fitted)
        priced = cost_rule_counts(cost, traces, **times, question=asking.get(family, 0.0))
        if priced is not None and (tokens.head is not None or not in_use):
            results.append(RuleResult(family, COST_RULE, priced))
    return results


def bounds(
    traces: Traces, *, draft_seconds: float, target_seconds: float, limit: int = 20
) -> list[RuleResult]:
    """The bound that no rule reaches, and the target alone.

    The oracle knows which tokens will be accepted, and has no limit. Three rules are what a head
    would be without error: "perfect head" is SpecDec++'s rule with the acceptance probabilities
    themselves, one token late; "perfect, no lag" knows that of the newest token, too; "perfect, ex
    ante" knows sum_x min(p(x), q(x)) of each token, but not which it is. Arguments as above.
    """
    tokens, mean = traces.tokens, traces.mean_accept()
    results = [
        RuleResult("oracle", "", oracle_counts(traces)),
        RuleResult("plain", "", expected_counts(traces, constant_length(tokens, 0))),
    ]
    known = [("perfect head", traces.accept, 1), ("perfect, no lag", traces.accept, 0)]
    if traces.overlap is not None:
        known.append(("perfect, ex ante", traces.overlap, 0))
    for family, estimates, lag in known:
        for h in THRESHOLDS:
            lengths = until_product_below(tokens, estimates, 1 - h, limit=limit, lag=lag)
            results.append(RuleResult(family, f"h={h:g}", expected_counts(traces, lengths)))
        if lag:
            continue

        def pays(seconds: float, estimates: Reals = estimates) -> Lengths:
            least = draft_seconds / (seconds * mean)
            return until_product_below(tokens, estimates, least, limit=limit)

        counts, _ = dinkelbach(
            traces, pays, draft_seconds=draft_seconds, target_seconds=target_seconds
        )
        results.append(RuleResult(family, COST_RULE, counts))
    return results


def saving(
    rule: Counts,
    rival: Counts,
    *,
    draft_seconds: float,
    target_seconds: float,
    prompts: Sequence[str] | None = None,
) -> Interval:
    """The share of the rival's time a token that a rule saves: 1 - t(rule) / t(rival).

    Both are replayed on the same rollouts, so their times are paired: a resample draws prompts, and
    both are judged on those.

    Args:
        rule: expected counts of R rollouts.
        rival: of the same rollouts under another rule.
        draft_seconds: t_d.
        target_seconds: t_t.
        prompts: (R,) which prompt each rollout is of; those of one are resampled together. Each of
            its own by default.

    Raises:
        ValueError: if the counts are not of the same rollouts.
    """
    if not np.array_equal(rule.tokens, rival.tokens):
        raise ValueError("rules are compared on the same rollouts, and these emit other tokens")
    if prompts is not None and len(prompts) != len(rule.tokens):
        raise ValueError(f"{len(prompts)} prompts were named for {len(rule.tokens)} rollouts")
    names = np.arange(len(rule.tokens)) if prompts is None else prompts
    _, group = np.unique(names, return_inverse=True)
    ours, theirs = (
        resamples(int(group.max()) + 1)
        @ np.bincount(group, each.seconds(draft_seconds, target_seconds))
        for each in (rule, rival)
    )
    return Interval.of(1.0 - ours / theirs)


def cost_rule_counts(
    rule: Cost,
    traces: Traces,
    *,
    draft_seconds: float,
    target_seconds: float,
    question: float = 0.0,
) -> Counts | None:
    """The counts of a cost rule that measures a cost, once it knows it: a question's, too.

    Its lambda is then the time per token that it achieves itself, and its mean acceptance that of
    the rollouts. What it learns online of the head's odds is not replayed.

    Returns:
        None if it reads what was not recorded.
    """
    mean = traces.mean_accept()
    draft_seconds += question

    def lengths(seconds: float) -> Lengths | None:
        known = {
            "draft_seconds": rule.draft_seconds or draft_seconds,
            "token_seconds": rule.token_seconds or seconds,
            "mean_acceptance": mean,
        }
        return rule.model_copy(update=known).recorded_lengths(traces.tokens)

    if lengths(target_seconds) is None:
        return None
    recorded = cast("Callable[[float], Lengths]", lengths)  # it reads the same at every cost
    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}
    return replace(dinkelbach(traces, recorded, **times)[0], question=question)


def result_rows(
    results: Sequence[RuleResult],
    draft_seconds: float,
    target_seconds: float,
    prompts: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The rows that are printed and stored; the first result must be the oracle's.

    Args:
        results: from `bounds` and `replay_rules`.
        draft_seconds: t_d.
        target_seconds: t_t.
        prompts: which prompt each rollout is of, for the intervals; see `saving`.
    """
    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}

    def seconds_of(result: RuleResult) -> float:
        return result.counts.seconds_per_token(**times)

    ideal = seconds_of(results[0])
    fixed = min((each for each in results if each.family == Fixed.name), key=seconds_of)
    rows = []
    for result in results:
        counts = result.counts
        saved, free = (
            saving(each, fixed.counts, **times, prompts=prompts)
            for each in (counts, replace(counts, question=0.0))
        )
        rows.append(
            {
                "rule": result.family,
                "setting": result.setting,
                **{name: float(np.sum(value)) for name, value in asdict(counts).items()},
                "verification_rate": float(counts.n_target.sum() / counts.tokens.sum()),
                "discard_rate": float(counts.n_discarded.sum() / counts.tokens.sum()),
                "seconds_per_token": seconds_of(result),
                "of_the_oracles_speed": ideal / seconds_of(result),
                "saving_over_best_length": asdict(saved),
                "were_questions_free": asdict(free),
            }
        )
    return rows


def best_settings(
    rows: Sequence[dict[str, Any]], chosen_on: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The best setting of every family, and the cost rules, fastest first.

    Args:
        rows: from `result_rows`.
        chosen_on: rows of other rollouts, on which the settings are chosen: chosen on `rows`, rules
            with many settings would look better than they are.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in chosen_on:
        known = best.setdefault(row["rule"], row)
        if row["setting"] != COST_RULE and row["seconds_per_token"] < known["seconds_per_token"]:
            best[row["rule"]] = row
    kept = [row for row in rows if row["setting"] in (best[row["rule"]]["setting"], COST_RULE)]
    return sorted(kept, key=lambda row: float(row["seconds_per_token"]))


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.analysis.replay"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        shown = _run(given)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error, ValueError)
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
            f"{row['rule']} {row['setting']} {Interval(**row['were_questions_free'])}"
            for row in rows
            if row["rule"] == "head"
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

    if given.draft_seconds <= 0 or given.target_seconds <= 0:
        raise ConfigError("--draft-seconds and --target-seconds must be positive")
    if given.question_share is not None and not (given.head and given.question_share >= 0.0):
        raise ConfigError(
            "--question-share is what asking --head costs, 0 or more of a draft step; got "
            f"{given.question_share:g} and {'a' if given.head else 'no'} head"
        )
    if given.head and not given.draft:
        raise ConfigError("--head reads the hidden states of the draft: give --draft too")
    check_labels(given.labels)
    # Not by `load_stored`, which would leave a copy in a folder that is only read.
    labels = stream_stored(given.labels)
    judged, held_out = (
        rows_of_split(labels, given.labels, split, given.rows)
        for split in (given.split, given.fit_split)
    )
    known: dict[str, Any] = {}
    if given.draft:
        check_labelling_draft(given.labels, given.draft)
        known = {"draft": load_model(given.draft, dtype="float32")}
        known["sampling"] = sampling_of(given.labels)
    if given.head:
        known["head"] = BaseHead.from_pretrained(given.head).eval()
    traces, dev = (acceptance_traces(rows, **known) for rows in (judged, held_out))
    fitted = fit_all_rules(dev)
    costs = {"draft_seconds": given.draft_seconds, "target_seconds": given.target_seconds}
    questions: dict[str, float] = {}
    if given.head:
        asked, step = question_seconds(known["draft"], known["head"], known["sampling"], fitted)
        questions = {name: given.draft_seconds * own / step for name, own in asked.items()}
        if given.question_share is not None:
            questions["head"] = given.draft_seconds * given.question_share

    def rows_of(traces: Traces, rows: datasets.Dataset, name: str) -> list[dict[str, Any]]:
        chosen = np.array([name in (ALL_ROLLOUTS, own) for own in rows["dataset"]])
        here = traces.select(chosen)
        results = bounds(here, limit=given.limit, **costs)
        results += replay_rules(here, fitted, limit=given.limit, **costs, questions=questions)
        prompts = np.array(rows["example_id"])[chosen].tolist()
        return result_rows(results, **costs, prompts=prompts)

    sets = [name for name in dict.fromkeys(judged["dataset"]) if name in held_out["dataset"]]
    rows, shown = {}, {}
    for name in [ALL_ROLLOUTS, *(sets if len(sets) > 1 else ())]:
        rows[name] = rows_of(traces, judged, name)
        shown[name] = best_settings(rows[name], rows_of(dev, held_out, name))
    settings = {name: str(value) for name, value in vars(given).items()}
    stored = {
        "settings": settings,
        "question_seconds": questions,
        "fitted": fitted,
        "rows": rows,
        "shown": shown,
    }
    write_json(given.out / "replay.json", json.loads(json.dumps(stored)))
    return shown


def check_labels(folder: Path) -> None:
    """Raise ConfigError for a dataset without labels, which name the draft that they judge."""
    if not isinstance(read_manifest(folder)["settings"].get("draft"), dict):
        raise ConfigError(
            f"{folder} holds no labels, of which its settings would name the draft: give the "
            "folder of labels of a run with a head (OUTPUT/labels)"
        )


def check_labelling_draft(labels: Path, draft: str) -> None:
    """Raise ConfigError if labels were made with another draft, whose tokens they judge."""
    from specdata.models import revision_of

    check_labels(labels)
    stored, revision = read_manifest(labels)["settings"]["draft"], revision_of(draft)
    if stored["revision"] != revision:
        raise ConfigError(
            f"--draft must be the draft that {labels} was made with, {stored['name']}; the one "
            f"in {draft} is another (contents {stored['revision']} -> {revision}): name that one, "
            "or label the rollouts with this draft"
        )


def rows_of_split(
    labels: datasets.IterableDataset, folder: Path, split: str, most: int
) -> datasets.Dataset:
    """The first rows of a split, at most so many of each prompt set.

    Raises:
        ConfigError: if there are none.
    """
    from datasets import Dataset

    if most < 1:
        raise ConfigError(f"at least one rollout of a prompt set must be read, got {most}")
    taken: Counter[str] = Counter()
    rows = []
    for row in labels:
        if row["split"] == split and taken[row["dataset"]] < most:
            rows.append(row)
            taken[row["dataset"]] += 1
    if not rows:
        known = ", ".join(sorted({row["split"] for row in labels}))
        raise ConfigError(f"{folder} has no rows of split {split!r}, only {known}")
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
    parser.add_argument(
        "--question-share",
        type=float,
        help="what asking the head costs, as a share of t_d (default: as it is measured here)",
    )
    parser.add_argument("--split", default="test", help="rows that are replayed (default: test)")
    parser.add_argument(
        "--fit-split",
        default="dev",
        help="rows that rules are fitted and settings chosen on; held out from the draft "
        "(default: dev)",
    )
    parser.add_argument(
        "--rows",
        type=whole_number,
        default=256,
        help="most rollouts of a prompt set (default: 256)",
    )
    parser.add_argument("--draft", help="the draft, for the head")
    parser.add_argument("--head", help="an acceptance head of that draft")
    parser.add_argument(
        "--limit", type=whole_number, default=20, help="longest draft (default: 20)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/replay"), help="folder for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
