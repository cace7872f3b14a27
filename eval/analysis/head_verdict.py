"""Verdict on an acceptance head: how well it predicts, and whether stopping by it pays.

Rivals, the rules that need no head, are fitted on dev rollouts, and every rule's setting is chosen
there by the expected time of a token. Then the head is judged twice: on test rollouts, by exact
expectation over all outcomes of acceptance with every setting of a grid, and by the clock, on the
evaluation's prompts with the settings that were measured. Savings are shares of a rival's time;
positive means that the head takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from eval.analysis.expectation import Counts, Traces, expected_counts
from eval.analysis.prediction import Reals, Scores, scores
from eval.analysis.replay import (
    COST_RULE,
    RuleResult,
    cost_rule_counts,
    fit_all_rules,
    replay_rules,
    saving,
)
from eval.drafting.stopping import STOPPING_RULES
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.logistic import UNFITTED, Calibration, fit_logistic
from eval.drafting.stopping.numbers import Network, recorded_numbers
from eval.measuring.intervals import Interval
from eval.measuring.metrics import LatencyFit, fit_latency
from eval.measuring.pooled import PooledRow, pool
from eval.measuring.records import Strict
from eval.measuring.results import Results
from specdata.errors import ManifestError
from specdata.storage.files import write_json

if TYPE_CHECKING:  # a stored verdict is read without torch
    import datasets
    from transformers import PreTrainedModel

    from eval.runtime.engines import Engine
    from heads import BaseHead
    from specdata.sampling import SamplingConfig

VERDICT = "verdict.json"
HEAD = "head"
ASSISTED = "assisted"
"""The rule of transformers' own loop among the rivals, whatever it stops by."""
RIVALS = tuple(name for name, rule in STOPPING_RULES.items() if not rule.needs_head)
"""Rules that need no head; what is replayed beside them is nobody's choice."""
RATIOS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Of the time of a drafted token to that of a target forward."""
ROLLOUTS = 256
"""Most rollouts of a prompt set and split that are read."""
DECISION_POINTS = {
    "drawn": "as soon as the token is drawn",
    "consumed": "one drafted token later",
    "before": "before the token is drawn",
}
PREDICTORS = {
    "constant": "the mean label",
    "logit": "logistic of logit max q",
    "margin": "logistic of the top-2 margin",
    "cumulative": "q of the token itself",
    "numbers": "small network on the draft's numbers",
}
QUALITY_COLUMNS = (
    (
        "AUROC",
        "Chance that an accepted token was given a higher probability than a rejected one; 0.5 is"
        " chance, brackets hold the 95 % bootstrap interval over prompts.",
    ),
    ("KL", "Mean binary KL of label and prediction in nats; lower is better, 0 is perfect."),
    (
        "ECE",
        "Expected calibration error: how far predictions are from the labels of the tokens that"
        " were given them, in 15 bins; lower is better.",
    ),
    ("predicted / accepted", "Mean prediction and mean label."),
)
"""Heading of a column of the table of predictors, and how to read it."""
DecisionPoint = Literal["before", "drawn", "consumed"]
Status = Literal["pays", "does not pay", "cannot tell", "not measured"]


class Prediction(Strict):
    """A predictor of acceptance, judged on rollouts of every prompt set.

    Attributes:
        predictor: "head" or one of `PREDICTORS`, each fitted on dev.
        point: what is known of the token: "before" it is drawn, when the label is the ex-ante
            sum of min(p, q); "drawn"; or "consumed" by the draft, one drafted token later. Then the
            label is min(1, p/q).
        scores: of its calibrated probabilities.
    """

    predictor: str
    point: DecisionPoint
    scores: Scores


class Rival(Strict):
    """A rule that needs no head, at its best setting.

    Attributes:
        rule: its name.
        setting: the one that took the least time on dev rollouts, named with its rule; by the clock
            a measured method.
        candidates: how many it was chosen from.
        saved: the share of this rule's time that stopping by the head saves, over rollouts of every
            prompt set, by the clock over all prompt sets; negative where the head takes longer.
    """

    rule: str
    setting: str
    candidates: int
    saved: Interval


class HeadVerdict(Strict):
    """Everything that is known of how good a head is.

    Attributes:
        status: it pays if it surely saves time over every rival on test rollouts and the clock does
            not gainsay it, does not if it surely loses to one; "surely" is a 95 % interval.
        sentence: the same in words, with the numbers that decide.
        judged_on: the split that figures are of: test, or dev where labels have no test rollouts,
            so that rivals and settings look better than they are.
        rollouts: split -> how many were read.
        predictions: one for each predictor and decision point.
        draft_seconds: t_d, seconds of a drafted token, as the evaluation measured it.
        target_seconds: t_t, seconds of a round.
        question_seconds: rule -> of asking it about a drafted token, measured beside.
        replay_setting: the head's threshold that is best on dev of a grid.
        replay: rivals by exact expectation; the fixed length first, then from the hardest to beat.
        pays_from: least t_d / t_t of `RATIOS` at which it surely saves time over all of them.
        method: the head's method that is best on dev, of those that were measured.
        threshold: of that method.
        candidates: how many thresholds it was chosen from.
        verifier: acceptance rule of that method and of every rival by the clock.
        clock: rivals by wall time, in the same order.
        left_out: measured rules whose setting could not be chosen on dev.
    """

    status: Status
    sentence: str
    judged_on: Literal["test", "dev"] | None = None
    rollouts: dict[str, int] = Field(default_factory=dict)
    predictions: list[Prediction] = Field(default_factory=list)
    draft_seconds: float | None = None
    target_seconds: float | None = None
    question_seconds: dict[str, float] = Field(default_factory=dict)
    replay_setting: str | None = None
    replay: list[Rival] = Field(default_factory=list)
    pays_from: float | None = None
    method: str | None = None
    threshold: float | None = None
    candidates: int = 0
    verifier: str | None = None
    clock: list[Rival] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)

    def columns(self) -> list[str]:
        """Headings of the table of rivals."""
        exact = ["saved on held-out rollouts"] if self.replay else []
        return exact + (["saved by the clock"] if self.clock else [])

    def rows(self) -> list[tuple[str, tuple[str, ...]]]:
        """The table of rivals: rule, and cells in the order of the columns.

        Settings may differ between the two judgements.
        """
        judged = [
            {rival.rule: rival for rival in each} for each in (self.replay, self.clock) if each
        ]
        return [
            (
                _row(rule),
                tuple(
                    f"{each[rule].saved} ({each[rule].setting})" if rule in each else "-"
                    for each in judged
                ),
            )
            for rule in dict.fromkeys(rule for each in judged for rule in each)
        ]

    def beaten(self) -> list[str]:
        """Rows of that table in which every interval lies above zero."""
        judged = [*self.replay, *self.clock]
        open_ = {rival.rule for rival in judged if rival.saved.low <= 0.0}
        return [_row(rival.rule) for rival in judged if rival.rule not in open_]

    def basis(self) -> str:
        """Conditions of the table, in words."""
        text = ""
        if self.replay and self.draft_seconds and self.target_seconds and self.judged_on:
            text = (
                "On held-out rollouts: expected time over every outcome of acceptance on"
                f" {self.rollouts[self.judged_on]} {self.judged_on} rollouts, which neither draft"
                f" nor head was trained on, with {1000 * self.draft_seconds:.2f} ms a drafted token"
                f" and {1000 * self.target_seconds:.2f} ms a target forward, fitted here; the"
                f" head stops at {self.replay_setting}. "
            )
            if self.question_seconds:
                asked = [f"{1e6 * s:.0f} of {name}" for name, s in self.question_seconds.items()]
                text += f"An answer takes, measured here, {_list(asked)} microseconds. "
        if self.clock:
            text += f"By the clock: wall time on the evaluation's prompts of {self.method}"
            several = self.candidates > 1
            text += f", of {self.candidates} measured thresholds. " if several else ". "
        if not text:
            return ""
        if self.judged_on == "dev":
            text += "Settings were chosen on the same rollouts, as labels hold no test rollouts:"
            text += " all figures look better than they are."
        else:
            text += f"All settings were chosen on {self.rollouts['dev']} dev rollouts."
        if self.left_out:
            text += f" Left out, as labels do not record what they read: {_list(self.left_out)}."
        return text + " Brackets hold 95 % intervals; negative means that the head takes longer."

    def quality_rows(self) -> list[tuple[str, tuple[str, ...]]]:
        """The table of predictors: name, and cells of `QUALITY_COLUMNS`."""
        found = []
        for each in self.predictions:
            judged = each.scores
            cells = tuple(
                "-" if x is None else f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]"
                for x in (judged.auroc, judged.kl, judged.ece)
            )
            means = f"{judged.mean_predicted:.3f} / {judged.mean_accept:.3f}"
            known = PREDICTORS.get(each.predictor, DECISION_POINTS[each.point])
            name = f"{each.predictor} ({known})"
            found.append((name, (*cells, means)))
        return found

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> HeadVerdict | None:
        """A stored value; None if there is none.

        Raises:
            ManifestError: if the file is damaged.
        """
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
    return HeadVerdict(
        status="not measured", sentence=f"Whether the head pays was not measured: {reason}."
    )


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

    taken: dict[tuple[str, str], list[int]] = {}
    for index, key in enumerate(zip(labels["split"], labels["dataset"], strict=True)):
        taken.setdefault(key, []).append(index)
    rows, traces = {}, {}
    for split in ("dev", "test"):
        chosen = [i for key, own in taken.items() if key[0] == split for i in own[:ROLLOUTS]]
        if chosen:
            rows[split] = labels.select(sorted(chosen))
            traces[split] = acceptance_traces(
                rows[split], draft=draft, sampling=sampling, head=head
            )
    if "dev" not in traces:
        return not_measured("no held-out labels to choose the threshold on")
    judged = rows.get("test", rows["dev"])
    return judge_head(
        results,
        traces["dev"],
        traces.get("test"),
        prompts=judged["example_id"][:],
        question_seconds=lambda fitted: question_seconds(draft, head, sampling, fitted, engine)[0],
    )


def judge_head(
    results: Results,
    dev: Traces,
    test: Traces | None,
    *,
    prompts: Sequence[str],
    question_seconds: Callable[[Mapping[str, Any]], dict[str, float]] = lambda fitted: {},
) -> HeadVerdict:
    """Judge a head by traces that it was recorded in, and by an evaluation.

    Args:
        results: the evaluation.
        dev: what rivals are fitted and settings chosen on.
        test: what is judged on; None judges on dev.
        prompts: which prompt each rollout is of that is judged on.
        question_seconds: measures, with what rules fitted, rule -> seconds of asking it.
    """
    judged = dev if test is None else test
    fitted = fit_all_rules(dev)
    known: dict[str, Any] = {
        "judged_on": "dev" if test is None else "test",
        "rollouts": {"dev": len(dev.accept)} | ({"test": len(test.accept)} if test else {}),
        "predictions": list(_predictions(dev, judged, fitted, prompts)),
    }
    fit = measured_times(results)
    if fit is None:
        reason = "speeds were not measured"
    else:
        times = {"draft_seconds": fit.t_draft, "target_seconds": fit.t_target}
        questions = question_seconds(fitted)
        on_dev, on_judged = (
            replay_rules(
                traces,
                fitted,
                draft_seconds=fit.t_draft,
                target_seconds=fit.t_target,
                questions=questions,
            )
            for traces in (dev, judged)
        )
        known |= times | {"question_seconds": questions}
        known |= compare(on_dev, on_judged, prompts, **times)
        for ratio in RATIOS if known.get("replay") else ():
            dearer = {**times, "draft_seconds": ratio * fit.t_target}
            rivals = compare(on_dev, on_judged, prompts, **dearer)["replay"]
            if all(rival.saved.low > 0.0 for rival in rivals):
                known["pays_from"] = ratio
                break
        by_clock, reason = _by_clock(results, expected_seconds(results, dev, fit, questions))
        known |= by_clock
    replay, clock = known.get("replay", []), known.get("clock", [])
    status, sentence = _decide(replay, clock, reason)
    if fit and replay and status != "pays":
        pays = known.get("pays_from")
        least = f"first at {pays:g}" if pays else f"at none from {RATIOS[0]:g} to {RATIOS[-1]:g}"
        sentence += (
            f" A drafted token takes {fit.t_draft / fit.t_target:.2f} of the time of a target"
            f" forward here; on held-out rollouts the head would surely pay {least}."
        )
    return HeadVerdict(status=status, sentence=sentence, **known)


def measured_times(results: Results) -> LatencyFit | None:
    """t_d and t_t of all chains of an evaluation that ask no head, or else of all that do.

    None if they cannot be told apart.
    """
    chains = [r for r in results.runs if r.method.decoder == "plain" or r.method.is_chain]
    fit = None
    for runs in ([run for run in chains if not run.head], chains):
        fit = fit or fit_latency([record for run in runs for record in run.generations])
    return None if fit is None or not fit.t_target > 0.0 else fit


def expected_seconds(
    results: Results,
    traces: Traces,
    fit: LatencyFit,
    questions: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Method -> expected seconds a token on rollouts, of every chain that labels can replay.

    Methods of transformers' own loop count as the rule that they follow, with our times. A cost
    rule that measured its costs while it decoded is replayed with these.
    """
    times = {"draft_seconds": fit.t_draft, "target_seconds": fit.t_target}
    expected = {}
    for run in results.runs:
        method, rule = run.method, run.method.stop
        replayed = method.is_chain or method.decoder == "assisted"
        if run.name in expected or not replayed or not method.lossless:
            continue
        counts: Counts | None = None
        asked = "head" if rule.reads_head else "logit" if isinstance(rule, Cost) else rule.name
        question = (questions or {}).get(asked, 0.0)
        if isinstance(rule, Cost) and not (rule.draft_seconds and rule.token_seconds):
            counts = cost_rule_counts(rule, traces, **times, question=question)
        elif (lengths := rule.recorded_lengths(traces.tokens)) is not None:
            counts = replace(expected_counts(traces, lengths), question=question)
        if counts is not None:
            expected[run.name] = counts.seconds_per_token(**times)
    return expected


