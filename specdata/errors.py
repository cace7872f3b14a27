"""Errors that a user can act on. Recipes turn them into a message on stderr and exit status 2."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be used: unknown key, wrong type, impossible combination."""


class VocabularyMismatchError(ValueError):
    """Target and draft do not share a vocabulary."""


def at_least_one(settings: object, section: str, *names: str) -> None:
    """Raise ConfigError unless the named settings are 1 or larger."""
    for name in names:
        value = getattr(settings, name)
        if value < 1:
            raise ConfigError(f"{section}.{name} must be 1 or larger, got {value}")


class ManifestError(ValueError):
    """A stored folder is incomplete, damaged, or belongs to another run."""


class OtherSettingsError(ManifestError, ConfigError):
    """An artefact was made with other settings: change the configuration, or where it writes."""


class CacheNotRewindableError(RuntimeError):
    """A model's key-value cache cannot drop its last tokens, which every decoding round needs."""
