"""The settings that decide an artefact: stored beside it, compared when it is resumed.

Every stage that can be interrupted uses this protocol. It describes what decides its result as
`Settings`, stores `Settings.values` with what it makes, and calls `Settings.check` before it
continues or reuses anything. A refusal shows only what differs and what to do about it.

Settings are compared *modulo defaults*: a key that one side lacks counts as its default. An option
that is added later, with its default, leaves what was made before it usable.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from specdata.config import fields_of
from specdata.errors import ManifestError, OtherSettingsError
from specdata.storage.files import write_json

# In the keys of defaults: every item of a list, or every value of a mapping with free keys.
ANY = "*"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides a result, and how it is compared with what another run stored.

    Example:
        settings = Settings(
            {"head": config.head.model_dump(mode="json"), "seed": config.seed},
            defaults_of(HeadConfig, "head") | {"seed": 0},
            remedy=f"choose another --output, or remove {folder}",
        )
        if not settings.check_file(folder / "settings.json"):
            settings.write(folder / "settings.json")

    Args:
        values: JSON values by name, nested as deep as wanted; tuples become lists.
        defaults: what an absent key counts as, by dotted key; see `defaults_of`.
        remedy: what a user can do if an artefact was made with other settings: an imperative
            without a full stop.
        rewrite: turns values, stored ones and those asked for, into what is compared of them: keys
            that were renamed or moved as they would be stored today, which defaults alone cannot
            tell, and nothing that may differ, such as where a model is.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = "choose another output folder, or remove it"
    rewrite: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def __post_init__(self) -> None:
        # What was stored comes back as JSON, so tuples must already be lists here.
        object.__setattr__(self, "values", json.loads(json.dumps(self.values)))

    def extended(self, values: Mapping[str, Any]) -> Settings:
        """The same with more values, which take precedence."""
        return dataclasses.replace(self, values={**self.values, **values})

    def check(self, stored: Mapping[str, Any], artefact: object) -> None:
        """Compare with stored settings.

        Args:
            stored: `values` of the run that made the artefact, as read from JSON.
            artefact: its file or folder, or what else it is called in the refusal.

        Raises:
            OtherSettingsError: naming the artefact, the settings that differ and the remedy.
            ManifestError: if what is stored is no mapping, naming the artefact and the remedy.
        """
        if not isinstance(stored, Mapping):
            raise ManifestError(
                f"{artefact} was not written by this program (its settings are no mapping): "
                f"{self.remedy}"
            )
        if changed := differences(self.rewrite(stored), self.rewrite(self.values), self.defaults):
            raise OtherSettingsError(
                f"{artefact} was made with other settings: {self.remedy}. Stored -> asked:\n  "
                + "\n  ".join(changed)
            )

    def check_file(self, path: Path) -> bool:
        """Compare with what `write` stored in a file.

        Returns:
            Whether there is such a file.

        Raises:
            OtherSettingsError: if its settings differ.
            ManifestError: if it is damaged.
        """
        if not path.is_file():
            return False
        self.check(read_record(path, (), self.remedy), path.parent)
        return True

    def write(self, path: Path) -> None:
        """Store the values as a JSON file, atomically."""
        write_json(path, self.values)


def read_record(path: Path, keys: Sequence[str], remedy: str) -> dict[str, Any]:
    """Read a JSON object that a run stored.

    Args:
        path: the file.
        keys: what it must hold; more is allowed.
        remedy: what to do about a damaged one: an imperative without a full stop.

    Returns:
        All that it holds.

    Raises:
        ManifestError: if it is no such object, naming the file and the remedy.
        OSError: if it cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        raise ManifestError(f"{path} must be a file and is a folder: {remedy}") from error
    except ValueError as error:
        raise ManifestError(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(record, dict):
        raise ManifestError(f"{path} was not written by this program (no JSON object): {remedy}")
    if missing := [key for key in keys if key not in record]:
        raise ManifestError(
            f"{path} was not written by this program (it has no {missing[0]!r}): {remedy}"
        )
    return record


def differences(
    stored: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[str]:
    """Compare two settings modulo defaults.

    A key that one side lacks counts as its default; one without a default differs. Mappings, and
    lists of mappings, are compared item by item.

    Args:
        stored: JSON values.
        asked: JSON values.
        defaults: by dotted key, `*` standing for any item: {"head.depth": 3, "methods.*.name": ""}.
            An option that was removed differs where it is stored, unless its last default is given
            here and is what was stored.

    Returns:
        A line "dotted.key: stored -> asked" for each difference, ordered by key.
    """
    return list(_compare(stored, asked, defaults or {}, ""))


def _compare(
    stored: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for key in sorted({*stored, *asked}):
        default, below = defaults.get(key, _ABSENT), _below(defaults, key)
        before, after = stored.get(key, default), asked.get(key, default)
        if before is _ABSENT or after is _ABSENT:
            # A section that one side lacks counts as its keys' defaults; an item does not.
            is_section = below and not _has_items(defaults)
            before, after = (
                {} if is_section and value is _ABSENT else value for value in (before, after)
            )
        old, new = _mapping(before), _mapping(after)
        if old is not None and new is not None:
            yield from _compare(old, new, below, f"{prefix}{key}.")
        elif before is _ABSENT or after is _ABSENT or before != after:
            yield f"{prefix}{key}: {_shown(before, below)} -> {_shown(after, below)}"


def _below(defaults: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The defaults of what is below a key, relative to it; the key's own before those of any."""
    return {
        pattern.removeprefix(start): value
        for start in (f"{ANY}.", f"{key}.")
        for pattern, value in defaults.items()
        if pattern.startswith(start)
    }


def _has_items(defaults: Mapping[str, Any]) -> bool:
    return any(pattern.startswith(f"{ANY}.") for pattern in defaults)


def _mapping(value: Any) -> Mapping[str, Any] | None:
    """A mapping, or a list of mappings as one from index to item; None for other values."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return None


def _shown(value: Any, defaults: Mapping[str, Any]) -> str:
    """A value as it is printed: of a mapping, only what is not at its default."""
    if value is _ABSENT:
        return "absent"
    if isinstance(value, Mapping):
        return repr({k: v for k, v in value.items() if differences({}, {k: v}, defaults)})
    return repr(value)


def defaults_of(kind: type, prefix: str = "") -> dict[str, Any]:
    """The defaults of a configuration class, by dotted key.

    Args:
        kind: a dataclass or a pydantic model, whose fields may be other such classes, optional
            ones, and lists or mappings of them.
        prefix: the dotted key that the configuration has in the settings, if it is not their top.

    Returns:
        JSON values: {"eval.batch": 1, "eval.methods.*.length": 4, ...}. A field without a default
        is left out.
    """
    start, written = f"{prefix}." if prefix else "", _written_defaults(kind)
    defaults = {f"{start}{name}": value for name, value in written.items()}
    for name, info in fields_of(kind).items():
        if not isinstance(written.get(name, {}), Mapping | list | None):
            continue  # a section that its class stores as a single value
        for section, is_item in _sections(info.annotation):
            defaults |= defaults_of(section, f"{start}{name}{f'.{ANY}' if is_item else ''}")
    return defaults


def _written_defaults(kind: type) -> dict[str, Any]:
    """What a configuration that sets nothing is stored as, without the fields it would have to."""
    if issubclass(kind, BaseModel):
        # Written by the class itself, which may store other keys than it has fields.
        written: dict[str, Any] = kind.model_construct().model_dump(mode="json")
        return written
    values = {
        name: info.get_default(call_default_factory=True, validated_data={})
        for name, info in fields_of(kind).items()
    }
    return {
        name: to_jsonable_python(value)
        for name, value in values.items()
        if value is not PydanticUndefined
    }


def _sections(hint: Any) -> Iterator[tuple[type, bool]]:
    """The configuration classes in a type hint, and whether each is that of an item."""
    if isinstance(hint, type) and (issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint)):
        yield hint, False
    origin = get_origin(hint)
    holds_items = isinstance(origin, type) and issubclass(origin, Collection)
    for argument in get_args(hint)[:1] if origin is Annotated else get_args(hint):
        for section, is_item in _sections(argument):
            yield section, is_item or holds_items
