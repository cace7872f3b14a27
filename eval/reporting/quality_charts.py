"""Drawings of how good a head's probabilities are: reliability, and AUROC by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from matplotlib.axes import Axes

from eval.analysis.prediction import BINS
from eval.analysis.quality import PositionScores, Prediction, Quality
from eval.analysis.rivals import HEAD
from eval.reporting.charts import INK, LOOKS, RULES, Look
from eval.reporting.quality import main_prediction, predictor_name

SHORT = {"drawn": "drawn", "consumed": "one token later", "before": "before the draw"}


@dataclass(frozen=True, slots=True)
class Line:
    """How a predictor is drawn: as the method that reads it, and the head by moment."""

    look: Look
    style: str = "-"
    hollow: bool = False


LINES = {
    (HEAD, "drawn"): Line(LOOKS["head"]),
    (HEAD, "consumed"): Line(LOOKS["head"], "--", hollow=True),
    (HEAD, "before"): Line(LOOKS["head"], ":", hollow=True),
    ("margin", "drawn"): Line(RULES["margin"]),
    ("logit", "drawn"): Line(RULES["logit"], "--"),
    ("cumulative", "drawn"): Line(RULES["cumulative"], "-."),
    ("numbers", "drawn"): Line(RULES["numbers"], ":"),
}
"""Predictor and moment -> how it is drawn."""
COUNTS = 0.2
"""Height of the highest bar of counts."""
MIN_TOKENS = 30
"""Bins and positions with fewer tokens are not drawn."""


def draw_reliability(axes: Axes, quality: Quality, domain: str) -> None:
    """Mean label against mean prediction of each bin; calibrated ones lie on the diagonal."""
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    if (judged := main_prediction(quality, domain)) is not None:
        _draw_counts(axes, judged)
    for prediction, line in _drawn(quality, domain):
        bins = [each for each in prediction.reliability if each.tokens >= MIN_TOKENS]
        x, y = [each.predicted for each in bins], [each.accepted.value for each in bins]
        if prediction.predictor == HEAD and bins:
            ends = [(each.accepted.low, each.accepted.high) for each in bins]
            axes.vlines(x, *zip(*ends, strict=True), color=line.look.colour, linewidth=1.0)
        _plot(axes, x, y, prediction, line)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_xlabel("predicted probability of acceptance")
    axes.set_ylabel("mean acceptance of these tokens")


def _draw_counts(axes: Axes, judged: Prediction) -> None:
    """At the bottom, how many tokens each of the head's bins holds; its calibration error."""
    total = sum(each.tokens for each in judged.reliability)
    most = max(each.tokens for each in judged.reliability)
    axes.bar(
        [(each.number + 0.5) / BINS for each in _numbered(judged)],
        [COUNTS * each.tokens / most for each in _numbered(judged)],
        width=0.9 / BINS,
        color=LOOKS["plain"].colour,
        alpha=0.45,
        zorder=0.5,
        label="head's tokens by bin, to scale",
    )
    ece = judged.scores.ece
    axes.annotate(
        f"ECE of the head {ece.value:.3f} [{ece.low:.3f}, {ece.high:.3f}]\n{total:,} tokens",
        (0.03, 0.97),
        xycoords="axes fraction",
        va="top",
        fontsize=8,
    )


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A bin with its number from 0, of BINS of equal width."""

    number: int
    tokens: int


def _numbered(judged: Prediction) -> list[_Numbered]:
    return [
        _Numbered(min(int(each.predicted * BINS), BINS - 1), each.tokens)
        for each in judged.reliability
    ]


def draw_positions(axes: Axes, quality: Quality, domain: str) -> None:
    """AUROC by position in the rollout."""
    _draw_auroc(axes, quality, domain, attrgetter("positions"))
    axes.set_xlabel("position in the rollout")


def draw_places(axes: Axes, quality: Quality, domain: str) -> None:
    """AUROC by position in a draft."""
    _draw_auroc(axes, quality, domain, attrgetter("places"))
    axes.set_xlabel("position in a draft")


def _draw_auroc(
    axes: Axes,
    quality: Quality,
    domain: str,
    parts: Callable[[Prediction], Sequence[PositionScores]],
) -> None:
    ticks: dict[int, str] = {}
    for prediction, line in _drawn(quality, domain):
        x, y, ends = [], [], []
        for place, part in enumerate(parts(prediction)):
            auroc = part.scores.auroc
            several = "" if part.first == part.last else f"-{part.last}"
            ticks[place] = f"{part.first}{several}"
            if auroc is not None and part.scores.tokens >= MIN_TOKENS:
                x.append(place)
                y.append(auroc.value)
                ends.append((auroc.low, auroc.high))
        if prediction.predictor == HEAD and x:
            axes.vlines(x, *zip(*ends, strict=True), color=line.look.colour, linewidth=1.0)
        _plot(axes, x, y, prediction, line)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_ylabel("AUROC")


def _drawn(quality: Quality, domain: str) -> list[tuple[Prediction, Line]]:
    """The predictors that have a look, and it."""
    found = ((each, LINES.get((each.predictor, each.moment))) for each in quality.of(domain))
    return [(each, line) for each, line in found if line is not None]


def _plot(
    axes: Axes, x: Sequence[float], y: Sequence[float], prediction: Prediction, line: Line
) -> None:
    when = f", {SHORT[prediction.moment]}" if prediction.predictor == HEAD else ""
    axes.plot(
        x,
        y,
        color=line.look.colour,
        marker=line.look.marker,
        markersize=4.5,
        markerfacecolor="none" if line.hollow else line.look.colour,
        linewidth=1.4,
        linestyle=line.style,
        label=prediction.predictor + when,
    )


def described(quality: Quality, domain: str, kind: str) -> str:
    """The data of a drawing in words, for those who cannot see it."""
    words = []
    for prediction, _ in _drawn(quality, domain):
        if kind == "reliability":
            values = [f"{b.predicted:.2f} {b.accepted.value:.2f}" for b in prediction.reliability]
        else:
            parts = prediction.places if kind == "auroc-draft" else prediction.positions
            shown = ((part.first, part.scores.auroc) for part in parts)
            values = [f"{first} {auroc.value:.2f}" for first, auroc in shown if auroc is not None]
        words.append(f"{predictor_name(prediction)} {', '.join(values)}")
    return "Values: " + "; ".join(words) + "."
