"""One YAML file a model pair: a section a stage, models and sampling written once.

From it follow the run's folders, its drafts, and the settings that decide a stage's result. The
command line overrides the file with dotted keys (`--head.depth 2`). pydantic refuses unknown
keys and values out of range (`specdata.config`); here is what it does not do: the command line,
its `--help`, and hints at the nearest option.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from distill.config import DistilConfig, ToyPairConfig
from eval.decode_config import Method
from eval.drafting.stopping import STOPPING_RULES
from eval.measuring.methods import PLAIN, EvalConfig
from eval.verifiers import VERIFIERS
from heads.config import HeadConfig
from specdata.config import (
    Config,
    LabelsConfig,
    LogitsConfig,
    PromptSet,
    RolloutConfig,
    fields_of,
    mistakes,
    nearest,
    read_config,
    section_type,
)
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.loading import Dtype, Loading, PairLoading, Role, in_numbers
from specdata.sampling import SamplingConfig

TOY = Path(__file__).parent / "configs" / "toy.yaml"
USE = """\
  %(prog)s my-pair.yaml --plan              what it would read, write and refuse; nothing is made
  %(prog)s my-pair.yaml                     do it; after a kill the same command goes on
  %(prog)s my-pair.yaml --draft.epochs 2    with another value of a key, of those below
  draftsmith launch PROFILE RECIPE my-pair.yaml     in several processes
  draftsmith init TARGET --prompts FILE             writes my-pair.yaml

Without a FILE the embedded pair is meant, which takes minutes on a CPU (`make demo`).
It ends with status 0 (done), 2 (unusable configuration or input) or 1 (failed while running).
Every key of the file can be given as an option, with its dotted name."""
MOST_BYTES, MOST_VALUES = 2**17, 10_000
"""Of a YAML file; ours hold 5,000 bytes and 200 values."""
SHARED = ("output", "seed", "models", "sampling")
"""The sections that every stage reads besides its own."""
RESULTS, CERTIFICATE = "results.json", "certificate.json"
"""Files of an evaluation's folder."""


class ModelsConfig(Config):
    """The pair."""

    target: str = Field(min_length=1, description="folder or Hub id of the target")
    draft: str | None = Field(
        default=None,
        min_length=1,
        description="folder or Hub id of the draft to start from (left out if draft.init makes it)",
    )
    dtype: Dtype = Field(default="float32", description="precision that both are loaded in")
    load: PairLoading = Field(
        default=PairLoading(), description="how each is loaded: precision, devices, attention"
    )

    def loading(self, role: Role) -> Loading:
        """The loading of the target or a draft where its weights are only read."""
        load = self.load.target if role == "target" else self.load.draft
        return Loading(**{**dict(load), "dtype": self.dtype_of(role)})

    def dtype_of(self, role: Role) -> Dtype:
        """The precision of the target or a draft where its weights are only read."""
        return (self.load.target if role == "target" else self.load.draft).dtype or self.dtype


class PublishConfig(Config):
    """The publishing of the finished artefacts. Nothing is uploaded unless an id is given."""

    draft_id: str | None = Field(default=None, description="upload the draft to this Hub id")
    head_id: str | None = Field(default=None, description="upload the head to this Hub id")
    private: bool = Field(
        default=True, description="whether a repository that an upload makes is private"
    )
    license: str | None = Field(default=None, description="license of the artefacts")
    language: list[str] = Field(
        default=[], description="ISO 639 codes of the training prompts' languages, or code"
    )


