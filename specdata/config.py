"""The base of every configuration class, the report of a mistake in one, and the data stages' own.

A configuration class lists its fields with their ranges and descriptions; pydantic refuses unknown
keys, wrong types and values out of range. This module adds what pydantic does not do: the nearest
known name of an unknown key, and one line a mistake under its dotted key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_type_hints
from unicodedata import category
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from specdata.errors import ConfigError, without_passwords
from specdata.sampling import UNAPPLIED

T = TypeVar("T")

MOST_TOKENS, MOST_TIMES = 2**24, 10_000
"""No model has so many positions, and nobody repeats or stacks a thing so often: what is asked for
beyond is a slip of the keyboard."""
Count = Annotated[int, Field(le=MOST_TOKENS)]
"""Of tokens, prompts, rows or steps, and sizes."""
Few = Annotated[int, Field(le=MOST_TIMES)]
"""Of what multiplies the work: samples of a prompt, passes, layers, tokens of a draft."""
_NO_SECTION = ("model_type", "model_attributes_type", "dataclass_type", "dataclass_exact_type")
FREE_TEXT = ("template",)
"""Fields that may hold line breaks and tabs; other texts are names, paths and addresses."""


class Config(BaseModel):
    """Base of the configuration classes: frozen, unknown keys refused, NaN and infinity refused.

    Each field is declared as `name: type = Field(default, ge=..., description=...)`. Checks that
    involve several fields are `model_validator(mode="after")` methods that raise ValueError.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert silently, or what a terminal would act on."""
        assert info.field_name is not None
        check_value(cls.model_fields[info.field_name].annotation, value, info.field_name)
        return value


def checked_taps(taps: Sequence[int], layers: int) -> list[int]:
    """Taps that a target of so many layers has, in order. Raises ConfigError."""
    if list(taps) != sorted(set(taps)):
        raise ConfigError(f"taps must be in order, each once, got {list(taps)}")
    if outside := [tap for tap in taps if not 0 <= tap <= layers]:
        raise ConfigError(
            f"taps must be from 0 (what enters the first layer) to {layers} (what "
            f"leaves the last), because the target has {layers} layers; got {outside[0]}"
        )
    return list(taps)


def check_value(hint: Any, value: Any, name: str) -> None:
    """Check a value before it is converted, and all that a section or list holds.

    pydantic reads true as the number 1, and takes control characters, with which a name could
    overwrite what a terminal shows. Raises ValueError for these, and for an address with a
    password.
    """
    if isinstance(value, bool) and _is_number(hint):
        raise ValueError(f"must be a number (got {str(value).lower()})")
    if isinstance(value, str):
        allowed = "\n\t" if name in FREE_TEXT else ""
        if any(category(letter) == "Cc" and letter not in allowed for letter in value):
            raise ValueError(f"must hold no control characters (got {value!r})")
        if name != "url" and without_passwords(value) != value:  # a server's says more itself
            raise ValueError(
                "must hold no name and password: it is stored and shown. Log in with `hf auth "
                "login`, or give a folder or file on this machine"
            )
    elif isinstance(value, list | tuple):
        for item in value:
            check_value(hint, item, name)
    elif isinstance(value, Mapping):
        section = section_type(hint)
        if section is not None and issubclass(section, Config):
            return  # which checks its own fields, and so names the place
        section_fields = fields_of(section) if section is not None else {}
        for key, item in value.items():
            info = section_fields.get(str(key))
            try:
                check_value(info.annotation if info else None, item, str(key))
            except ValueError as error:
                raise ValueError(f"{key!r} {error}") from error


def _is_number(hint: Any) -> bool:
    """True if numbers are taken, one or several, and neither true nor false."""
    kinds = {hint, *(inner for kind in get_args(hint) for inner in (kind, *get_args(kind)))}
    return bool(kinds & {int, float}) and bool not in kinds


def read_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """Turn a nested mapping into a configuration: a `Config` class, or a dataclass."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = "\n  ".join(mistakes(error, kind))
        raise ConfigError(f"unusable configuration:\n  {lines}") from error


