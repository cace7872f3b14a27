"""The settings that decide an artefact: stored beside it, compared when it is resumed.

Every stage that can be interrupted uses this protocol. It describes what decides its result as
`Settings`, stores `Settings.values` with what it makes, and calls `Settings.check` before it
continues or reuses anything. A refusal shows only what differs and what to do about it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdata.errors import ManifestError, OtherSettingsError
from specdata.storage.files import read_object

_ABSENT = object()
_HASH = re.compile(r"[0-9a-f]{16,64}")  # of a file, a folder or a commit
INPUTS = "inputs."  # begins the name of each thing that an artefact was made of
LONGEST = 80  # characters of a value that a refusal shows


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides a result, and how it is compared with what another run stored.

    Args:
        values: JSON values by name, nested as deep as wanted; tuples become lists.
        remedy: what a user can do if an artefact was made with other settings: an imperative
            without a full stop.
        free: dotted keys that are stored and may differ, such as where a model is.
    """

    values: Mapping[str, Any]
    remedy: str = "choose another output folder, or remove it"
    free: Collection[str] = ()

    def __post_init__(self) -> None:
        # What was stored comes back as JSON, so tuples must already be lists here.
        object.__setattr__(self, "values", json.loads(json.dumps(self.values)))

    def extended(self, values: Mapping[str, Any]) -> Settings:
        """Settings with more values, which take precedence."""
        return dataclasses.replace(self, values={**self.values, **values})

    def check(self, stored: Mapping[str, Any], artefact: object) -> None:
        """Compare with stored `values` of the run that made an artefact, as read from JSON.

        `artefact` is its file or folder, or what else it is called in the refusal.
        """
        if not isinstance(stored, Mapping):
            raise ManifestError(
                f"{artefact} was not written by this program (its settings are no mapping): "
                f"{self.remedy}"
            )
        if changed := differences(stored, self.values, self.free):
            names = [line.partition(": ")[0] for line in changed]
            inputs = [name.removeprefix(INPUTS) for name in names if name.startswith(INPUTS)]
            what = f"{artefact} was made with other settings"
            if inputs:  # settings that differ, too, may only follow from them
                what = f"the {', '.join(inputs)} changed since {artefact} was made"
            raise OtherSettingsError(
                f"{what}: {self.remedy}. Stored -> asked:\n  " + "\n  ".join(changed)
            )


def read_record(path: Path, keys: Sequence[str], remedy: str) -> dict[str, Any]:
    """Read a JSON object that a run stored, which must hold these keys; more is allowed.

    `remedy` says what to do about a damaged one: an imperative without a full stop.
    """
    try:
        record = read_object(path)
    except IsADirectoryError as error:
        raise ManifestError(f"{path} must be a file and is a folder: {remedy}") from error
    except ValueError as error:
        raise ManifestError(f"{path} is damaged ({error}): {remedy}") from error
    if missing := [key for key in keys if key not in record]:
        raise ManifestError(
            f"{path} was not written by this program (it has no {missing[0]!r}): {remedy}"
        )
    return record


def differences(
    stored: Mapping[str, Any], asked: Mapping[str, Any], free: Collection[str] = ()
) -> list[str]:
    """Compare two settings of JSON values; mappings, and lists of mappings, item by item.

    Keys in `free` may differ. A line "dotted.key: stored -> asked" for each difference, by key.
    """
    return list(_compare(stored, asked, free, ""))


def _compare(
    stored: Mapping[str, Any], asked: Mapping[str, Any], free: Collection[str], prefix: str
) -> Iterator[str]:
    for key in sorted({*stored, *asked}):
        name = f"{prefix}{key}"
        before, after = stored.get(key, _ABSENT), asked.get(key, _ABSENT)
        old, new = _mapping(before), _mapping(after)
        if old is not None and new is not None:
            yield from _compare(old, new, free, f"{name}.")
        elif name not in free and (before is _ABSENT or after is _ABSENT or before != after):
            hashes = [isinstance(each, str) and _HASH.fullmatch(each) for each in (before, after)]
            shown = f"{_shown(before)} -> {_shown(after)}"
            yield f"{name}: {'its contents have changed' if all(hashes) else shown}"


def _mapping(value: Any) -> Mapping[str, Any] | None:
    """A mapping, or a list of mappings as one from index to item; None for other values."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return None


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else "null" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