def compare(
    dev: Sequence[RuleResult],
    judged: Sequence[RuleResult],
    prompts: Sequence[str],
    *,
    draft_seconds: float,
    target_seconds: float,
) -> dict[str, Any]:
    """Choose each rule's setting on dev and compare the head with every other on other rollouts.

    Args:
        dev: rules at all their settings, replayed on dev rollouts.
        judged: the same on the R rollouts that are judged on.
        prompts: (R,) equal for rollouts of one prompt, which are resampled together.
        draft_seconds: t_d.
        target_seconds: t_t.

    Returns:
        `replay_setting` and `replay` of a verdict; nothing if no threshold of a head, or no fixed
        length, was replayed.
    """
    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}
    known = {(result.family, result.setting): result.counts for result in judged}
    settings: dict[str, list[RuleResult]] = {}
    for result in dev:
        key = result.family, result.setting
        if key in known and key != (HEAD, COST_RULE):
            settings.setdefault(result.family, []).append(result)
    best = {
        family: min(each, key=lambda result: result.counts.seconds_per_token(**times))
        for family, each in settings.items()
    }
    if HEAD not in best or "fixed" not in best:
        return {}
    head = best[HEAD]
    rivals = [
        Rival(
            rule=family,
            setting=(f"{family} " if family != "fixed" else "") + best[family].setting,
            candidates=len(each),
            saved=saving(
                known[head.family, head.setting],
                known[family, best[family].setting],
                **times,
                prompts=prompts,
            ),
        )
        for family, each in settings.items()
        if family in RIVALS
    ]
    return {"replay_setting": head.setting, "replay": _hardest_first(rivals)}