def read_stored(kind: type[T], values: Any, where: str) -> T:
    """Turn a mapping that anybody may have written into a `kind`; errors name the file."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"{where} cannot be used: {mistakes(error, kind)[0]}") from error


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
        elif mistake["type"] in _NO_SECTION and value is None:
            message = "must be a section, a mapping of keys, and is empty (null)"
        elif mistake["type"] in _NO_SECTION:
            message = f"must be a section, a mapping of keys (got {value!r})"
        elif mistake["type"] != "value_error":  # ours say themselves what they got
            message += f" (got {without_passwords(repr(value))})"
        lines.append(": ".join(filter(None, (".".join(map(_key, path)), message))))
    return lines


def _key(key: int | str) -> str:
    """A key as it is printed; a terminal must not act on what a file calls one."""
    text = str(key)
    return text if text.isprintable() else repr(text)


def nearest(name: str, choices: Collection[str]) -> str:
    """A hint at the known name that an unknown one resembles, or at all of them."""
    if (key := name.rpartition(".")[-1]) in UNAPPLIED:
        return (
            f"nothing here applies {key}; p and q are made of one row of logits each, by "
            "temperature, top_k, top_p and min_p. Leave it out, and switch it off where you serve "
            f"({key}: {UNAPPLIED[key]}), as figures are of texts without it"
        )
    known, name = {each.lstrip("-"): each for each in choices}, name.lstrip("-")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    words = {each: {*re.split(r"[-_.]", each), *each.split(".")} for each in known}
    near = near or [each for each in known if name in words[each]]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.7 if name[3:] else 0.6)
    near = near or [each for each in known if each and name.startswith(each)]  # output, and out
    if not near:
        return f"known: {', '.join(choices)}"
    shortest = sorted((known[each] for each in near), key=len)[:3]
    return f"did you mean {' or '.join(map(repr, shortest))}?"


def fields_of(kind: type) -> Mapping[str, FieldInfo]:
    """Every field of a configuration class by name: its annotation, default and description.

    A standard dataclass has them in its annotations: `Annotated[float, Field(description=...)]`.
    """
    if issubclass(kind, BaseModel):
        return kind.model_fields
    if is_pydantic_dataclass(kind):
        return kind.__pydantic_fields__
    assert is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    return {
        item.name: FieldInfo.from_annotated_attribute(hints[item.name], item.default)
        for item in fields(kind)
    }


def section_type(hint: Any) -> type | None:
    """The configuration class behind `Section`, `Section | None` or `list[Section]`, if any."""
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        return hint
    return next(filter(None, map(section_type, get_args(hint))), None)


def _class_at(kind: type, path: tuple[int | str, ...]) -> type | None:
    """The configuration class that a path of keys and list indices leads to."""
    config_class: type | None = kind
    for key in path:
        if isinstance(key, str) and config_class is not None:
            info = fields_of(config_class).get(key)
            config_class = section_type(info.annotation) if info else None
    return config_class


class ServerConfig(Config):
    """The address of a server, and how it is asked."""

    url: str = Field(
        default="http://localhost:8000",
        description="address of the server, such as http://localhost:8000, without a password",
    )
    model: str | None = Field(
        default=None, description="name it is served under (default: models.target)"
    )
    concurrency: Few = Field(default=64, ge=1, description="requests under way at once")
    key_variable: str | None = Field(
        default=None,
        description="environment variable that holds the server's API key (or all that its "
        "Authorization header must say, such as `Basic ...`)",
    )

    @field_validator("url")
    @classmethod
    def _is_public(cls, url: str) -> str:
        """Refuse an address that may hold a secret, without repeating it: run.json stores it."""
        if re.search(r"[@?#\s]", url):
            raise ValueError(
                "must be an address alone, such as http://localhost:8000: it is stored and shown, "
                "so it must hold no name, password or query (no @, ?, # or space). Put the key "
                "into an environment variable and name that in key_variable, beside url"
            )
        parts = urlsplit(url)  # ValueError for an IPv6 address or a port that is none
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"must begin with http:// or https:// and a host (got {url!r})")
        return url


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class PromptSet:
    """Some prompts of one data set, constructed by position: `PromptSet("maths", "test", 100)`."""

    name: str = Field(
        description="embedded (natural, for chat models: chat-assistant, chat-maths, chat-code, "
        "chat-letters, chat-edits; long, lists of such texts; for the embedded pair: instruct, "
        "maths, code), catalogued (alpaca, gsm8k, ...), a JSONL, JSON or parquet file, a folder, "
        "or a Hub id OWNER/NAME[@REVISION]"
    )
    split: str = Field(default="test", description="train, dev or test; stored with each row")
    count: Count = Field(
        default=100, ge=0, description="how many prompts are read, from the first; 0 for all"
    )
    source: str | None = Field(
        default=None, description="read a catalogued set from this file, folder or Hub id"
    )
    subset: str | None = Field(default=None, description="configuration of a Hub data set")
    source_split: str | None = Field(
        default=None, description="the Hub split that is read (default: the one of `split`)"
    )
    template: str | None = Field(
        default=None, description="the prompt's text, with {column} for what a row holds"
    )
    reference: str | None = Field(
        default=None,
        description="the text that an answer is scored against (eval.scores), with {column} for "
        "what a row holds (default: as catalogued, or the column `reference`)",
    )
    chat: bool | None = Field(
        default=None,
        description="use the chat template (default: as the set is meant; `prompt`: no)",
    )
    turns: Literal["all", "first", "last"] = Field(
        default="all", description="which of a user's turns in conversations are prompts"
    )


class LabelsConfig(Config):
    """The labelling of rollouts with the draft's acceptance."""

    shard_size: Count = Field(default=64, ge=1, description="rollouts of one shard")
    draws: Few = Field(
        default=1,
        ge=1,
        description="draft tokens labelled a position of the training rollouts, from one pass of "
        "each model; with greedy and at temperature 0 all are equal, and there is one",
    )
    greedy: bool = Field(
        default=False,
        description="label the draft's likeliest token, which is accepted with p: what engines "
        "draft that do not ask for the draft's distribution (llama.cpp, vLLM by default)",
    )
    logits: str | None = Field(
        default=None, description="dataset of stage logits to make these from, without the target"
    )
    bound: bool = Field(
        default=False, description="with logits: upper bounds will do where not exact"
    )


