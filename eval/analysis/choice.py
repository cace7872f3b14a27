"""Which setting of each stopping rule is best on held-out rollouts, before the test set is seen.

A setting that is chosen on the prompts on which it is then judged looks better than it is. Here the
settings that an evaluation measured are compared on the labels of rollouts that neither draft nor
head was trained on, by the expected time of a token (`eval.analysis.expectation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from eval.analysis.expectation import Counts, Traces, expected_counts
from eval.analysis.replay import cost_rule_counts
from eval.drafting.stopping import StoppingRule
from eval.drafting.stopping.cost import Cost
from eval.measuring.metrics import LatencyFit, fit_latency
from eval.measuring.results import Results, Run
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:  # what was chosen is read without torch
    import datasets
    from transformers import PreTrainedModel

    from heads import BaseHead

ROLLOUTS = 256
"""Most held-out rollouts of a prompt set that are replayed."""
SAMPLER = tuple(field.name for field in fields(SamplingConfig))


@dataclass(frozen=True, slots=True)
class DevChoice:
    """What the settings that an evaluation measured cost on held-out rollouts.

    Args:
        rollouts: how many were replayed.
        datasets: the prompt sets that they are of.
        draft_seconds: t_d, seconds a drafted token, as the evaluation measured it.
        target_seconds: t_t, seconds a round.
        expected: name of a method -> expected seconds a token. Methods that labels cannot replay
            are missing.
    """

    rollouts: int
    datasets: tuple[str, ...]
    draft_seconds: float
    target_seconds: float
    expected: Mapping[str, float]


def choose_on_dev(
    results: Results, rows: datasets.Dataset, draft: PreTrainedModel, head: BaseHead
) -> DevChoice | None:
    """Replay each chain of an evaluation on held-out labels, at the times that it measured.

    Times are those of one fit over all prompt sets. A cost rule that measured its costs while it
    decoded is replayed with these.

    Args:
        results: the evaluation.
        rows: labels of held-out rollouts, at least one; the first `ROLLOUTS` of each prompt set are
            read.
        draft: the draft that made the labels.
        head: its acceptance head.

    Returns:
        None if the evaluation measured no times that tell drafting from verifying.
    """
    from eval.analysis.traces import acceptance_traces

    if measured_times(results) is None:
        return None
    rows = rows.select(_first(rows["dataset"]))
    # What was decoded with, which need not be what the head was trained for.
    used: dict[str, Any] = next((run.sampling for run in results.runs), {})
    sampling = SamplingConfig(**{name: used[name] for name in SAMPLER if name in used})
    traces = acceptance_traces(rows, draft=draft, sampling=sampling, head=head)
    return choose(results, traces, rows["dataset"])


def choose(results: Results, traces: Traces, names: Sequence[str]) -> DevChoice | None:
    """The same, of traces that were recorded already.

    Methods of transformers' own loop are ranked as the rule that they follow, with our times.

    Args:
        results: the evaluation.
        traces: of held-out rollouts, with the head.
        names: the prompt set of each rollout.
    """
    fit = measured_times(results)
    if fit is None:
        return None
    rules = {
        run.method: rule_of(run)
        for run in results.runs
        if run.drafter in ("chain", "transformers") and run.lossless
    }
    expected = {}
    for name, rule in rules.items():
        counts = None if rule is None else _counts(rule, traces, fit)
        if counts is not None:
            expected[name] = counts.seconds_per_token(fit.t_draft, fit.t_target)
    sets = tuple(dict.fromkeys(names))
    return DevChoice(len(names), sets, fit.t_draft, fit.t_target, expected)


def _first(names: Sequence[str]) -> list[int]:
    """Indices of the first `ROLLOUTS` rollouts of each prompt set."""
    taken: Counter[str] = Counter()
    kept = []
    for index, name in enumerate(names):
        if taken[name] < ROLLOUTS:
            taken[name] += 1
            kept.append(index)
    return kept


def _counts(rule: StoppingRule, traces: Traces, fit: LatencyFit) -> Counts | None:
    if isinstance(rule, Cost) and not (rule.draft_seconds and rule.token_seconds):
        times = {"draft_seconds": fit.t_draft, "target_seconds": fit.t_target}
        return cost_rule_counts(rule, traces, **times)
    lengths = rule.recorded_lengths(traces.tokens)
    return None if lengths is None else expected_counts(traces, lengths)


def measured_times(results: Results) -> LatencyFit | None:
    """t_d and t_t of all chains of an evaluation; None if they cannot be told apart."""
    chains = [run for run in results.runs if run.drafter in (None, "chain")]
    fit = fit_latency([record for run in chains for record in run.generations])
    return None if fit is None or not fit.t_target > 0.0 else fit


def rule_of(run: Run) -> StoppingRule | None:
    """The stopping rule that a measured method decoded with; None for rules unknown here."""
    if run.rule is None:
        return None
    stored = {"threshold": run.threshold, "length": run.length, "limit": run.length}
    stored |= {**run.parameters, "head": run.head is not None}
    known = {name: value for name, value in stored.items() if name in run.rule.model_fields}
    return run.rule.model_validate({n: value for n, value in known.items() if value is not None})
