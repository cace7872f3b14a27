"""The verdict on an acceptance head in words: one sentence, and two tables."""

from __future__ import annotations

from collections.abc import Sequence

from eval.analysis.head_verdict import RATIOS, HeadVerdict, Rival
from eval.reporting.rendering import Fold

JUDGES = ("as soon as the token is drawn", "one drafted token later")
"""When a head judges a token, by its lag."""
PREDICTORS = {
    "constant": "the mean label",
    "logit": "logistic of logit max q",
    "cumulative": "q of the token itself",
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


def sentence(verdict: HeadVerdict) -> str:
    """Whether the head pays, with the numbers that decide, or why that is not known.

    It gives of each judgement the rule that decides it: one that the head surely loses to, else one
    that it is not told apart from, else the hardest to beat.
    """
    if verdict.status == "not measured":
        return f"Whether the head pays was not measured: {verdict.reason}."
    judged = ((verdict.replay, "on held-out rollouts"), (verdict.clock, "by the clock"))
    hardest = [(min(each, key=_hardness), where) for each, where in judged if each]
    text = "it saves " + _list([f"{r.saved} over {r.setting} {where}" for r, where in hardest])
    if any(rival.saved.value < 0.0 for rival, _ in hardest):
        text += ", where negative means that it takes longer"
    if not verdict.clock:
        text += f" (by the clock: not measured, {verdict.reason})"
    begins = {
        "pays": "The head pays",
        "does not pay": "The head does not pay",
        "cannot tell": "So few prompts cannot tell whether the head pays",
    }
    text = f"{begins[verdict.status]}: {text}."
    t_draft, t_target = verdict.draft_seconds, verdict.target_seconds
    if verdict.status != "pays" and verdict.replay and t_draft and t_target:
        pays = verdict.pays_from
        least = f"first at {pays:g}" if pays else f"at none from {RATIOS[0]:g} to {RATIOS[-1]:g}"
        text += (
            f" A drafted token takes {t_draft / t_target:.2f} of the time of a target forward here;"
            f" on held-out rollouts the head would surely pay {least}."
        )
    return text


def rivals(verdict: HeadVerdict | None) -> Fold | None:
    """The table of rules without a head, by both judgements, whose settings may differ."""
    if verdict is None:
        return None
    named = {"saved on held-out rollouts": verdict.replay, "saved by the clock": verdict.clock}
    judged = {column: {r.rule: r for r in each} for column, each in named.items() if each}
    if not judged:
        return None
    rules = list(dict.fromkeys(rule for each in judged.values() for rule in each))
    tied = {r.rule for r in (*verdict.replay, *verdict.clock) if r.saved.low <= 0.0}
    return Fold(
        "Does the head pay?",
        "Time that it saves over each rule without a head; negative where it takes longer. Green:"
        " the intervals of its row are above zero.",
        [(column, "") for column in judged],
        [
            (
                _row(rule),
                tuple(
                    f"{each[rule].saved} ({each[rule].setting})" if rule in each else "-"
                    for each in judged.values()
                ),
            )
            for rule in rules
        ],
        first="rule, at its best setting on dev rollouts",
        note=basis(verdict),
        wins=[_row(rule) for rule in rules if rule not in tied],
    )


def basis(verdict: HeadVerdict) -> str:
    """Conditions of the table of rivals."""
    text = ""
    if verdict.replay and verdict.draft_seconds and verdict.target_seconds and verdict.judged_on:
        text = (
            "On held-out rollouts: expected time over every outcome of acceptance on"
            f" {verdict.rollouts[verdict.judged_on]} {verdict.judged_on} rollouts, which neither"
            f" draft nor head was trained on, with {1000 * verdict.draft_seconds:.2f} ms a drafted"
            f" token and {1000 * verdict.target_seconds:.2f} ms a target forward, fitted here; the"
            f" head stops at {verdict.replay_setting}. "
        )
        if verdict.question_seconds:
            asked = [f"{1e6 * s:.0f} of {name}" for name, s in verdict.question_seconds.items()]
            text += f"An answer takes, measured here, {_list(asked)} microseconds. "
    if verdict.clock:
        text += f"By the clock: wall time on the evaluation's prompts of {verdict.method}"
        several = verdict.candidates > 1
        text += f", of {verdict.candidates} measured thresholds. " if several else ". "
    if verdict.judged_on == "dev":
        text += "Settings were chosen on the same rollouts, as labels hold no test rollouts:"
        text += " all figures look better than they are."
    else:
        text += f"All settings were chosen on {verdict.rollouts['dev']} dev rollouts."
    if verdict.left_out:
        text += f" Left out, as labels do not record what they read: {_list(verdict.left_out)}."
    return text + " Brackets hold 95 % intervals; negative means that the head takes longer."


def predictors(verdict: HeadVerdict | None) -> Fold | None:
    """The table of what predicts acceptance, and how well."""
    if verdict is None or not verdict.predictions:
        return None
    rows = []
    for each in verdict.predictions:
        judged = each.scores
        cells = tuple(
            "-" if x is None else f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]"
            for x in (judged.auroc, judged.kl, judged.ece)
        )
        means = f"{judged.mean_predicted:.3f} / {judged.mean_accept:.3f}"
        name = f"{each.predictor} ({PREDICTORS.get(each.predictor, JUDGES[each.lag])})"
        rows.append((name, (*cells, means)))
    return Fold(
        "How well acceptance is predicted",
        f"By head and rivals, on {verdict.judged_on} rollouts of every prompt set.",
        QUALITY_COLUMNS,
        rows,
        first="predicted by",
        note="Rivals were fitted on dev rollouts.",
    )


def _hardness(rival: Rival) -> tuple[bool, bool, float]:
    saved = rival.saved
    return saved.high >= 0.0, saved.low > 0.0, saved.value


def _row(rule: str) -> str:
    return "fixed length" if rule == "fixed" else rule


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
