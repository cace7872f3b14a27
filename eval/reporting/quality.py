"""Tables of how good a head's probabilities are."""

from __future__ import annotations

from dataclasses import dataclass

from eval.analysis.quality import Prediction, Quality
from eval.analysis.rivals import HEAD
from eval.measuring.intervals import Interval
from eval.reporting.rendering import NOT_MEASURED

# Heading of a column, and how to read it.
QUALITY_COLUMNS = (
    (
        "AUROC",
        "Chance that an accepted token was given a higher probability than a rejected one; 0.5 is"
        " chance, brackets hold the 95 % bootstrap interval over prompts.",
    ),
    ("KL", "Mean binary KL of label and prediction in nats; lower is better, 0 is perfect."),
    ("Brier", "Mean squared difference between prediction and label; lower is better."),
    (
        "ECE",
        "Expected calibration error: how far predictions are from the labels of the tokens that"
        " were given them, in 15 bins; lower is better.",
    ),
    ("predicted / accepted", "Mean prediction and mean label."),
)
MOMENTS = {
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


@dataclass(frozen=True, slots=True)
class QualityRow:
    """A predictor in the table of a prompt set; its figures are in the order of QUALITY_COLUMNS."""

    predictor: str
    cells: tuple[str, ...]
    is_head: bool


def quality_rows(quality: Quality, domain: str) -> list[QualityRow]:
    """Every predictor on a prompt set; those of the ex-ante sum min(p, q) come last."""
    made = quality.of(domain)
    ordered = [p for p in made if p.moment != "before"] + [p for p in made if p.moment == "before"]
    return [QualityRow(predictor_name(p), _cells(p), p.predictor == HEAD) for p in ordered]


# Heading of a column of the table of bins, and how to read it.
BIN_COLUMNS = (
    ("predicted", "Mean prediction of the bin's tokens; bins are of equal width."),
    ("accepted", "Their mean label: the observed acceptance, with its 95 % bootstrap interval."),
    ("tokens", "How many drafted tokens the bin holds."),
    ("share", "Of all tokens."),
)


@dataclass(frozen=True, slots=True)
class BinTable:
    """The head's reliability diagram in numbers.

    Args:
        caption: which predictions, and their expected calibration error.
        rows: a bin each, in the order of BIN_COLUMNS.
    """

    caption: str
    rows: list[tuple[str, ...]]


def bin_table(quality: Quality) -> BinTable | None:
    """The bins of the head over all prompt sets together; None without a head."""
    judged = main_prediction(quality, quality.domains()[0])
    if judged is None:
        return None
    total = sum(each.tokens for each in judged.reliability)
    return BinTable(
        f"{predictor_name(judged).capitalize()}, {judged.domain}: expected calibration error"
        f" {with_interval(judged.scores.ece)}",
        [
            (
                f"{each.predicted:.3f}",
                with_interval(each.accepted),
                f"{each.tokens:,}",
                f"{100.0 * each.tokens / total:.1f} %",
            )
            for each in judged.reliability
        ],
    )


def main_prediction(quality: Quality, domain: str) -> Prediction | None:
    """What a head says of a token when decoding asks it first, as soon as that is drawn."""
    made = {p.moment: p for p in quality.of(domain) if p.predictor == HEAD}
    return next(
        (made[moment] for moment in ("drawn", "consumed", "before") if moment in made), None
    )


def basis(quality: Quality) -> str:
    """What the figures rest on."""
    rollouts, dev = quality.rollouts[quality.judged_on], quality.rollouts["dev"]
    text = (
        f"On {rollouts} labelled {quality.judged_on} rollouts; probabilities are calibrated ones,"
        " the bias of a weighted loss undone. The label is min(1, p/q) of the drafted token, and"
        " before a token is drawn its mean, the sum of min(p, q)."
    )
    if quality.judged_on == "dev":
        return text + " Rivals were fitted on the same rollouts: the labels hold no test rollouts."
    return text + f" Rivals were fitted on {dev} dev rollouts."


def predictor_name(prediction: Prediction) -> str:
    """What predicts, and when."""
    when = MOMENTS[prediction.moment]
    if prediction.predictor == HEAD:
        return f"head, {when}"
    name = f"{prediction.predictor} ({PREDICTORS[prediction.predictor]})"
    return f"{name}, {when}" if prediction.moment == "before" else name


def _cells(prediction: Prediction) -> tuple[str, ...]:
    judged = prediction.scores
    return (
        NOT_MEASURED if judged.auroc is None else with_interval(judged.auroc),
        with_interval(judged.kl),
        with_interval(judged.brier),
        with_interval(judged.ece),
        f"{judged.mean_predicted:.3f} / {judged.mean_accept:.3f}",
    )


def with_interval(estimate: Interval) -> str:
    """Three decimals, the interval in brackets."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