class LogitsConfig(Config):
    """The logits that are stored of the target along the rollouts, and what computes them."""

    top_logits: Count = Field(
        default=64, ge=1, description="largest target top logits stored a position (N)"
    )
    shard_size: Count = Field(default=64, ge=1, description="rollouts of one shard")
    backend: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="transformers (the target in this process), or vllm (a server in its own, "
        "which computes log probabilities of given texts)",
    )
    server: ServerConfig = Field(default=ServerConfig(), description="the server of backend vllm")

    def stored_settings(self) -> dict[str, Any]:
        """The settings that the rows depend on, as JSON values; not where the server is."""
        return self.model_dump(mode="json", exclude={"server"})


class RolloutConfig(Config):
    """The prompts that are completed, how far, and by what."""

    sets: list[PromptSet] = Field(description="prompt sets to complete")
    max_new_tokens: Count = Field(default=128, ge=1, description="longest completion, in tokens")
    samples: Few = Field(default=1, ge=1, description="completions of each prompt")
    shard_size: Count = Field(
        default=64, ge=1, description="prompts of one shard, which is made or lost as a whole"
    )
    batch_size: Count = Field(default=64, ge=1, description="completions decoded together")
    store_states: bool = Field(
        default=False,
        description="store the target's last hidden states with the completions (hidden size x "
        "bytes of a number, a token), so that neither distillation nor labels of a plain draft run "
        "the target again",
    )
    store_taps: list[int] | None = Field(
        default=None,
        min_length=1,
        description="store these states inside the target at every token, prompts included (2 x "
        "hidden size bytes each), for a draft of init.kind states with the same taps: then no "
        "training runs the target again; 0 enters the first layer",
    )
    backend: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="transformers (in this process) or vllm (a server in its own)",
    )
    vllm: ServerConfig = Field(default=ServerConfig(), description="the server of backend vllm")

    @model_validator(mode="after")
    def _states_are_known(self) -> Self:
        if self.store_taps is not None and self.store_taps != sorted(set(self.store_taps)):
            raise ValueError(f"store_taps must be in order, each once, got {self.store_taps}")
        if (self.store_states or self.store_taps) and self.backend != "transformers":
            raise ValueError(
                "store_states and store_taps need backend transformers, got "
                f"{self.backend}: a server does not give its hidden states"
            )
        return self

    def check_splits(self) -> None:
        """Raise ConfigError if training would find other splits than it reads, or not these."""
        splits, known = {dataset.split for dataset in self.sets}, {"train", "dev"}
        if not known <= splits <= {*known, "test"}:
            raise ConfigError(
                "rollouts.sets must hold splits train and dev to train on, and no others but test, "
                f"got {', '.join(sorted(splits))} (source_split is what the Hub calls a split)"
            )

    def stored_settings(self) -> dict[str, Any]:
        """The settings that the rows depend on, as JSON values; not where the server is."""
        settings = self.model_dump(mode="json", exclude={"vllm"})
        if self.backend == "vllm":
            del settings["batch_size"]
        return settings
