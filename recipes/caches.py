"""Datasets of kept target logits: whose they are, and which of their rows a stage reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config import PipelineConfig
from recipes.layout import folder
from specdata.errors import ConfigError
from specdata.storage.files import fingerprint
from specdata.storage.resume import differences

if TYPE_CHECKING:
    from datasets import Dataset


def made_of(config: PipelineConfig, tokenizer: str) -> dict[str, Any]:
    """What labels and kept logits are made of, beside the draft.

    Args:
        config: the run's.
        tokenizer: the fingerprint of the target's.
    """
    return {
        "target": identity(config.models.target),
        "tokenizer": tokenizer,
        "rollouts": fingerprint(str(folder(config, "rollouts"))),
        "dtype": config.models.dtype,
    }


def identity(name: str) -> dict[str, str]:
    """A model's name, and its commit on the Hub or what its folder holds."""
    from specdata.models import revision_of

    return {"name": name, "revision": revision_of(name)}


def cached_rows(
    config: PipelineConfig, cache: str, key: str, source: dict[str, Any], wanted: Dataset
) -> Dataset:
    """The rows of a dataset with kept logits that belong to some of this run's rollouts.

    Args:
        config: the run's.
        cache: the dataset's folder.
        key: the setting that names it, for messages.
        source: what it must have been made of (`made_of`).
        wanted: rollouts of this run.

    Raises:
        ConfigError: if it was made of other rollouts or by another target, or lacks some of them.
        ManifestError: if it cannot be read.
    """
    from specdata.labels.top_logits import KeptLogits
    from specdata.storage.dataset import load_stored
    from specdata.storage.manifest import read_manifest

    stored = dict(read_manifest(Path(cache))["settings"])
    stored |= stored.get("load", {}).get("target", {})
    load = config.models.loading("target")
    source = {**source, "dtype": load.dtype, "bits": load.bits}
    made = {name: stored.get(name) for name in source}
    if changed := differences(made, source, ("target.name",)):
        raise ConfigError(
            f"{key} {cache} was made of other rollouts or by another target: leave it out, or name "
            "one of the same. Stored -> this run's:\n  " + "\n  ".join(changed)
        )
    KeptLogits.of(Path(cache))
    rows = load_stored(Path(cache))
    places = {name: place for place, name in enumerate(_names(rows))}
    names = _names(wanted)
    if missing := sum(name not in places for name in names):
        raise ConfigError(
            f"{key} {cache} lacks {missing} of {len(names)} rollouts that are needed (labels of a "
            "run with draft.spared hold only that share): make one of all rollouts with "
            "draftsmith make-logits"
        )
    return rows.select([places[name] for name in names])


def _names(rows: Dataset) -> list[tuple[Any, ...]]:
    """What tells the rows of one dataset apart."""
    return list(zip(rows["example_id"], rows["sample"], rows["turn"], strict=True))
