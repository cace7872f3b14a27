"""What every configuration class is made of, and how a mistake in one is reported.

A configuration class lists its fields with their ranges and descriptions; pydantic refuses unknown
keys, wrong types and values out of range. This module adds what pydantic does not do: the nearest
known name of an unknown key, and one line a mistake under its dotted key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from specdata.errors import ConfigError, without_passwords

T = TypeVar("T")


class Config(BaseModel):
    """Base of the configuration classes: frozen, unknown keys refused, NaN and infinity refused.

    Each field is declared as `name: type = Field(default, ge=..., description=...)`. Checks that
    involve several fields are `model_validator(mode="after")` methods that raise ValueError.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


def read_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """Turn a nested mapping into a configuration.

    Args:
        kind: a `Config` class, or a dataclass.
        values: what a YAML file holds.

    Raises:
        ConfigError: with one line for each mistake, such as
            "head.depht: unknown key: did you mean 'depth'?" or
            "head.mixing: must be less than 1 (got 1.5)".
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = "\n  ".join(mistakes(error, kind))
        raise ConfigError(f"unusable configuration:\n  {lines}") from error


def mistakes(error: ValidationError, kind: type) -> list[str]:
    """One line for each mistake that pydantic found in the values of a configuration class."""
    lines = []
    for mistake in error.errors(include_url=False):
        path, value = mistake["loc"], mistake["input"]
        message = mistake["msg"].removeprefix("Value error, ")
        message = re.sub(r"^(Input|String|List|Tuple|Dictionary) should", "must", message)
        if mistake["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            owner = _class_at(kind, path[:-1])
            message = "unknown key: " + nearest(str(path[-1]), fields_of(owner) if owner else ())
        elif mistake["type"] == "missing":
            message = "is missing"
        elif mistake["type"] != "value_error":  # ours say themselves what they got
            message += f" (got {without_passwords(repr(value))})"
        lines.append(": ".join(filter(None, (".".join(map(str, path)), message))))
    return lines


def nearest(name: str, choices: Collection[str]) -> str:
    """A hint at the known name that an unknown one resembles, or at all of them."""
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"


def fields_of(kind: type) -> Mapping[str, FieldInfo]:
    """Every field of a configuration class by name: its annotation, default and description.

    Args:
        kind: a `Config` class, a pydantic dataclass, or a standard one, whose descriptions are in
            `field(metadata={"help": ...})`.
    """
    if issubclass(kind, BaseModel):
        return kind.model_fields
    if is_pydantic_dataclass(kind):
        return kind.__pydantic_fields__
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    return {item.name: _field_info(item, hints[item.name]) for item in fields(kind)}


def _field_info(item: Field[Any], hint: Any) -> FieldInfo:
    """A field of a standard dataclass as pydantic describes its own."""
    info = FieldInfo(
        default=PydanticUndefined if item.default is MISSING else item.default,
        default_factory=None if item.default_factory is MISSING else item.default_factory,
        description=item.metadata.get("help"),
    )
    info.annotation = hint
    return info


def section_type(hint: Any) -> type | None:
    """The configuration class behind `Section`, `Section | None` or `list[Section]`, if any."""
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        return hint
    return next(filter(None, map(section_type, get_args(hint))), None)


def _class_at(kind: type, path: tuple[int | str, ...]) -> type | None:
    """The configuration class that a path of keys and list indices leads to."""
    here: type | None = kind
    for key in path:
        if isinstance(key, str) and here is not None:
            info = fields_of(here).get(key)
            here = section_type(info.annotation) if info else None
    return here