class PipelineConfig(Config):
    """Everything about one pair. A stage reads its own section, models, sampling and seed."""

    output: str = Field(min_length=1, description="folder of this run; a stage writes output/STAGE")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="decides every draw of the run")
    models: ModelsConfig = Field(description="the pair")
    sampling: SamplingConfig = Field(
        default=SamplingConfig(), description="the distribution tokens are served from"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="variables that the target's chat template reads, as you serve it, such as "
        "{enable_thinking: false}; a row's own precede",
    )
    toy: ToyPairConfig | None = Field(
        default=None, description="train the embedded pair first (models must point to it)"
    )
    rollouts: RolloutConfig = Field(description="stage 1: completions by the target")
    logits: LogitsConfig | None = Field(
        default=None,
        description="stage 1b: the target's largest logits along the rollouts, for draft.logits "
        "and labels.logits; without it, none",
    )
    draft: DistilConfig | None = Field(
        default=None, description="stage 2: distillation; without it models.draft is used as it is"
    )
    labels: LabelsConfig = Field(
        default=LabelsConfig(), description="stage 3a: labels for the head"
    )
    head: HeadConfig | None = Field(
        default=None, description="stage 3: the acceptance head; without it, no head"
    )
    eval: EvalConfig = Field(description="stage 4: methods, prompts and measurement")
    publish: PublishConfig = Field(
        default=PublishConfig(), description="stage 5: cards and uploads"
    )

    @model_validator(mode="after")
    def _has_a_draft(self) -> PipelineConfig:
        """Refuse a pair of one model, unless its draft is made by this run."""
        makes_it = self.draft is not None and self.draft.init.kind != "model"
        if self.models.draft is None and not makes_it:
            raise ValueError(
                "models.draft is missing: name a draft, or let this run make one with draft.init "
                "(kind: target, states, mtp or fresh)"
            )
        if self.draft is not None and self.draft.held_out_share and self.head is None:
            raise ValueError(
                f"draft.held_out_share ({self.draft.held_out_share:g}) keeps rollouts for a "
                "head, and there is no head section: leave it out, or add one"
            )
        if self.models.draft is not None and makes_it and self.toy is None:
            raise ValueError(
                f"models.draft ({self.models.draft}) and draft.init (kind: "
                f"{self.draft.init.kind}) name two drafts to start from: leave one of them out"  # type: ignore[union-attr]
            )
        return self

    @field_validator("output")
    @classmethod
    def _is_written_out(cls, output: str) -> str:
        """Refuse what would make a folder that nobody meant, called " " or "~"."""
        if not output.strip():
            raise ValueError(f"must be a folder, not blank (got {output!r})")
        if output.startswith("~"):
            raise ValueError(
                f"must be written out (got {output!r}): only a shell replaces ~, and only where "
                "it begins an unquoted word; write the path of your home folder (or ./~... for a "
                "folder of that name)"
            )
        return output

    def folder(self, stage: str) -> Path:
        """The folder output/STAGE."""
        return Path(self.output) / stage

    def holds(self, path: str) -> bool:
        """True if a path lies in the run's output, however both are written."""
        return absolute(path).is_relative_to(absolute(self.output))

    @property
    def head_folder(self) -> Path:
        """The head's folder: output/head, unless head.folder says otherwise."""
        return self.folder(self.head.folder if self.head else "head")

    @property
    def eval_folder(self) -> Path:
        """The evaluation's: eval.folder, else output/eval, and output/eval-2 of head-2."""
        of_head = self.head_folder.name.removeprefix("head")
        return self.folder(self.eval.folder or f"eval{of_head}")

    @property
    def makes_initial_draft(self) -> bool:
        """True if this run makes the draft that its training starts from (`draft.init`)."""
        draft = self.draft
        return bool(draft and (draft.init.kind != "model" or draft.init.vocabulary))

    @property
    def given_models(self) -> list[str]:
        """The target, and the draft unless this run makes it."""
        return [model for model in (self.models.target, self.models.draft) if model is not None]

    @property
    def initial_draft(self) -> str:
        """The draft before it is trained: made by this run, or given."""
        if self.makes_initial_draft:
            return str(self.folder("initial") / "model")
        assert self.models.draft is not None  # checked above
        return self.models.draft

    @property
    def draft_to_distil(self) -> str:
        """The draft that distillation starts from: fine-tuned by this run, or as it was."""
        is_tuned = self.draft is not None and self.draft.finetune is not None
        return str(self.folder("finetuned") / "model") if is_tuned else self.initial_draft

    @property
    def draft_in_use(self) -> str:
        """The distilled draft, or the given one if this run distils none."""
        return str(self.folder("draft") / "model") if self.draft else self.initial_draft

    @property
    def head_in_use(self) -> str | None:
        """The trained head, if this run trains one."""
        return str(self.head_folder / "model") if self.head else None

    @property
    def evaluated_head(self) -> str | None:
        """The trained head, if a method of the evaluation asks it."""
        asks = any(method.stop.reads_head for method in self.eval.methods)
        return self.head_in_use if asks else None

    @property
    def held_out_share(self) -> float:
        """Share of the training rollouts that the draft does not learn from."""
        return self.draft.held_out_share if self.draft else 0.0

    @property
    def held_out_setting(self) -> dict[str, Any]:
        """The held-out share as a setting of a stage; nothing where it is 0."""
        return {"held_out_share": self.held_out_share} if self.held_out_share else {}

    @property
    def template_setting(self) -> dict[str, Any]:
        """The variables of chat templates as a setting of a stage; nothing if there are none."""
        given = self.chat_template_kwargs
        return {"chat_template_kwargs": given} if given else {}

    def sampled(self, *roles: Role) -> dict[str, Any]:
        """The settings that decide the result of any stage that runs the models of these roles."""
        loaded = {**self.loaded(*roles), **self.template_setting}
        return {"sampling": asdict(self.sampling), "seed": self.seed, **loaded}

    def loaded(self, *roles: Role) -> dict[str, Any]:
        """The settings of loading that decide a result: of a role, if models.dtype does not."""
        models = self.models
        dtypes = {role: models.dtype_of(role) for role in roles}
        other = {role: {"dtype": dtype} for role, dtype in dtypes.items() if dtype != models.dtype}
        return {"dtype": models.dtype, **({"load": other} if other else {})}


