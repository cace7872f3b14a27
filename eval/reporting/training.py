"""Trainings in words and tables: what was minimised, how long, and what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from specdata.history import Figures, History, LoggedStep, Measurement

ALL = "all"
"""Name of the row over all prompt sets."""
# Heading of a pair of columns, key of the figure, and how to read it.
TRAINING_COLUMNS = (
    ("acceptance", "acceptance", "Mean of the sum of min(p, q) over the completions' positions."),
    (
        "tokens a round, token K=4",
        "token_4",
        "Expected tokens of a round that drafts 4, verified token by token, if it starts anywhere"
        " in the target's own text; it ends with the text.",
    ),
    ("tokens a round, token K=8", "token_8", "The same of rounds that draft 8."),
    ("tokens a round, block K=4", "block_4", "Of rounds that draft 4, by block verification."),
    ("tokens a round, block K=8", "block_8", "Of rounds that draft 8, by block verification."),
)


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """How an acceptance head was trained.

    Args:
        losses: the objective in every step.
        epochs: passes over the rows.
        rows: labelled rollouts that it was trained on.
        batch_size: of them in a step.
        learning_rate: the largest.
        rejection_weight: how much more the loss counts a rejection than an acceptance.
    """

    losses: tuple[float, ...]
    epochs: int
    rows: int
    batch_size: int
    learning_rate: float
    rejection_weight: float = 1.0

    @property
    def summary(self) -> str:
        """What the curve is, in sentences."""
        weight = "" if self.rejection_weight == 1.0 else f", rejections x {self.rejection_weight:g}"
        return (
            f"Binary cross-entropy of predicted and true acceptance in nats{weight}, of the rows of"
            f" each step before they are learnt from: {len(self.losses):,} optimizer steps of"
            f" {self.batch_size} labelled rollouts, {self.epochs} passes over {self.rows:,};"
            f" learning rate up to {self.learning_rate:g}, warmed up, then down to 0 as a cosine."
            " True acceptance is a probability, so even a perfect head keeps a loss above 0."
        )


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A prompt set; figures before and after, in the order of TRAINING_COLUMNS."""

    name: str
    positions: int
    cells: tuple[str, ...]


def training_rows(history: History) -> list[TrainingRow]:
    """All prompt sets together, then each, if the draft was measured before and after."""
    before, after = history.before, history.after
    if before is None or after is None:
        return []
    shared = [name for name in after.sets if name in before.sets]
    pairs = {ALL: (before.overall, after.overall)} if len(shared) != 1 else {}
    pairs |= {name: (before.sets[name], after.sets[name]) for name in shared}
    return [
        TrainingRow(name, now.positions, _cells(was, now)) for name, (was, now) in pairs.items()
    ]


def figure(figures: Figures, key: str) -> float:
    """A figure by its key in TRAINING_COLUMNS."""
    return figures.acceptance if key == "acceptance" else figures.expected_tokens[key]


def _cells(before: Figures, after: Figures) -> tuple[str, ...]:
    return tuple(
        f"{figure(before, key):.3f} → {figure(after, key):.3f}" for _, key, _ in TRAINING_COLUMNS
    )


def training_summary(history: History) -> str:
    """How long was trained, which weights were kept and at which rates, in a few sentences."""
    return _course(history) + _rates(history.steps)


def _course(history: History) -> str:
    if not history.steps and not history.measurements:
        return "Not trained: the draft is kept as it started."
    last = max([m.step for m in history.measurements] + [s.step for s in history.steps])
    text = f"{last} optimizer steps"
    if tokens := history.steps[-1].tokens if history.steps else None:
        text += f" on {tokens:,} tokens, prompts included"
    if history.kept_step is None:
        return f"{text}."
    if history.kept_by is None:
        return f"{text}; the last weights were kept."
    where = "it started from" if history.kept_step == 0 else f"of step {history.kept_step}"
    text += f". Kept: the weights {where}, which were best by {history.kept_by}"
    return f"{text}, on {_watched(history.measurements)} watched dev rollouts."


def _rates(steps: tuple[LoggedStep, ...]) -> str:
    """Learning rate and speed, as far as they were logged."""
    text = ""
    if rates := [(s.learning_rate, s.step) for s in steps if s.learning_rate is not None]:
        top, step = max(rates)
        text += f" Learning rate: {top:.2g} at most, logged at step {step}, and {rates[-1][0]:.2g}"
        text += " at the end."
    if speeds := [s.tokens_per_second for s in steps if s.tokens_per_second is not None]:
        text += f" Median speed: {median(speeds):,.0f} tokens/s."
    return text


def _watched(measurements: tuple[Measurement, ...]) -> int:
    return max(measured.rollouts for measured in measurements)


def training_measures(history: History) -> Mapping[str, float]:
    """The figures for a model card: of all prompt sets together and of each.

    Before and after distillation; once, if there was none.
    """
    measures: dict[str, float] = {}
    before, after = history.before, history.after
    if before is None or after is None:
        return measures
    pairs = {"": (before.overall, after.overall)}
    if len(after.sets) > 1:
        pairs |= {f", {name}": (before.sets[name], after.sets[name]) for name in after.sets}
    was_trained = bool(history.steps or history.measurements)
    for where, (was, now) in pairs.items():
        for words, key in (
            ("acceptance", "acceptance"),
            ("expected tokens a round (token verification, K = 4)", "token_4"),
            ("expected tokens a round (block verification, K = 8)", "block_8"),
        ):
            if was_trained:
                measures[f"{words} before distillation{where}"] = figure(was, key)
                measures[f"{words} after distillation{where}"] = figure(now, key)
            else:
                measures[f"{words}{where}"] = figure(now, key)
    return measures
