"""How a run's draft was trained: the histories beside its weights, for report and card."""

from __future__ import annotations

from recipes.config import PipelineConfig
from recipes.layout import folder
from recipes.run import finished
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