def _hardest_first(rivals: Sequence[Rival]) -> list[Rival]:
    """The fixed length, then the others from the hardest to beat."""
    return sorted(rivals, key=lambda rival: (rival.rule != "fixed", rival.saved.value))


def _by_clock(results: Results, expected: Mapping[str, float]) -> tuple[dict[str, Any], str]:
    """The head's part of a verdict by wall time, and why there is none.

    Compared are lossless chains that were measured on every prompt set: the head's own rule, rules
    that read no head, and transformers' own loop.
    """
    families: dict[str, dict[str, PooledRow]] = {}
    for row in pool(results):
        method, needs_head = row.method, row.method.stop.needs_head
        assisted = method.decoder == "assisted"
        if not method.lossless or not (method.is_chain or assisted):
            continue
        if needs_head or row.runs[0].head is None:
            family = ASSISTED if assisted else HEAD if needs_head else method.stop.name
            families.setdefault(family, {})[row.name] = row

    def chosen(settings: Mapping[str, PooledRow]) -> str | None:
        if len(settings) == 1:
            return next(iter(settings))
        ranked = bool(settings) and all(name in expected for name in settings)
        return min(settings, key=lambda name: expected[name]) if ranked else None

    heads = families.pop(HEAD, {})
    name = chosen(heads)
    if name is None:
        return {}, "no threshold was measured that held-out labels can rank"
    head = heads[name].method
    rivals, left_out = [], []
    for rule, settings in families.items():
        # Transformers' own loop has no other verifier than its own.
        same = {
            setting: row
            for setting, row in settings.items()
            if rule == ASSISTED or row.method.verifier == head.verifier
        }
        rival = chosen(same)
        if rival is not None:
            ratio = heads[name].over(same[rival], "tokens_per_second")
            share = Interval(*(1.0 - 1.0 / x for x in (ratio.value, ratio.low, ratio.high)))
            rivals.append(Rival(rule=rule, setting=rival, candidates=len(same), saved=share))
        elif same:
            left_out.append(rule)
    if not any(rival.rule == "fixed" for rival in rivals):
        return {}, f"no fixed length was measured with {head.verifier} verification"
    found = {
        "method": name,
        "threshold": head.columns()["threshold"],
        "candidates": len(heads),
        "verifier": head.verifier,
        "clock": _hardest_first(rivals),
        "left_out": left_out,
    }
    return found, ""


