"""One YAML file a model pair: a section a stage, models and sampling written once.

The command line overrides the file with dotted keys (`--head.depth 2`). Why not `TrlParser`: it
fills flat dataclasses, and a pair's file needs sections that share models and sampling.
"""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from distill.config import DistilConfig, ToyPairConfig
from eval.measuring.methods import EvalConfig
from heads.config import HeadConfig
from specdata.errors import ConfigError
from specdata.labels.config import LabelsConfig
from specdata.models import check_dtype
from specdata.probability import SamplingConfig
from specdata.prompts.config import PromptSet
from specdata.rollouts.config import RolloutConfig

TOY = Path(__file__).parent / "configs" / "toy.yaml"


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """The pair."""

    target: str = field(metadata={"help": "folder or Hub id of the target, or ID@REVISION"})
    draft: str = field(metadata={"help": "folder or Hub id of the draft to start from"})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16 or float16"})

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """What is done with the finished artefacts. Nothing is uploaded unless an id is given."""

    draft_id: str | None = field(default=None, metadata={"help": "upload the draft to this Hub id"})
    head_id: str | None = field(default=None, metadata={"help": "upload the head to this Hub id"})
    license: str | None = field(default=None, metadata={"help": "license of the artefacts"})


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Everything about one pair. A stage reads its own section, models, sampling and seed."""

    output: str = field(metadata={"help": "folder of this run; a stage writes output/STAGE"})
    models: ModelsConfig = field(metadata={"help": "the pair"})
    rollouts: RolloutConfig = field(metadata={"help": "stage 1"})
    eval: EvalConfig = field(metadata={"help": "stage 4"})
    seed: int = field(default=0, metadata={"help": "decides every draw of the run"})
    sampling: SamplingConfig = field(
        default_factory=SamplingConfig, metadata={"help": "the distribution tokens are served from"}
    )
    toy: ToyPairConfig | None = field(
        default=None, metadata={"help": "train the embedded pair first (models must point to it)"}
    )
    draft: DistilConfig | None = field(
        default=None, metadata={"help": "stage 2; without it models.draft is used as it is"}
    )
    labels: LabelsConfig = field(default_factory=LabelsConfig, metadata={"help": "stage 3a"})
    head: HeadConfig | None = field(default=None, metadata={"help": "stage 3; without it, no head"})
    publish: PublishConfig = field(default_factory=PublishConfig, metadata={"help": "stage 5"})


@dataclass(frozen=True, slots=True)
class Command:
    """What a command line asks for."""

    config: PipelineConfig
    plan: bool


def parse(arguments: Sequence[str], description: str) -> Command:
    """Read `--config FILE --key value ... [--method METHOD ...] [--plan]`.

    Raises:
        ConfigError: for an unreadable file, an unknown key (naming the nearest) or a bad value.
        SystemExit: for `--help`.
    """
    parser = _parser(description)
    known, rest = parser.parse_known_args(arguments)
    if rest:
        keys = [*_leaves(PipelineConfig), "config", "method", "plan"]
        raise ConfigError(_unknown(f"option {rest[0]}", rest[0].lstrip("-").split("=")[0], keys))
    given = {key: value for key, value in vars(known).items() if "." in key or key in _TOP}
    tree = _read(Path(known.config))
    for key, text in given.items():
        if text is not None:
            _put(tree, key.split("."), _value(key, text))
    if known.method:
        _choose(tree, known.method)
    return Command(build(tree), known.plan)


def build(tree: Mapping[str, Any]) -> PipelineConfig:
    """Check a nested mapping and turn it into a configuration. Raises ConfigError."""
    _check_keys(tree, PipelineConfig, "")
    try:
        return TypeAdapter(PipelineConfig).validate_python(tree)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']} (got {one['input']!r})"
            for one in error.errors(include_url=False)
        ]
        raise ConfigError("unusable configuration:\n  " + "\n  ".join(lines)) from error


_TOP = {item.name for item in fields(PipelineConfig)}


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--config", default=str(TOY), help="YAML file (default: the toy pair)")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and stop")
    parser.add_argument(
        "--method",
        action="append",
        metavar="METHOD",
        help="evaluate only this method and plain: a name from eval.methods, or a new method as "
        "YAML, {name: ..., ...}; may be repeated",
    )
    for key, item in _options(PipelineConfig, ""):
        parser.add_argument(f"--{key}", dest=key, metavar="VALUE", help=_help(item))
    return parser


def _help(item: Field[Any]) -> str:
    default = "" if item.default is MISSING else f" (default: {item.default})"
    return f"{item.metadata.get('help', '')}{default}".replace("%", "%%")


def _options(kind: type, prefix: str) -> Iterator[tuple[str, Field[Any]]]:
    """Every field that a command line may set, with its dotted key."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        yield f"{prefix}{item.name}", item
        if section := _section(hints[item.name]):
            yield from _options(section, f"{prefix}{item.name}.")


def _leaves(kind: type) -> list[str]:
    return [key for key, _ in _options(kind, "")]


def _section(hint: Any) -> type | None:
    """The dataclass behind a type hint such as `HeadConfig | None`, if there is one."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next(
        (one for one in choices if isinstance(one, type) and is_dataclass(one)),
        None,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections (key: value), got {type(tree).__name__}")
    return tree


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key}: {text!r} is not a YAML value") from error


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[path[-1]] = value


def _choose(tree: dict[str, Any], wanted: Sequence[str]) -> None:
    """Leave of eval.methods the plain one and those wanted, in that order.

    Raises:
        ConfigError: for a name that is not there, naming the nearest, and for what is neither.
    """
    section = tree.get("eval")
    methods = section.get("methods") if isinstance(section, dict) else None
    if not isinstance(methods, list) or not all(isinstance(one, dict) for one in methods):
        return  # `build` says what is wrong with it
    known = {str(one.get("name")): one for one in methods}
    chosen = [one for one in methods if one.get("engine") == "plain"]
    for text in wanted:
        one = known.get(text) or _value("method", text)
        if not isinstance(one, dict):
            raise ConfigError(_unknown(f"method {text!r}", text, list(known)))
        if one not in chosen:
            chosen.append(one)
    tree["eval"] = {**tree["eval"], "methods": chosen}


def _check_keys(tree: Any, kind: type, prefix: str) -> None:
    """Refuse unknown keys anywhere, in lists of sections too."""
    if not isinstance(tree, Mapping):
        return
    hints = get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(_unknown(f"key {prefix}{key}", str(key), list(hints)))
        if section := _section(hints[key]):
            _check_keys(value, section, f"{prefix}{key}.")
        elif get_origin(hints[key]) is list and is_dataclass(get_args(hints[key])[0]):
            for index, entry in enumerate(value if isinstance(value, list) else []):
                _check_keys(entry, get_args(hints[key])[0], f"{prefix}{key}.{index}.")


def _unknown(what: str, name: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"
    return f"unknown {what}: {hint}"


__all__ = ["Command", "PipelineConfig", "PromptSet", "build", "parse"]
