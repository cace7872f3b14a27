"""Errors that a user can act on. Recipes turn them into a message on stderr and exit status 2."""

from __future__ import annotations

from pathlib import Path


class ConfigError(ValueError):
    """A configuration that cannot be used: unknown key, wrong type, impossible combination."""


class VocabularyMismatchError(ValueError):
    """Target and draft do not share a vocabulary."""


class ManifestError(ValueError):
    """A stored folder is incomplete, damaged, or belongs to another run."""


class OtherSettingsError(ManifestError, ConfigError):
    """An artefact was made with other settings: change the configuration, or where it writes."""


class TrainingDivergedError(ConfigError):
    """A loss, gradient or weight is not finite: the same settings would end so again.

    Attributes:
        found: which training, and what is not finite in which steps.
        kept: the last good checkpoint, if one was written.
        learning_rate: the largest of this training.
        remedy: what to do about the folder once the learning rate is lower, an imperative without a
            full stop. A stage, whose own record holds the learning rate, replaces it by its own.
    """

    def __init__(self, found: str, *, kept: Path | None, learning_rate: float, remedy: str) -> None:
        super().__init__(found)
        self.found = found
        self.kept = kept
        self.learning_rate = learning_rate
        self.remedy = remedy

    def __str__(self) -> str:
        kept = f"{self.kept} is kept" if self.kept else "no checkpoint was written before"
        return (
            f"{self.found}, so the training diverged ({kept}): lower its learning_rate, "
            f"{self.learning_rate:g}, to a tenth for example, and {self.remedy}"
        )


class CacheNotRewindableError(RuntimeError):
    """A model's key-value cache cannot drop its last tokens, which every decoding round needs."""
