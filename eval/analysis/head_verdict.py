"""Verdict on an acceptance head: how well it predicts, and whether stopping by it pays.

Its rivals are what a user could choose instead. The head is judged twice:

- On test rollouts, by exact expectation over all outcomes of acceptance. Rules that need no head
  are fitted on dev rollouts, and every rule's setting is chosen there by the expected time of a
  token.
- By the clock, on the evaluation's prompts. Its rivals are the fastest of each kind in the table
  of the evaluation: fixed lengths, trees, rules that need no head, transformers' own loop, whatever
  verifies them. The best of several measurements is favoured by their noise, and the head's
  threshold is the one chosen on dev rollouts, which no noise of the clock favours. So a head that
  pays does so against the odds; "does not pay" is said a little too readily where many rivals were
  measured.

Savings are shares of a rival's time; positive means that the head takes less.
`eval.reporting.recommendation` says it in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import Field, ValidationError

from eval.analysis.expectation import Counts, Times, Traces
from eval.analysis.prediction import Scores, scores
from eval.analysis.replay import (
    RuleResult,
    every_setting,
    fit_all_rules,
    replay_rules,
    replayed,
    saving,
)
from eval.drafting.stopping import STOPPING_RULES
from eval.drafting.stopping.logistic import Calibration
from eval.measuring.intervals import Interval
from eval.measuring.metrics import fit_latency
from eval.measuring.pooled import PooledRow, pool
from eval.measuring.records import Strict
from eval.measuring.results import Results
from specdata.errors import ConfigError, ManifestError
from specdata.storage.files import write_json

if TYPE_CHECKING:  # a stored verdict is read without torch
    import datasets
    from transformers import PreTrainedModel

    from eval.runtime.engines import Engine
    from heads import BaseHead
    from specdata.sampling import SamplingConfig

VERDICT = "verdict.json"
ASSISTED, TREE = "assisted", "tree"
"""Among the rivals, transformers' own loop, whatever it stops by, and drafts that branch."""
ROLLOUTS = 256
"""Most rollouts of a prompt set and split that are read."""
Status = Literal["pays", "does not pay", "cannot tell", "not measured"]


class Prediction(Strict):
    """A predictor of acceptance, judged on rollouts of every prompt set.

    Attributes:
        predictor: "head"; or "constant" (the mean label), "logit" (the logistic model of max q) or
            "cumulative" (q of the token itself), each fitted on dev.
        lag: tokens that are drafted before it can tell.
        scores: of its calibrated probabilities, against min(1, p/q).
    """

    predictor: str
    lag: int = 0
    scores: Scores


class Rival(Strict):
    """A rule that needs no head, at its best setting.

    Attributes:
        rule: its name.
        setting: the one that took the least time on dev rollouts, named with its rule; by the clock
            the measured method of most tokens a second.
        saved: the share of this rule's time that stopping by the head saves, over rollouts of every
            prompt set, by the clock over all prompt sets; negative where the head takes longer.
    """

    rule: str
    setting: str
    saved: Interval


class HeadVerdict(Strict):
    """Everything that is known of how good a head is.

    Attributes:
        status: see `status_of`.
        reason: why there is no judgement by the clock.
        judged_on: the split that figures are of: test, or dev where labels have no test rollouts,
            so that rivals and settings look better than they are.
        rollouts: split -> how many were read.
        predictions: one for each predictor.
        draft_seconds: t_d, seconds of a drafted token, as the evaluation measured it.
        target_seconds: t_t, seconds of a round.
        question_seconds: rule -> of asking it about a drafted token (`eval.measuring.question`).
        replay_setting: the head's threshold that is best on dev of a grid.
        replay: rivals by exact expectation; the fixed length first, then from the hardest to beat.
        method: the head's method that is best on dev, of those that were measured.
        threshold: of that method.
        candidates: how many measured methods it was chosen from.
        verifier: acceptance rule of that method.
        clock: rivals by wall time, in the same order.
    """

    status: Status
    reason: str = ""
    judged_on: Literal["test", "dev"] | None = None
    rollouts: dict[str, int] = Field(default_factory=dict)
    predictions: list[Prediction] = Field(default_factory=list)
    draft_seconds: float | None = None
    target_seconds: float | None = None
    question_seconds: dict[str, Interval] = Field(default_factory=dict)
    replay_setting: str | None = None
    replay: list[Rival] = Field(default_factory=list)
    method: str | None = None
    threshold: float | None = None
    candidates: int = 0
    verifier: str | None = None
    clock: list[Rival] = Field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> HeadVerdict | None:
        """A stored value; None if there is none."""
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ManifestError(
                f"{path} must be the verdict that an evaluation wrote, but it is damaged: remove"
                " the folder and evaluate again"
            ) from error


def not_measured(reason: str) -> HeadVerdict:
    """A verdict that says why there is none."""
    return HeadVerdict(status="not measured", reason=reason)


