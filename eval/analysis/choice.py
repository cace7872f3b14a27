"""Which setting of each stopping rule is best on held-out rollouts, before the test set is seen.

A setting that is chosen on the prompts on which it is then judged looks better than it is. Here the
settings that an evaluation measured are compared on the labels of rollouts that neither draft nor
head was trained on, by the expected time of a token: the expectation over all outcomes of what
`eval.analysis.oracle.replay` does with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import datasets
from transformers import PreTrainedModel

from eval.analysis.oracle import (
    DraftLength,
    constant_length,
    until_product_below,
    until_value_below,
)
from eval.analysis.traces import AcceptanceTrace, acceptance_traces
from eval.drafting.stopping.calibration import Calibration
from eval.measuring.metrics import fit_latency
from eval.measuring.results import Method, Results, Run
from heads import AcceptanceHead

ROLLOUTS = 256
"""Most held-out rollouts that are replayed."""


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
    results: Results, rows: datasets.Dataset, draft: PreTrainedModel, head: AcceptanceHead
) -> DevChoice | None:
    """Replay each chain of an evaluation on held-out labels, at the times that it measured.

    Times are those of one fit over all prompt sets. A rule of entropy cannot be replayed, because
    labels do not record entropies; nor can a cost rule, whose costs change while it decodes.

    Args:
        results: the evaluation.
        rows: labels of held-out rollouts, at least one; the first `ROLLOUTS` are read.
        draft: the draft that made the labels.
        head: its acceptance head.

    Returns:
        None if the evaluation measured no times that tell drafting from verifying.
    """
    runs = {run.method: run for run in results.runs if run.drafter == "chain" and run.lossless}
    chains = [run for run in results.runs if run.drafter in (None, "chain")]
    fit = fit_latency([record for run in chains for record in run.generations])
    if fit is None or not fit.t_target > 0.0:
        return None
    rows = rows.select(range(min(len(rows), ROLLOUTS)))
    traces = acceptance_traces(rows, seed=0, draft=draft, head=head)
    tokens = sum(len(trace.accept_prob) for trace in traces)
    expected = {}
    for name, run in runs.items():
        rule = replayed_rule(run, head.rejection_weight)
        if rule is None:
            continue
        counts = [expected_counts(trace.accept_prob, rule(trace)) for trace in traces]
        rounds, drafted = (sum(column) for column in zip(*counts, strict=True))
        expected[name] = (fit.t_draft * drafted + fit.t_target * rounds) / tokens
    sets = tuple(dict.fromkeys(rows["dataset"]))
    return DevChoice(len(traces), sets, fit.t_draft, fit.t_target, expected)


def replayed_rule(
    method: Method | Run, rejection_weight: float
) -> Callable[[AcceptanceTrace], DraftLength] | None:
    """How long a measured method drafts at each position of a trace, as its decoder decides it.

    Args:
        method: a chain.
        rejection_weight: of the head's training loss. The decoder compares the head's raw output
            with the threshold, a trace records it without the bias of that weight.

    Returns:
        None if a trace does not record what the method's rule reads.
    """
    length, threshold = method.length or 0, method.threshold
    if method.fixed_length:
        return lambda trace: constant_length(length)
    if threshold is None:
        return None
    least, survival = threshold, 1.0 - threshold
    if method.stop == "confidence":
        return lambda trace: until_value_below(trace.q, least, limit=length)
    if method.stop == "cumulative":
        return lambda trace: until_product_below(trace.q, least, limit=length)
    if method.stop == "logit":
        model = Calibration(*(method.parameters.get("calibration") or ()))
        return lambda trace: until_product_below(
            [model.accept(q) for q in trace.q_max], survival, limit=length
        )
    if method.stop == "head":
        return lambda trace: until_product_below(
            [a / (a + rejection_weight * (1.0 - a)) for a in trace.head],
            survival,
            limit=length,
            lag=1,
        )
    return None


def expected_counts(accept_prob: Sequence[float], draft_length: DraftLength) -> tuple[float, float]:
    """Expected rounds and drafted tokens of a replay, over all outcomes of all tokens.

    Args:
        accept_prob: (n,) the probability that the draft's token at each position is accepted.
        draft_length: the stopping rule.

    Returns:
        Rounds, drafted tokens; the replay emits n tokens whatever the outcomes.
    """
    n = len(accept_prob)
    begins = [1.0] + [0.0] * n  # the probability that a round begins at a position
    rounds = drafted = 0.0
    for position in range(n):
        reached = begins[position]
        length = draft_length(position, n - position - 1)
        rounds += reached
        drafted += reached * length
        for depth in range(length):
            accept = accept_prob[position + depth]
            begins[position + depth + 1] += reached * (1.0 - accept)
            reached *= accept
        begins[position + length + 1] += reached
    return rounds, drafted
