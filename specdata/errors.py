"""Errors that a user can act on. Recipes turn them into a message on stderr and exit status 2."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be used: unknown key, wrong type, impossible combination."""


class VocabularyMismatchError(ValueError):
    """Target and draft do not share a vocabulary."""


class ManifestError(ValueError):
    """A stored folder is incomplete, damaged, or belongs to another run."""


class OtherSettingsError(ManifestError, ConfigError):
    """An artefact was made with other settings: change the configuration, or where it writes."""


class TrainingDivergedError(ConfigError):
    """A loss, gradient or weight is not finite: the same settings would end so again."""


class CacheNotRewindableError(RuntimeError):
    """A model's key-value cache cannot drop its last tokens, which every decoding round needs."""