def status_of(replay: Sequence[Rival], clock: Sequence[Rival]) -> Status:
    """Whether a head pays, by its savings over rivals on held-out rollouts and by the clock.

    It pays if it surely saves time over every rival, and does not if it surely loses to one;
    "surely" is a 95 % interval that does not hold 0.
    """
    savings = [rival.saved for rival in (*replay, *clock)]
    if not savings:
        return "not measured"
    if any(saved.high < 0.0 for saved in savings):
        return "does not pay"
    return "cannot tell" if any(saved.low <= 0.0 for saved in savings) else "pays"


def head_verdict(
    results: Results,
    labels: datasets.Dataset,
    draft: PreTrainedModel,
    head: BaseHead,
    *,
    sampling: SamplingConfig,
    engine: Engine = "eager",
) -> HeadVerdict:
    """Judge a head by labelled rollouts and by an evaluation.

    Args:
        results: an evaluation of this head.
        labels: of all splits; the first `ROLLOUTS` of each prompt set in dev and test are read.
        draft: the draft that made them.
        head: a head of this draft.
        sampling: how the draft's tokens were drawn.
        engine: of the evaluation, in which a question is timed.
    """
    from eval.analysis.traces import acceptance_traces
    from eval.measuring.question import question_seconds

    rows_of: dict[tuple[str, str], list[int]] = {}
    for index, key in enumerate(zip(labels["split"], labels["dataset"], strict=True)):
        rows_of.setdefault(key, []).append(index)
    rows, traces = {}, {}
    for split in ("dev", "test"):
        first = [i for key, of_set in rows_of.items() if key[0] == split for i in of_set[:ROLLOUTS]]
        if first:
            rows[split] = labels.select(sorted(first))
            try:
                traces[split] = acceptance_traces(
                    rows[split], draft=draft, sampling=sampling, head=head
                )
            except ConfigError as error:
                return not_measured(str(error))
    if "dev" not in traces:
        return not_measured("no held-out labels to choose the threshold on")
    return judge_head(
        results,
        traces["dev"],
        traces.get("test"),
        prompts=rows.get("test", rows["dev"])["example_id"][:],
        questions=question_seconds(draft, head, sampling, every_setting({}), engine)[0]
        if results.timed
        else {},
    )


def judge_head(
    results: Results,
    dev: Traces,
    test: Traces | None,
    *,
    prompts: Sequence[str],
    questions: Mapping[str, Interval],
) -> HeadVerdict:
    """Judge a head by traces that it was recorded in, and by an evaluation.

    Args:
        results: the evaluation.
        dev: what rivals are fitted and settings chosen on.
        test: what is judged on; None judges on dev.
        prompts: which prompt each rollout is of that is judged on.
        questions: a rule's `title` -> seconds of asking it about a drafted token; 0 for others.
    """
    judged = dev if test is None else test
    fitted = fit_all_rules(dev)
    fields: dict[str, Any] = {
        "judged_on": "dev" if test is None else "test",
        "rollouts": {"dev": len(dev.accept)} | ({"test": len(test.accept)} if test else {}),
        "predictions": list(_predictions(dev, judged, fitted, prompts)),
        "reason": "speeds were not measured",
    }
    if (times := measured_times(results)) is not None:
        prices = {rule: price.value for rule, price in questions.items()}
        on_dev, on_judged = (
            replay_rules(traces, fitted, times, prices) for traces in (dev, judged)
        )
        fields |= {**asdict(times), "question_seconds": questions}
        fields |= compare(on_dev, on_judged, prompts, times, questions)
        fields |= by_clock(results, expected_seconds(results, dev, times, prices))
    status = status_of(fields.get("replay", ()), fields.get("clock", ()))
    return HeadVerdict(status=status, **fields)


def measured_times(results: Results) -> Times | None:
    """t_d and t_t of all chains of an evaluation that ask no head, or else of all that do.

    None if they cannot be told apart.
    """
    chains = [r for r in results.runs if r.method.decoder == "plain" or r.method.is_chain]
    for runs in ([run for run in chains if not run.head], chains):
        if (fit := fit_latency([record for run in runs for record in run.generations])) is not None:
            return Times(fit.t_draft, fit.t_target) if fit.t_target > 0.0 else None
    return None