def absolute(path: str | Path) -> Path:
    """A path from the root, without "..", symbolic links as they are."""
    return Path(os.path.normpath(Path(path).absolute()))


@contextmanager
def named(key: str) -> Iterator[None]:
    """Have what is said of a value begin with its key."""
    try:
        yield
    except (ConfigError, CacheNotRewindableError) as error:
        raise ConfigError(f"{key}: {error}") from error


@dataclass(frozen=True, slots=True)
class Command:
    """The request of a command line: the checked configuration, defaults filled in.

    `given` are the file's values with those of the command line, before defaults; `plan` whether
    only to say what would be done, and `memory` the bytes of a device, if they are given.
    """

    config: PipelineConfig
    given: Mapping[str, Any]
    plan: bool
    memory: int | None = None


def parse(
    arguments: Sequence[str],
    description: str = "",
    sections: Sequence[str] = tuple(PipelineConfig.model_fields),
    program: str | None = None,
) -> Command:
    """Read `FILE --key value ... [--method METHOD ...] [--plan]`; `--config FILE` is the same.

    For `--help`: what the recipe does, the sections that it lists (the others are accepted, too),
    and how the recipe was called, by default the script's name.
    """
    options, rest = _parser(description, sections, program).parse_known_args(arguments)
    while rest and not rest[0].startswith("-"):  # the value of an unknown option comes after it
        if options.config is not None:
            raise ConfigError(f"two configuration files, {options.config} and {rest[0]}: give one")
        options.config = rest.pop(0)
    if rest:
        keys = [*dict(_options(PipelineConfig, "")), "config", "memory", "method", "plan"]
        hint = nearest(rest[0].lstrip("-").split("=")[0], keys)
        raise ConfigError(f"unknown option {rest[0]}: {hint}")
    tree = read_yaml(Path(options.config or TOY))
    for key, info in _options(PipelineConfig, ""):
        if (text := vars(options)[key]) is not None:
            section, (*path, last) = tree, key.split(".")
            for name in path:
                inner = section.get(name)  # a copy, because an alias in YAML is the same mapping
                section[name] = {**inner} if isinstance(inner, dict) else {}
                section = section[name]
            section[last] = text if _is_literal(info, text) else _value(key, text)
    if options.method and "eval" not in sections:
        raise ConfigError(
            "--method chooses what an evaluation measures, and this recipe measures nothing: leave "
            "it out, or give it to run-eval or pipeline"
        )
    if options.method:
        _choose_methods(tree, options.method)
    if options.memory and not options.plan:
        raise ConfigError("--memory says how large a device is for --plan: give both, or neither")
    memory = in_numbers(options.memory) if options.memory else None
    return Command(build(tree), tree, options.plan, memory)


def build(tree: Mapping[str, Any]) -> PipelineConfig:
    """Check a nested mapping and turn it into a configuration. Raises ConfigError."""
    return read_config(PipelineConfig, tree)


def _parser(
    description: str, sections: Sequence[str], program: str | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        "%(prog)s [FILE] [--KEY VALUE ...] [--plan]",
        f"{description}\n\n{USE}" if description else None,
        allow_abbrev=False,
        epilog="\n".join(_epilog(sections)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="the same as FILE (default: the toy pair)")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="say what would be read and written, how large that is, and what would be refused",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="with --plan: say what each stage holds in a GPU's memory, of this size (80GB)",
    )
    parser.add_argument(
        "--method",
        action="append",
        metavar="METHOD",
        help="evaluate only this method and plain: a name from eval.methods, or a new method as "
        "YAML, {name: ..., ...}; may be repeated"
        if "eval" in sections
        else argparse.SUPPRESS,
    )
    groups = {
        name: parser.add_argument_group(name, info.description)
        for name, info in PipelineConfig.model_fields.items()
        if name in sections and section_type(info.annotation)
    }
    for key, info in _options(PipelineConfig, ""):
        name = key.split(".")[0]
        metavar = "YAML" if section_type(info.annotation) else "VALUE"
        if get_origin(info.annotation) is Literal:
            metavar = "|".join(map(str, get_args(info.annotation)))
        groups.get(name, parser).add_argument(
            f"--{key}",
            dest=key,
            metavar=metavar,
            help=_help(info) if name in sections else argparse.SUPPRESS,
        )
    return parser


