"""Reading prompt sets, up to raw prompts: where a set is, and what its rows are.

Rows come through `datasets`, in an order that set, split and seed decide. A row becomes prompts by
the set's `Form` (`forms.py`). Nothing heavy is imported before a row is read, because plans and
refusals need only the sources.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from specdata.config import PromptSet, nearest
from specdata.errors import ConfigError, trouble_outside
from specdata.prompts.catalogue import (
    CATALOGUE,
    EMBEDDED,
    LONG_TEXTS,
    NATURAL,
    CataloguedSet,
    Form,
    SplitPart,
    natural_prompts,
)
from specdata.prompts.forms import (
    RawPrompt,
    RowReader,
    Unusable,
    columns_of,
    first_of,
    objects_in,
    require_columns,
)
from specdata.sampling import generator_for
from specdata.sources import hub_source
from specdata.storage.files import as_pattern
from specdata.toy.corpus import prompts as embedded_prompts

T = TypeVar("T")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

PromptRow = Mapping[str, Any] | str  # a text: why a row cannot be decoded
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files of a data set's folder that hold no rows."""
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def prompt_inputs(sets: Sequence[PromptSet]) -> dict[str, str]:
    """The sources of prompt sets, by name: each file (of folders too), or the Hub id."""
    inputs: dict[str, str] = {}
    for dataset in sets:
        source = source_of(dataset)
        if source is None:
            continue
        path = Path(source)
        files = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
        names = [str(file) for file in files if file.is_file()] or [source]
        inputs |= {f"prompts {name}": name for name in names}
    return inputs


def source_of(dataset: PromptSet) -> str | None:
    """The file, folder, Hub id or URL that a set is read from; None for an embedded one."""
    if dataset.name in EMBEDDED:
        return None
    catalogued = CATALOGUE.get(dataset.name)
    return (dataset.source or catalogued.hub) if catalogued else dataset.name


@cache
def short_name(name: str) -> str:
    """The name that reports show."""
    if is_file(name):
        return Path(name).stem
    return hub_source(name)[0].rstrip("/").split("/")[-1]


def check_names(sets: Sequence[PromptSet]) -> None:
    """Raise ConfigError unless sets can be told apart and each says what it is read from."""
    names = {dataset.name for dataset in sets}
    if len({short_name(name) for name in names}) < len(names):
        raise ConfigError(
            f"prompt sets must have different names, which the report shows; got {sorted(names)}"
        )
    for dataset in sets:
        if not dataset.name:
            raise ConfigError("a prompt set must have a name, and one is empty")
        if dataset.source and dataset.name not in CATALOGUE:
            raise ConfigError(
                f"prompt set {dataset.name!r}: `source` is where a catalogued set is read from "
                f"({', '.join(CATALOGUE)}); any other is read from its `name`"
            )
        chosen = {"subset": dataset.subset, "source_split": dataset.source_split}
        wrong = next((key for key, value in chosen.items() if value is not None), None)
        if wrong and ((source := source_of(dataset)) is None or is_file(source)):
            raise ConfigError(
                f"prompt set {dataset.name!r}: `{wrong}` chooses a part of a Hub data set or a "
                "folder, and this is one list of prompts: leave it out"
            )


def check_split(dataset: PromptSet) -> None:
    """Raise ConfigError for a split that a catalogued set does not have, or an unknown set."""
    catalogued = CATALOGUE.get(dataset.name)
    if catalogued and dataset.split not in catalogued.splits:
        raise ConfigError(
            f"prompt set {dataset.name!r} has no split {dataset.split!r}; choose from "
            f"{', '.join(catalogued.splits)}"
        )
    path = Path(dataset.name)
    on_hub = _HUB_ID.fullmatch(dataset.name) and not path.exists()
    is_source = is_file(dataset.name) or path.is_dir() or on_hub
    if not (catalogued or dataset.name in EMBEDDED or is_source):
        raise ConfigError(
            f"unknown prompt set {dataset.name!r}: {nearest(dataset.name, [*EMBEDDED, *CATALOGUE])}"
            f"; or give a file that ends in {', '.join(FORMATS)}, a folder, or a Hub id OWNER/NAME"
        )


