"""Heads and rules without training, replayed along recorded rollouts by exact expectation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import logit
from torch import Tensor

from benchmarks.papers.replay import (
    Counts,
    Times,
    expected_counts,
    oracle_counts,
    replayed,
    saving,
)
from eval.analysis.traces import Traces, acceptance_traces, record_head
from eval.drafting.stopping import STOPPING_RULES, StoppingRule, fit_rules
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import Reals, RecordedHead
from eval.drafting.stopping.thresholds import Fixed, Head
from eval.measuring.intervals import Interval, resamples
from heads import BaseHead
from heads.loss import soft_auroc

if TYPE_CHECKING:
    import datasets

    from benchmarks.head_figures.data import Data

FEW = tuple(h for h in Head.grid if 0.25 < h < 0.75)
"""Thresholds that are tried for the many heads of ablation and curve."""
AUROC_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows of one domain.

    Attributes:
        rows: the labels.
        data: whose draft is run along them for a head.
        traces: without a head.
    """

    rows: datasets.Dataset
    data: Data
    traces: Traces

    @classmethod
    def of(cls, data: Data, rows: datasets.Dataset) -> Recorded:
        """Read the labels."""
        return cls(rows, data, acceptance_traces(rows))

    @property
    def prompts(self) -> Sequence[str]:
        """(R,) which prompt each row is of."""
        return list(self.rows["example_id"])

    @property
    def accept(self) -> Tensor:
        """(n,) the labels of all tokens in one line."""
        return self.line(self.traces.accept)

    def line(self, values: Reals) -> Tensor:
        """(R, N) values of tokens in one line, (n,)."""
        return torch.from_numpy(values[self.traces.inside])

    def logits(self, head: BaseHead) -> Tensor:
        """(n,) raw logits of a head."""
        recorded = self.with_head(head).tokens.head
        assert recorded is not None
        return self.line(recorded.logits)

    def with_head(self, head: BaseHead) -> Traces:
        """The traces with what a head says of their tokens."""
        draft, sampling = self.data.draft, self.data.sampling
        recorded = record_head(self.rows, head, draft=draft, sampling=sampling)
        return replace(self.traces, tokens=replace(self.traces.tokens, head=recorded))

    def auroc(self, scores: Tensor) -> Interval:
        """Of scores (n,), with soft labels; resampled by prompt."""
        sizes = self.traces.tokens.lengths
        row = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(scores.numpy(), kind="stable")
        accept, row = self.accept.double().numpy()[order], row[order]

        def area(times: Reals) -> float:
            """With each row counted so often; ties between tokens count as ordered."""
            weight = times[row]
            accepted, rejected = weight * accept, weight * (1.0 - accept)
            below = rejected.cumsum() - rejected
            total = accepted.sum() * rejected.sum()
            return float((accepted * (below + 0.5 * rejected)).sum() / total)

        value = soft_auroc(scores, self.accept)
        assert value is not None
        many = [area(times) for times in resamples(len(sizes))[1 : 1 + AUROC_RESAMPLES]]
        low, high = np.quantile(many, (0.025, 0.975))
        return Interval(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rule at the setting that was chosen for it.

    Attributes:
        setting: in words.
        counts: expected counts of each test row.
    """

    setting: str
    counts: Counts


def tuned(rules: Sequence[StoppingRule], dev: Traces, test: Traces, times: Times) -> Replayed:
    """The rule that takes least time on the dev rows, on the test rows."""

    def counts(rule: StoppingRule, traces: Traces) -> Counts:
        found = replayed(rule, traces, times)
        assert found is not None
        return found

    best = min(rules, key=lambda rule: counts(rule, dev).seconds_per_token(times))
    setting = f"{getattr(best, best.varies):g}" if best.varies else ""
    return Replayed(setting, counts(best, test))


def best_length(test: Traces, times: Times) -> Replayed:
    """The fixed length that takes least time on the test rows themselves: no other is stronger."""
    return tuned(Fixed.settings(), test, test, times)


def with_head(
    head: BaseHead,
    dev: Recorded,
    test: Recorded,
    times: Times,
    thresholds: Sequence[float] = Head.grid,
) -> Replayed:
    """The threshold rule with a head, at the best of some thresholds."""
    rules = [Head(threshold=h) for h in thresholds]
    return tuned(rules, dev.with_head(head), test.with_head(head), times)


def every_rule(dev: Traces, test: Traces, times: Times) -> dict[str, Replayed]:
    """Every rule that can be replayed, the perfect ones and the oracle.

    Rules are fitted, and their settings chosen, on the domain's dev rows; cost rules have no
    setting. The fixed length is the best on the test rows themselves.
    """
    rules = [rule for kind in STOPPING_RULES.values() for rule in kind.settings()]
    fitted = fit_rules([rule() for rule in STOPPING_RULES.values()], dev.tokens, dev.accept)
    tried = [(title(rule), rule.with_fit(fitted)) for rule in rules]
    best: dict[str, tuple[float, Replayed]] = {}
    for of_dev, of_test, named in (
        (dev, test, tried),
        *((perfect(dev, lag), perfect(test, lag), of_lag) for lag, of_lag in PERFECT.items()),
    ):
        for name, rule in named:
            on_dev, on_test = (replayed(rule, each, times) for each in (of_dev, of_test))
            if on_dev is None or on_test is None:  # it reads what was not recorded
                continue
            seconds = on_dev.seconds_per_token(times)
            if name not in best or seconds < best[name][0]:
                best[name] = seconds, Replayed(rule.label, on_test)
    alone = expected_counts(test, np.zeros_like(test.tokens.most()))
    bounds = {"oracle": Replayed("", oracle_counts(test)), "plain": Replayed("", alone)}
    found = {name: of_family for name, (_, of_family) in best.items()}
    return {**bounds, **found, "fixed": best_length(test, times)}


def title(rule: StoppingRule) -> str:
    """What its settings are compared under: its name, and whether it reads a head at will."""
    return rule.name + (" with head" if rule.reads_head and not rule.needs_head else "")


PERFECT: Mapping[int, Sequence[tuple[str, StoppingRule]]] = {
    1: [("perfect head", rule) for rule in Head.settings()],
    0: [
        *(("perfect, no lag", rule) for rule in Head.settings()),
        ("perfect, no lag, cost", Cost()),
    ],
}
"""Lag -> the rules of a head without error, by name."""


def perfect(traces: Traces, lag: int) -> Traces:
    """The traces with a head that knows the acceptance probabilities, late by its lag."""
    head = RecordedHead(logit(traces.accept), lag=lag)
    return replace(traces, tokens=replace(traces.tokens, head=head))


def together(counts: Sequence[Counts]) -> Counts:
    """Those of several seeds on the same rollouts, one after the other."""
    names = ("tokens", "n_target", "n_draft", "n_discarded")
    return Counts(*(np.concatenate([getattr(each, name) for each in counts]) for name in names))


def of_rules(results: Mapping[str, Replayed], best: Counts, times: Times) -> dict[str, Any]:
    """A row for each rule."""
    return {
        name: {
            "setting": result.setting,
            "seconds_per_token": result.counts.seconds_per_token(times),
            "tokens_per_round": float(result.counts.tokens.sum() / result.counts.n_target.sum()),
            "discard_rate": float(result.counts.n_discarded.sum() / result.counts.tokens.sum()),
            "saving_over_best_k": asdict(saving(result.counts, best, times)),
        }
        for name, result in results.items()
    }