def _epilog(sections: Sequence[str]) -> Iterator[str]:
    """The keys of a method, the verifiers, and the stopping rules with theirs."""
    if "eval" in sections:
        yield "A method (of eval.methods or --method), such as {name: K=4, length: 4}:"
        for name, info in Method.model_fields.items():
            if name not in ("verifier", "stop"):
                yield f"  {name}: {_help(info).replace('%%', '%')}"
        yield f"  verifier: {', '.join(VERIFIERS)}"
        yield "  stop: the stopping rule, with its own keys beside it:"
        for rule in STOPPING_RULES.values():
            keys = (f"{n} {json.dumps(i.get_default())}" for n, i in rule.model_fields.items())
            yield f"    {rule.name}: {', '.join(keys)}"
    if {"rollouts", "eval"} & set(sections):
        yield "A prompt set (of rollouts.sets, eval.sets), such as {name: own.jsonl, split: test}:"
        yield from (f"  {name}: {_help(info)}" for name, info in fields_of(PromptSet).items())
    if not set(PipelineConfig.model_fields) <= set(sections):
        yield "Every other key of the file can be given, too: see `draftsmith pipeline --help`."


def _help(info: FieldInfo) -> str:
    if section_type(info.annotation) and get_origin(info.annotation) is not list:
        return "the whole section" + (", or null to leave it out" if info.default is None else "")
    text = info.description or ""
    if not info.is_required() and info.get_default(call_default_factory=True) is not None:
        text += f" (default: {info.get_default(call_default_factory=True)})"
    return text.replace("%", "%%")


def _options(kind: type, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every field that a command line may set, with its dotted key."""
    for name, info in fields_of(kind).items():
        yield f"{prefix}{name}", info
        section = section_type(info.annotation)
        if section and get_origin(info.annotation) is not list:
            yield from _options(section, f"{prefix}{name}.")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file of a user holds. Raises ConfigError."""
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MOST_BYTES):
            what = f"it must be a regular file of at most {MOST_BYTES:,} bytes"
            raise OSError(errno.EFBIG, what)
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as a date 2026-02-30
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections (key: value), got {type(tree).__name__}")
    return tree


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; YAML itself would keep the last.

    And what would grow without end where aliases (`*name`) are written out.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document, and refuse what its aliases would make too large."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _written_out(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and refuse a key that is given twice other than by `<<`."""
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
        return node


def _written_out(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Values of a document, or a part, once each alias is replaced by what it names.

    `known` are those of parts that were counted; 0 of those that are being counted.
    """
    if node not in known:
        known[node] = 0
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [part for each in below for part in (each if isinstance(each, tuple) else (each,))]
        known[node] = 1 + sum(_written_out(part, known) for part in parts)
    if not 0 < known[node] <= MOST_VALUES:
        problem = f"must hold at most {MOST_VALUES:,} values with its aliases written out"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return known[node]


def load_yaml(text: str) -> Any:
    """Read a user's YAML. Raises yaml.YAMLError, ValueError or RecursionError."""
    return yaml.load(text, Loader=_UniqueKeyLoader)


def _is_literal(info: FieldInfo, text: str) -> bool:
    """True if a value is taken as it stands: those of text are, but for `null` where that is one.

    YAML would end a folder's name at " #", and make a number or a date of others.
    """
    is_list = get_origin(info.annotation) is list  # of which a text is one item
    kinds = {info.annotation} if is_list else {*(get_args(info.annotation) or (info.annotation,))}
    return str in kinds and kinds <= {str, NoneType} and not (NoneType in kinds and text == "null")


def _value(key: str, text: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"--{key}: {text[:80]!r}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--{key}: {text[:80]!r} is not a YAML value") from error


def _choose_methods(tree: dict[str, Any], names: Sequence[str]) -> None:
    """Leave of eval.methods the plain one and those wanted, in that order."""
    section = tree.get("eval")
    methods = section.get("methods") if isinstance(section, dict) else None
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        return  # `build` says what is wrong with it
    by_name = {str(method.get("name")): method for method in methods}
    kept = [method for method in methods if method.get("name") == PLAIN]
    for text in names:
        method = by_name.get(text) or _value("method", text)
        if not isinstance(method, dict):
            raise ConfigError(f"unknown method {text!r}: {nearest(text, by_name)}")
        if text not in by_name:
            try:  # here, to name the option
                Method.model_validate(method)
            except ValidationError as error:
                reasons = "; ".join(mistakes(error, Method))
                raise ConfigError(f"--method {text!r}: {reasons}") from error
        if method not in kept:
            kept.append(method)
    tree["eval"] = {**tree["eval"], "methods": kept}
