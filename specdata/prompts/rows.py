"""Rows of prompt sets, through `datasets`, in an order that set, split and seed decide."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import torch
from datasets import get_dataset_config_names, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specdata.errors import ConfigError
from specdata.hub import hub_source
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED, CataloguedSet, Form, Part
from specdata.prompts.config import PromptSet
from specdata.prompts.sources import FORMATS, is_file
from specdata.seeds import generator_for

T = TypeVar("T")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

_UNREACHED = (ConnectionError, OfflineModeIsEnabled, LocalEntryNotFoundError)

PromptRow = Mapping[str, Any] | None  # None: a row whose text cannot be decoded


def read_rows(wanted: PromptSet, seed: int) -> Iterator[PromptRow]:
    """The rows of a set that is not embedded.

    A catalogued set comes in an order shuffled by the seed (a larger count only appends), any
    other in its own order.

    Raises:
        ConfigError: if it cannot be had or read, or has no such split.
    """
    if catalogued := CATALOGUE.get(wanted.name):
        return _catalogued(wanted, catalogued, seed)
    path = Path(wanted.name)
    if path.suffix == ".jsonl":
        return json_lines(path)
    on_hub = _HUB_ID.fullmatch(wanted.name) and not path.exists()
    if not (is_file(wanted.name) or path.is_dir() or on_hub):
        raise ConfigError(_unknown(wanted.name))
    split = wanted.source_split or wanted.split
    data = load_rows(wanted.name, wanted.name, split, subset=wanted.subset)
    return _at(data, range(len(data)))


def json_lines(path: Path) -> Iterator[PromptRow]:
    """The objects of a JSONL file, line by line, so that one bad character costs one row.

    Raises:
        ConfigError: if the file cannot be read or a line is no JSON object.
    """
    try:
        with path.open("rb") as lines:  # split at \n alone, which JSON never holds inside a string
            for number, line in enumerate(lines, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    yield None
                    continue
                if text:
                    yield _object(text, path, number)
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error.strerror}") from error


def _object(text: str, path: Path, number: int) -> PromptRow:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: must be a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{path}, line {number}: must be a JSON object with a `prompt` or `messages`, got "
            f"{type(row).__name__}"
        )
    return row


def load_rows(
    name: str,
    source: str,
    split: str,
    *,
    subset: str | None = None,
    revision: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Any:
    """One split of a data file (whole, whatever the split), of a folder or of a Hub data set.

    Args:
        name: of the prompt set, for messages.
        source: where it is.
        split: the source's name of it.
        subset: the source's configuration.
        revision: of a Hub data set; OWNER/NAME@REVISION has precedence.
        files: patterns of the files of each split in a Hub data set.

    Returns:
        A `datasets.Dataset`.

    Raises:
        ConfigError: saying what to do.
    """
    hub, pinned = hub_source(source)
    if "://" in source:
        raise ConfigError(
            f"prompt set {name!r} is not on the Hub: download it (`curl -LO {source}`) and give "
            "`source:` the file"
        )
    if is_file(source):
        if not Path(source).is_file():
            raise ConfigError(f"prompt set {name!r}: there is no file {source}")
        kind = FORMATS[Path(source.removesuffix(".gz")).suffix]
        options: dict[str, Any] = {"path": kind, "data_files": {split: source}}
    elif Path(source).is_dir():
        options = {"path": source, "name": subset}
    elif files and split in files:
        fetched = _or_refuse(name, source, lambda: _fetch(hub, pinned or revision, files[split]))
        options = {"path": FORMATS[Path(fetched[0]).suffix], "data_files": {split: fetched}}
    else:
        options = {"path": hub, "name": subset, "revision": pinned or revision}
    return _or_refuse(name, source, lambda: load_dataset(split=split, **options))


def _fetch(hub: str, revision: str | None, pattern: str) -> list[str]:
    """The files of a pattern, in the Hub's cache: those alone are fetched, or none if offline."""
    folder = snapshot_download(
        hub, repo_type="dataset", revision=revision, allow_patterns=[pattern]
    )
    paths = sorted(str(path) for path in Path(folder).glob(pattern))
    if not paths:
        raise FileNotFoundError(f"there is no {pattern} in its snapshot {folder}")
    return paths


def require_columns(needed: Iterable[str], row: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a column that is not there, naming those that are and the nearest."""
    for name in needed:
        if name not in row:
            near = difflib.get_close_matches(name, row, n=1, cutoff=0.5)
            raise ConfigError(
                f"{where} has no column {name!r}; it has {', '.join(map(repr, row)) or 'none'}"
                f"{f' (did you mean {near[0]!r}?)' if near else ''}. Rename it, or give a "
                "`template` such as '{" + (near[0] if near else next(iter(row), "column")) + "}'"
            )


def columns_of(form: Form) -> list[str]:
    """The columns that a form reads."""
    if single := form.questions or form.messages:
        return [single]
    texts = (*form.ask, *form.plain)
    names = [name for text in texts for _, name in parse(text) if name]
    return list(dict.fromkeys(name.split(".")[0] for name in names))


@cache
def parse(template: str) -> tuple[tuple[str, str | None], ...]:
    """Pairs of literal text and the name in braces after it. Raises ConfigError if unusable."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"unusable template {template!r}: {error}; write {{column}} for a column's text, and "
            "{{ or }} for a brace"
        ) from error
    for _, name, form, conversion in parts:
        if name is not None and (form or conversion or not re.fullmatch(r"\w+(\.\w+)*", name)):
            raise ConfigError(
                f"unusable template {template!r}: braces may hold a column's name or column.key, "
                f"got {name!r}"
            )
    if all(name is None for _, name, _, _ in parts):
        raise ConfigError(f"unusable template {template!r}: it names no {{column}}")
    return tuple((text, name) for text, name, _, _ in parts)