def _decide(replay: Sequence[Rival], clock: Sequence[Rival], reason: str) -> tuple[Status, str]:
    """Status and sentence; `reason` says why there is no judgement by the clock.

    The sentence gives of each judgement the rule that decides it: one that the head surely loses
    to, else one that it is not told apart from, else the hardest to beat.
    """
    if not (replay or clock):
        verdict = not_measured(reason)
        return verdict.status, verdict.sentence
    judged = ((replay, "on held-out rollouts"), (clock, "by the clock"))
    hardest = [(min(each, key=_hardness), where) for each, where in judged if each]
    said = "it saves " + _list([f"{r.saved} over {r.setting} {where}" for r, where in hardest])
    if any(rival.saved.value < 0.0 for rival, _ in hardest):
        said += ", where negative means that it takes longer"
    if not clock:
        said += f" (by the clock: not measured, {reason})"
    if any(rival.saved.high < 0.0 for rival in (*replay, *clock)):
        return "does not pay", f"The head does not pay: {said}."
    # An exact expectation is of forwards and questions alone: the clock has to confirm its sign
    # over the best fixed length and the hardest other rule. Without one, the clock decides alone.
    tied = any(rival.saved.low <= 0.0 for rival in replay or clock)
    if tied or any(rival.saved.value < 0.0 for rival in clock[:2]):
        return "cannot tell", f"So few prompts cannot tell whether the head pays: {said}."
    return "pays", f"The head pays: {said}."