def expected_seconds(
    results: Results, traces: Traces, times: Times, questions: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Method -> expected seconds a token on rollouts, of every chain that stops by a head."""
    expected = {}
    for run in results.runs:
        method, rule = run.method, run.method.stop
        if not (rule.needs_head and method.is_chain and method.lossless):
            continue
        counts = replayed(rule, traces, times, (questions or {}).get(rule.title, 0.0))
        if counts is not None:
            expected[run.name] = counts.seconds_per_token(times)
    return expected


def compare(
    dev: Sequence[RuleResult],
    judged: Sequence[RuleResult],
    prompts: Sequence[str],
    times: Times,
    questions: Mapping[str, Interval] = MappingProxyType({}),
) -> dict[str, Any]:
    """Choose each rule's setting on dev and compare the head with every other on other rollouts.

    Args:
        dev: rules at all their settings, replayed on dev rollouts.
        judged: the same on the R rollouts that are judged on.
        prompts: (R,) equal for rollouts of one prompt, which are resampled together.
        times: t_d and t_t.
        questions: a rule's `title` -> what asking it takes. The interval of a saving holds all that
            theirs hold: it begins with the head at its dearest and the rival at its cheapest.

    Returns:
        `replay_setting` and `replay` of a verdict; nothing if no threshold of a head, or no fixed
        length, was replayed.
    """
    counts = {(result.family, result.setting): result.counts for result in judged}
    settings: dict[str, list[RuleResult]] = {}
    for result in dev:
        if (result.family, result.setting) in counts:
            settings.setdefault(result.family, []).append(result)

    def seconds(result: RuleResult) -> float:
        return result.counts.seconds_per_token(times)

    best = {family: min(each, key=seconds) for family, each in settings.items()}
    # A rule that reads a head if there is one has another title with it.
    rules = {family: STOPPING_RULES[family] for family in best if family in STOPPING_RULES}
    heads = [best[family] for family, rule in rules.items() if rule.needs_head]
    if not heads or "fixed" not in best:
        return {}
    head = min(heads, key=seconds)

    def priced(result: RuleResult, end: str) -> Counts:
        as_counted, price = counts[result.family, result.setting], questions.get(result.family)
        return replace(as_counted, question=getattr(price, end)) if price else as_counted

    def saved(rival: RuleResult, ours: str, its: str) -> Interval:
        return saving(priced(head, ours), priced(rival, its), times, prompts)

    rivals = [
        Rival(
            rule=family,
            setting=f"{'' if family == 'fixed' else family} {best[family].setting}".strip(),
            saved=Interval(
                saved(best[family], "value", "value").value,
                saved(best[family], "high", "low").low,
                saved(best[family], "low", "high").high,
            ),
        )
        for family, rule in rules.items()
        if not rule.needs_head
    ]
    return {"replay_setting": head.setting, "replay": _hardest_first(rivals)}


def _hardest_first(rivals: Sequence[Rival]) -> list[Rival]:
    """The fixed length, then the others from the hardest to beat."""
    return sorted(rivals, key=lambda rival: (rival.rule != "fixed", rival.saved.value))


def by_clock(results: Results, expected: Mapping[str, float]) -> dict[str, Any]:
    """The head's part of a verdict by wall time; or the `reason` why there is none.

    Compared are lossless methods that were measured on every prompt set: the head's own rule at the
    setting that is expected to be fastest, and the fastest of each kind that reads no head.
    """
    heads: list[PooledRow] = []
    kinds: dict[str, list[PooledRow]] = {}
    for row in pool(results):
        method = row.method
        if not (method.lossless and method.uses_draft):
            continue
        if method.stop.needs_head:
            heads.append(row)
        elif row.runs[0].head is None:
            is_theirs = method.decoder == "assisted"
            kind = ASSISTED if is_theirs else TREE if method.branches else method.stop.name
            kinds.setdefault(kind, []).append(row)
    if not heads:
        return {"reason": "no threshold of a head was measured"}
    if "fixed" not in kinds:
        return {"reason": "no fixed length was measured"}
    # Replay knows no verifier: of those of one threshold the clock decides, as among rivals.
    head = min(heads, key=lambda row: (expected[row.name], -row.speed()))
    rivals = []
    for kind, rows in kinds.items():
        rival = max(rows, key=PooledRow.speed)
        ratio = head.over(rival, "tokens_per_second")
        share = Interval(*(1.0 - 1.0 / x for x in (ratio.value, ratio.low, ratio.high)))
        rivals.append(Rival(rule=kind, setting=rival.name, saved=share))
    return {
        "reason": "",
        "method": head.name,
        "threshold": head.method.columns()["threshold"],
        "candidates": len(heads),
        "verifier": head.method.verifier,
        "clock": _hardest_first(rivals),
    }


def _predictions(
    dev: Traces, judged: Traces, fitted: Mapping[str, Any], prompts: Sequence[str]
) -> Iterator[Prediction]:
    """The head and its rivals; rollouts of one prompt are resampled together."""
    from scipy.special import expit

    tokens, inside, head = judged.tokens, judged.inside, judged.tokens.head
    assert head is not None
    number = np.unique(prompts, return_inverse=True)[1].astype(np.int64)
    prompt = np.broadcast_to(number[:, None], inside.shape)
    of_head = np.asarray(expit(head.logits + math.log(head.rejection_weight)))
    logit = np.asarray(Calibration(*fitted["calibration"]).accept(cast(Any, tokens.q_max)))
    constant = np.full_like(judged.accept, dev.mean_accept())
    predicted = [
        ("head", head.lag, of_head),
        ("logit", 0, logit),
        ("cumulative", 0, tokens.q),
        ("constant", 0, constant),
    ]
    for name, lag, chances in predicted:
        judged_as = scores(judged.accept[inside], chances[inside], prompt[inside])
        yield Prediction(predictor=name, lag=lag, scores=judged_as)