def _catalogued(wanted: PromptSet, catalogued: CataloguedSet, seed: int) -> Iterator[PromptRow]:
    if wanted.split not in catalogued.splits:
        raise ConfigError(
            f"prompt set {wanted.name!r} has no split {wanted.split!r}; choose from "
            f"{', '.join(catalogued.splits)}"
        )
    part, source = catalogued.splits[wanted.split], wanted.source or catalogued.hub
    files = None if wanted.source or wanted.subset else catalogued.files
    subset = wanted.subset or (None if files else catalogued.subset)
    if Path(source).is_dir() and not wanted.subset:
        there = _or_refuse(wanted.name, source, lambda: get_dataset_config_names(source))
        subset = catalogued.subset if catalogued.subset in there else None
    data = load_rows(
        wanted.name,
        source,
        wanted.source_split or part.of,
        subset=subset,
        revision=None if wanted.source else catalogued.revision,
        files=files,
    )
    require_columns(
        columns_of(catalogued.form), dict.fromkeys(data.column_names), f"prompt set {wanted.name!r}"
    )
    chosen = _cut(data, part, catalogued.form)
    generator = generator_for(seed, "prompts", wanted.name, wanted.split)
    order = torch.randperm(len(chosen), generator=generator)
    return _at(data, (chosen[index] for index in order.tolist()))


def _cut(data: Any, part: Part, form: Form) -> Sequence[int]:
    """Row numbers of a part: a range of the ranks of the rows' hashes, equal rows together."""
    if (part.start, part.stop) == (0, 1):
        return range(len(data))
    rows = _at(data.select_columns(columns_of(form)), range(len(data)))
    hashes = [_hash(row, form) for row in rows]
    ranks = {value: rank for rank, value in enumerate(sorted(set(hashes)))}
    low, high = round(part.start * len(ranks)), round(part.stop * len(ranks))
    return [index for index, value in enumerate(hashes) if low <= ranks[value] < high]


def _hash(row: PromptRow, form: Form) -> str:
    values: Any = row and [row[name] for name in columns_of(form)]
    if row and form.messages:  # the keys that are read: files differ in the others
        turns = row[form.messages]
        values = [[turn.get(key) for key in form.keys] for turn in turns or ()]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def _at(data: Any, indices: Iterable[int]) -> Iterator[PromptRow]:
    for index in indices:
        try:
            row = data[index]
        except UnicodeDecodeError:
            row = None
        yield row


def _or_refuse(name: str, source: str, load: Callable[[], T]) -> T:
    """Load, or raise ConfigError; a full disk stays the OSError that it is."""
    try:
        return load()
    except Exception as error:
        for cause in (error, error.__cause__):
            if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
                raise cause from error
        raise ConfigError(_cannot_load(name, source, error)) from error


def _unknown(name: str) -> str:
    known = [*EMBEDDED, *CATALOGUE]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"unknown prompt set {name!r}{hint}: give one of {', '.join(known)}, a file that ends in "
        f"{', '.join(FORMATS)}, a folder, or a Hub id OWNER/NAME"
    )


def _cannot_load(name: str, source: str, error: Exception) -> str:
    cause = error.__cause__ if "while generating" in str(error) and error.__cause__ else error
    reason = " ".join(str(cause).split()).rstrip(".")[:400] or repr(cause)
    local = "give `source:` a local copy" if name in CATALOGUE else "name a local copy"
    if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError | RevisionNotFoundError):
        advice = (
            "check the id; for a private or gated one ask for access on its page and log in "
            f"(`hf auth login`, formerly `huggingface-cli login`), or {local}"
        )
    elif isinstance(error, _UNREACHED):
        advice = (
            f"the Hub is not reached: connect, unset HF_HUB_OFFLINE, or {local} (`hf download "
            f"--repo-type dataset {source} --local-dir FOLDER` where there is a network)"
        )
    elif isinstance(cause, PermissionError):
        advice = "make it readable, and the cache of `datasets` (HF_HOME) writable"
    elif "Unknown split" in reason:
        advice = "say which of its splits to read with `source_split:`"
    elif "BuilderConfig" in reason or "Config name" in reason:
        advice = "say which configuration to read with `subset:`"
    else:
        advice = "check that it is whole, of one schema, and JSON or parquet as its name says"
    return f"prompt set {name!r} cannot be read from {source}: {reason}. What to do: {advice}"