def _hardness(rival: Rival) -> tuple[bool, bool, float]:
    saved = rival.saved
    return saved.high >= 0.0, saved.low > 0.0, saved.value


def _row(rule: str) -> str:
    return "fixed length" if rule == "fixed" else rule


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _predictions(
    dev: Traces, judged: Traces, fitted: Mapping[str, Any], prompts: Sequence[str]
) -> Iterator[Prediction]:
    """Every predictor; rollouts of one prompt are resampled together."""
    inside = judged.inside
    number = np.unique(prompts, return_inverse=True)[1].astype(np.int64)
    prompt = np.broadcast_to(number[:, None], inside.shape)
    for predictor, point, predicted in _predictors(dev, judged, fitted):
        label = judged.overlap if point == "before" else judged.accept
        assert label is not None
        found = scores(label[inside], predicted[inside], prompt[inside])
        yield Prediction(predictor=predictor, point=point, scores=found)


def _predictors(
    dev: Traces, judged: Traces, fitted: Mapping[str, Any]
) -> list[tuple[str, DecisionPoint, Reals]]:
    """Name, point and (R, N) probabilities of the head at each of its points, and of its rivals."""
    from scipy.special import expit

    tokens, inside, head = judged.tokens, dev.inside, judged.tokens.head
    assert head is not None
    recorded: tuple[tuple[DecisionPoint, Reals | None], ...]
    recorded = ("drawn", head.drawn), ("consumed", head.consumed), ("before", head.before)
    made = [
        (HEAD, point, head.probabilities(logits, calibrated=True))
        for point, logits in recorded
        if logits is not None and (point != "before" or judged.overlap is not None)
    ]
    if dev.tokens.margin is not None and tokens.margin is not None:
        # Along a rollout there is no position in a draft, so the margin has one model for all.
        margins = dev.tokens.margin[inside]
        intercept, slope = fit_logistic(dev.accept[inside], margins, prior=UNFITTED)
        made.append(("margin", "drawn", np.asarray(expit(intercept + slope * tokens.margin))))
    logit = Calibration(*fitted["calibration"]).accept_all(tokens.q_max)
    made += [("logit", "drawn", logit), ("cumulative", "drawn", tokens.q)]
    numbers = recorded_numbers(tokens)
    if numbers is not None and "network" in fitted:
        made.append(("numbers", "drawn", Network.read(fitted["network"]).accept(numbers)))
    made.append(("constant", "drawn", np.full_like(judged.accept, dev.mean_accept())))
    return made
