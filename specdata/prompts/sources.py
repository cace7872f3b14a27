"""What prompt sets are read from, and what they are called, before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdata.errors import ConfigError
from specdata.hub import hub_source
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED
from specdata.prompts.config import PromptSet

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def prompt_inputs(sets: Sequence[PromptSet]) -> dict[str, str]:
    """What prompt sets are read from, by name: each file (of folders too), or the Hub id."""
    inputs: dict[str, str] = {}
    for wanted in sets:
        source = source_of(wanted)
        if source is None:
            continue
        path = Path(source)
        files = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
        names = [str(file) for file in files if file.is_file()] or [source]
        inputs |= {f"prompts {name}": name for name in names}
    return inputs


def source_of(wanted: PromptSet) -> str | None:
    """The file, folder, Hub id or URL that a set is read from; None for an embedded one."""
    if wanted.name in EMBEDDED:
        return None
    catalogued = CATALOGUE.get(wanted.name)
    return (wanted.source or catalogued.hub) if catalogued else wanted.name


def short_name(name: str) -> str:
    """The name that reports show."""
    if is_file(name):
        return Path(name.removesuffix(".gz")).stem
    return hub_source(name)[0].rstrip("/").split("/")[-1]


def check_names(sets: Sequence[PromptSet]) -> None:
    """Raise ConfigError unless sets can be told apart and each says what it is read from."""
    names = {wanted.name for wanted in sets}
    if len({short_name(name) for name in names}) < len(names):
        raise ConfigError(
            f"prompt sets must have different names, which the report shows; got {sorted(names)}"
        )
    for wanted in sets:
        if not wanted.name or "\0" in wanted.name:
            raise ConfigError(f"a prompt set must have a name, got {wanted.name!r}")
        if wanted.source and wanted.name not in CATALOGUE:
            raise ConfigError(
                f"prompt set {wanted.name!r}: `source` is where a catalogued set is read from "
                f"({', '.join(CATALOGUE)}); any other is read from its `name`"
            )


def is_file(name: str) -> bool:
    """Whether a name is a data file's rather than a set's, a folder's or a Hub id."""
    return Path(name.removesuffix(".gz")).suffix in FORMATS