def is_remote(dataset: PromptSet) -> bool:
    """True if a set is read from the Hub."""
    source = source_of(dataset)
    return source is not None and not (is_file(source) or Path(source).is_dir())


def is_file(name: str) -> bool:
    """True if a name is a data file's rather than a set's, a folder's or a Hub id."""
    return Path(name).suffix in FORMATS


def raw_prompts(
    dataset: PromptSet, seed: int, has_template: bool
) -> Iterator[RawPrompt | Unusable]:
    """The first `count` prompts of a set, or what is wrong with them, before tokenizing."""
    return islice(_every_prompt(dataset, seed, has_template), dataset.count or None)


def _every_prompt(
    dataset: PromptSet, seed: int, has_template: bool
) -> Iterator[RawPrompt | Unusable]:
    reader = None
    for number, row in read_rows(dataset, seed):
        if isinstance(row, str):
            yield Unusable("undecodable", row)
            continue
        reader = reader or RowReader.of(dataset, row, has_template)
        yield from reader.prompts(number, row)


def read_rows(dataset: PromptSet, seed: int) -> Iterator[tuple[int, PromptRow]]:
    """The rows of a set, each with its number in the source, from 1.

    Of an embedded set as many as `count`. A catalogued one comes in an order shuffled by the seed
    (a larger count only appends), any other in its own order.
    """
    check_split(dataset)
    if dataset.name in EMBEDDED:
        return enumerate(_embedded(dataset, seed), start=1)
    if catalogued := CATALOGUE.get(dataset.name):
        return _catalogued(dataset, catalogued, seed)
    path = Path(dataset.name)
    kind = FORMATS.get(path.suffix)
    if kind == "json" and "://" not in dataset.name and not path.is_dir():
        return json_rows(path)
    split = dataset.source_split or dataset.split
    data = load_rows(dataset.name, dataset.name, split, subset=dataset.subset)
    return _at(data, range(len(data)))


