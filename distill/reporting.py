"""Where a training's losses and measurements are reported, besides the model's history.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import (
    TensorBoardCallback,
    get_available_reporting_integrations,
    is_tensorboard_available,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from distill.config import Reporter
from specdata.errors import ConfigError

# Their own constructors tell: transformers lists the one nowhere, the other beside mlflow only.
_UNLISTED = ("flyte", "azure_ml")


def check_reporters(wanted: Sequence[Reporter]) -> None:
    """Raise ConfigError if one of these is not installed; nothing of them is started."""
    installed = get_available_reporting_integrations()
    missing = [name for name in wanted if name not in (*installed, *_UNLISTED)]
    if missing:
        raise ConfigError(
            f"draft.report_to names {', '.join(map(repr, missing))}, which cannot be used: install "
            "its package, or take it out; [] reports nowhere"
        )


def reporters(wanted: Sequence[Reporter] | None, folder: Path) -> list[TrainerCallback]:
    """The Trainer's callbacks that report to these, made before anything takes long.

    Args:
        wanted: the Trainer's names; None is TensorBoard if it is installed, else nothing.
        folder: where TensorBoard's files go, if its own environment variable names no other. By
            default they would lie among the checkpoints, and go with them.

    Raises:
        ConfigError: if one is not installed.
    """
    if wanted is None:
        wanted = ["tensorboard"] if is_tensorboard_available() else []
    callbacks = []
    for name in dict.fromkeys(wanted):
        try:
            callback = INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(
                f"report_to names {name!r}, which cannot be used: {error} Or take it out; [] "
                "reports nowhere"
            ) from error
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(folder)
        callbacks.append(callback)
    return callbacks
