"""How a run's draft and head were trained, for report and card."""

from __future__ import annotations

from eval.reporting.training import HeadTraining
from recipes.config import PipelineConfig
from recipes.layout import folder
from recipes.run import finished, stage_record
from specdata.history import History, read_history

TRAININGS = {"finetuned": "fine-tuning", "draft": "distillation"}
"""Stages that train the draft, and what they are called."""


def trainings_of(config: PipelineConfig) -> dict[str, History]:
    """Name -> history of each finished training that kept one; earlier versions kept none.

    Raises:
        ManifestError: if one is damaged.
    """
    if config.draft is None:
        return {}
    found = {
        name: read_history(folder(config, stage) / "model")
        for stage, name in TRAININGS.items()
        if finished(folder(config, stage))
    }
    return {name: history for name, history in found.items() if history is not None}


def objectives_of(config: PipelineConfig) -> dict[str, str]:
    """Name of each training of the draft -> what it minimises, a sentence."""
    if config.draft is None:
        return {}
    draft, found = config.draft, {}
    if draft.finetune is not None:
        found["fine-tuning"] = "Loss: cross-entropy of the conversations' answers, in nats a token."
    rows = draft.batch_size * draft.accumulation
    found["distillation"] = (
        f"Loss: {draft.objective} between target and draft at the completions' positions, batches"
        f" of {rows} completions a step, {draft.epochs:g} epochs."
    )
    return found


def head_training_of(config: PipelineConfig) -> HeadTraining | None:
    """How the run's head was trained; None if it was not, or not yet."""
    where = folder(config, "head")
    if config.head is None or not finished(where):
        return None
    record = stage_record(where)
    made, asked = record["results"], record["settings"]["head"]
    if not made.get("losses"):
        return None
    return HeadTraining(
        losses=tuple(made["losses"]),
        epochs=made.get("epochs", 0),
        rows=made["train_rows"],
        batch_size=asked["batch_size"],
        learning_rate=made.get("learning_rate", 0.0),
        rejection_weight=asked.get("rejection_weight", 1.0),
    )