def _embedded(dataset: PromptSet, seed: int) -> list[PromptRow]:
    if not dataset.count:
        raise ConfigError(f"{dataset.name!r} is written from a seed without end: give a `count`")
    write = natural_prompts if dataset.name in (*NATURAL, LONG_TEXTS) else embedded_prompts
    try:
        texts = write(dataset.name, dataset.split, dataset.count, seed=seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(texts, dict):
        return [{"prompt": text, "reference": reference} for text, reference in texts.items()]
    return [{"prompt": text} for text in texts]


def json_rows(path: Path) -> Iterator[tuple[int, PromptRow]]:
    """The objects of a JSON array, or of lines, so that one bad character costs one row."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path} must be a regular file")
    array: Any = None
    try:
        with path.open("rb") as lines:
            if path.suffix == ".json":
                with suppress(ValueError, RecursionError):  # what is no UTF-8 is half surrogates
                    array = json.loads(lines.read().decode("utf-8-sig", "surrogateescape"))
                lines.seek(0)
            where = "row" if isinstance(array, list) else "line"
            rows = array if where == "row" else lines  # JSON never holds \n inside a string
            for number, row in enumerate(rows, start=1):
                try:
                    if where == "line":
                        row = row.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                        if not row:
                            continue
                        row = json.loads(row)
                    if not isinstance(row, dict):
                        raise ValueError(f"it is of type {type(row).__name__}")
                except UnicodeDecodeError as error:
                    byte = error.object[error.start]
                    yield number, f"line {number} holds the byte {byte:#x}: save the file as UTF-8"
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"{path}, {where} {number}: must be a JSON object with a `prompt` or "
                        f"`messages` ({error})"
                    ) from error
                else:
                    yield number, row
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error.strerror}") from error


def load_rows(
    name: str,
    source: str,
    split: str,
    *,
    subset: str | None = None,
    revision: str | None = None,
    files: Mapping[str, str] | None = None,
) -> Any:
    """One split of a parquet or JSON file, of a folder or of a Hub data set, a `datasets.Dataset`.

    `name` is the prompt set's, for messages; `files` are patterns of the files of each split in a
    Hub data set, whose `revision` in OWNER/NAME@REVISION has precedence.
    """
    hub, pinned = hub_source(source)
    if "://" in source:
        raise ConfigError(
            f"prompt set {name!r} is not on the Hub: download it (`curl -LO {source}`) and give "
            f"{'`source:` ' * (name in CATALOGUE)}the file"
        )
    if is_file(source):
        if not Path(source).is_file():
            raise ConfigError(f"prompt set {name!r}: there is no file {source}")
        kind = FORMATS[Path(source).suffix]
        if kind == "json":
            _or_refuse(name, source, lambda: _check_json(source))
        options: dict[str, Any] = {"path": kind, "data_files": {split: as_pattern(source)}}
    elif Path(source).is_dir():
        options = {"path": source, "name": subset}
    elif files and split in files:
        fetched = _or_refuse(name, source, lambda: _fetch(hub, pinned or revision, files[split]))
        literal = [as_pattern(path) for path in fetched]
        options = {"path": FORMATS[Path(fetched[0]).suffix], "data_files": {split: literal}}
    else:
        options = {"path": hub, "name": subset, "revision": pinned or revision}
    from datasets import load_dataset

    dataset = _or_refuse(name, source, lambda: load_dataset(split=split, **options))
    if Path(source).is_dir():
        _check_folder(name, Path(source))
    return dataset


def _check_folder(name: str, folder: Path) -> None:
    """Refuse a folder of which `datasets` passes over files that were meant, without a word."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    card = folder / "README.md"
    if card.is_file() and "configs:" in card.read_text(encoding="utf-8", errors="replace"):
        return  # which says what is read
    files = [each for each in folder.rglob("*") if each.suffix in FORMATS and each.is_file()]
    files = [
        each
        for each in files
        if each.name not in DESCRIPTIONS
        # Hidden files and folders are passed over on purpose.
        and not any(part.startswith((".", "__")) for part in each.relative_to(folder).parts)
    ]
    by_split = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    read = {Path(file).resolve() for split in by_split.values() for file in split}
    kinds = {FORMATS[each.suffix]: each for each in files}
    left = next((each for each in sorted(files) if each.resolve() not in read), None)
    if left or len(kinds) > 1:
        raise ConfigError(
            f"prompt set {name!r}: {left or kinds['json']} would be passed over, because other "
            "files of the folder are of another kind, or have a split in their names: move it out, "
            "or name files as sets of their own"
        )


def _check_json(source: str) -> None:
    """Raise ValueError for JSON without an object or array, which crashes pyarrow."""
    with Path(source).open("rb") as file:
        first = file.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first not in (b"", b"[", b"{"):
        raise ValueError(f"it must begin with {{ or [, not {first!r}")


def _fetch(hub: str, revision: str | None, pattern: str) -> list[str]:
    """The files of a pattern, in the Hub's cache: those alone are fetched, or none if offline."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        hub, repo_type="dataset", revision=revision, allow_patterns=[pattern]
    )
    paths = sorted(str(path) for path in Path(folder).glob(pattern))
    if not paths:
        raise FileNotFoundError(f"there is no {pattern} in its snapshot {folder}")
    return paths


def _catalogued(
    dataset: PromptSet, catalogued: CataloguedSet, seed: int
) -> Iterator[tuple[int, PromptRow]]:
    part, source = catalogued.splits[dataset.split], dataset.source or catalogued.hub
    files = None if dataset.source or dataset.subset else catalogued.files
    subset = dataset.subset or (None if files else catalogued.subset)
    if Path(source).is_dir() and not dataset.subset:
        from datasets import get_dataset_config_names

        there = _or_refuse(dataset.name, source, lambda: get_dataset_config_names(source))
        subset = catalogued.subset if catalogued.subset in there else None
    data = load_rows(
        dataset.name,
        source,
        dataset.source_split or part.of,
        subset=subset,
        revision=None if dataset.source else catalogued.revision,
        files=files,
    )
    require_columns(
        columns_of(catalogued.form),
        dict.fromkeys(data.column_names),
        f"prompt set {dataset.name!r}",
    )
    indices = _cut(data, part, catalogued.form)
    import torch

    generator = generator_for(seed, "prompts", dataset.name, dataset.split)
    order = torch.randperm(len(indices), generator=generator)
    return _at(data, (indices[index] for index in order.tolist()))


def _cut(data: Any, part: SplitPart, form: Form) -> Sequence[int]:
    """Row numbers of a part: a range of the ranks of the rows' hashes, equal rows together."""
    if (part.start, part.stop) == (0, 1):
        return range(len(data))
    hashes = []
    for _, row in _at(data.select_columns(columns_of(form)), range(len(data))):
        values: Any
        if isinstance(row, str):
            values = None
        elif form.messages:  # the keys that are read: files differ in the others
            turns = objects_in(row[form.messages]) or ()
            keys = (("from", "role"), ("value", "content"))
            values = [[first_of(turn, *names) for names in keys] for turn in turns]
        else:
            values = [row[name] for name in columns_of(form)]
        hashes.append(hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest())
    ranks = {value: rank for rank, value in enumerate(sorted(set(hashes)))}
    low, high = round(part.start * len(ranks)), round(part.stop * len(ranks))
    return [index for index, value in enumerate(hashes) if low <= ranks[value] < high]


def _at(data: Any, indices: Iterable[int]) -> Iterator[tuple[int, PromptRow]]:
    for index in indices:
        row: PromptRow
        try:
            row = {name: _unfilled(each, data.features[name]) for name, each in data[index].items()}
        except UnicodeDecodeError:
            row = f"row {index + 1} is no UTF-8"
        except ImportError as error:  # of what decodes sounds and pictures
            row = f"row {index + 1} holds more than text ({error})"
        yield index + 1, row


def _unfilled(value: Any, feature: Any) -> Any:
    """A value without keys that are None: tables, but no JSON in them, have those of other rows."""
    if isinstance(value, dict) and isinstance(feature, dict):
        held = {name: each for name, each in value.items() if each is not None}
        return {name: _unfilled(each, feature[name]) for name, each in held.items()}
    if isinstance(value, list):
        return [_unfilled(each, getattr(feature, "feature", None)) for each in value]
    return value


def _or_refuse(name: str, source: str, load: Callable[[], T]) -> T:
    """Load, or raise ConfigError with what to do; a full disk, or no memory, stays an OSError."""
    try:
        return load()
    except Exception as error:
        if outside := trouble_outside(error):
            raise outside from error
        cause = error.__cause__ if "while generating" in str(error) and error.__cause__ else error
        reason = " ".join(str(cause).split()).rstrip(".")[:400] or repr(cause)
        if Path(source).exists():
            advice = (
                "check that it can be read, is whole, of one schema, and JSON or parquet as its "
                "name says"
            )
        else:
            local = "give `source:` a local copy" if name in CATALOGUE else "name a local copy"
            advice = (
                "check the id and the network; for a private or gated set ask for access on its "
                f"page and log in (`hf auth login`); or {local} (`hf download --repo-type dataset "
                f"{source} --local-dir FOLDER`)"
            )
        raise ConfigError(
            f"prompt set {name!r} cannot be read from {source}: {reason}. What to do: {advice}; "
            "`source_split:` and `subset:` say which of its splits and configurations to read"
        ) from error
