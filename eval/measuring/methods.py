"""What is measured: methods and prompt sets, as configuration, and what of it cannot work."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, Literal

from eval.decode_config import DecodeConfig, DrafterName, SiblingOption, StopName
from eval.drafting.cost_rule import MEAN_ACCEPTANCE
from eval.measuring.results import PLAIN
from eval.runtime.graphs import Engine
from specdata.errors import ConfigError, at_least_one
from specdata.probability import SamplingConfig
from specdata.prompts.config import PromptSet

Loop = Literal["plain", "draft", "transformers"]
UNCALIBRATED = (0.0, 1.0)
"""Intercept and slope that take max q itself for the acceptance probability."""
COSTS = ("draft_seconds", "token_seconds", "mean_acceptance")
ONLY_READ_BY = {
    "length": ("fixed",),
    "limit": ("confidence", "entropy", "cumulative", "logit", "head", "cost"),
    "threshold": ("confidence", "entropy", "cumulative", "logit", "head"),
    "calibration": ("logit", "cost"),
    "head": ("cost",),
    **dict.fromkeys(COSTS, ("cost",)),
}
"""Settings that only some stopping rules read; elsewhere they are a mistake."""
ONLY_SHAPED_BY = {
    "length": ("chain", "paths"),
    "widths": ("tree",),
    "siblings": ("tree",),
    "tree_attention": ("paths", "tree"),
    **dict.fromkeys(("paths", "path_temperatures", "path_drafts"), ("paths",)),
}
"""Settings that only some drafters read."""


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """One row of the report."""

    name: str = field(metadata={"help": "unique name shown in the report"})
    engine: Loop = field(
        default="draft",
        metadata={"help": "plain (target alone), draft, or transformers (its assisted generation)"},
    )
    verifier: str = field(default="token", metadata={"help": "acceptance rule"})
    verifier_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "parameters of the acceptance rule"}
    )
    drafter: DrafterName = field(default="chain", metadata={"help": "chain, paths or tree"})
    length: int = field(default=4, metadata={"help": "drafted tokens a round with stop: fixed"})
    paths: int = field(default=1, metadata={"help": "number of paths"})
    widths: tuple[int, ...] = field(default=(), metadata={"help": "k-configuration of a tree"})
    siblings: SiblingOption = field(
        default="auto", metadata={"help": "iid, distinct, greedy, or auto: as the verifier needs"}
    )
    path_temperatures: tuple[float, ...] = field(
        default=(), metadata={"help": "the draft's temperature on each path"}
    )
    path_drafts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "a draft model (folder or Hub id) for each path; '' is the run's draft"},
    )
    tree_attention: bool = field(
        default=True,
        metadata={"help": "score paths and trees in one row; false: as a batch (an ablation)"},
    )
    stop: StopName = field(default="fixed", metadata={"help": "stopping rule"})
    threshold: float = field(default=0.7, metadata={"help": "of the stopping rule"})
    limit: int = field(default=20, metadata={"help": "most drafted tokens with other stop rules"})
    calibration: tuple[float, float] | None = field(
        default=None,
        metadata={"help": "of stop: logit and cost; without it fitted on the run's labels"},
    )
    draft_seconds: float = field(
        default=0.0, metadata={"help": "cost of a drafted token for stop: cost; 0 measures it"}
    )
    token_seconds: float = field(
        default=0.0, metadata={"help": "time of an emitted token for stop: cost; 0 measures it"}
    )
    mean_acceptance: float = field(
        default=MEAN_ACCEPTANCE,
        metadata={"help": "of a token not drawn yet, for stop: cost; only a first guess"},
    )
    head: bool = field(
        default=True, metadata={"help": "whether stop: cost asks the acceptance head, if any"}
    )


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is measured."""

    sets: list[PromptSet] = field(metadata={"help": "prompt sets, each a block of the report"})
    methods: list[MethodConfig] = field(metadata={"help": "ways of decoding, plain among them"})
    max_new_tokens: int = field(default=128, metadata={"help": "longest continuation, in tokens"})
    engine: Engine = field(
        default="eager",
        metadata={
            "help": "how our forwards run: eager, captured or compiled (eval.runtime.graphs)"
        },
    )
    batch: int = field(
        default=1,
        metadata={"help": "prompts decoded together; above 1 only counts are measured, no times"},
    )
    threads: int = field(
        default=0, metadata={"help": "threads of torch while measuring; 0 leaves its default"}
    )
    warmup_tokens: int = field(
        default=16, metadata={"help": "tokens that each method decodes before anything is timed"}
    )
    folder: str = field(
        default="eval",
        metadata={"help": "its folder in the run's output: another list of methods needs another"},
    )

    def __post_init__(self) -> None:
        at_least_one(self, "eval", "max_new_tokens", "warmup_tokens", "batch")
        names = [method.name for method in self.methods]
        if not self.sets:
            raise ConfigError("eval.sets must name at least one prompt set")
        if not re.fullmatch(r"eval[\w.-]*", self.folder):
            raise ConfigError(
                f"eval.folder must be a name that begins with 'eval', got {self.folder!r}"
            )
        if self.threads < 0:
            raise ConfigError(f"eval.threads must be 0 or larger, got {self.threads}")
        if self.batch > 1 and self.engine != "eager":
            raise ConfigError(
                f"batches run eagerly: eval.engine {self.engine!r} needs eval.batch 1, got "
                f"{self.batch}"
            )
        plain = [method.name for method in self.methods if method.engine == "plain"]
        if len(set(names)) < len(names) or plain != [PLAIN]:
            raise ConfigError(
                f"method names must be unique and exactly one, {PLAIN!r}, must have engine plain; "
                f"got {', '.join(names)}"
            )


def decode_config(method: MethodConfig, sampling: SamplingConfig) -> DecodeConfig:
    """The decoder's configuration of a method. Raises ConfigError if it cannot work."""
    return DecodeConfig(
        verifier=method.verifier,
        verifier_args=method.verifier_args,
        drafter=method.drafter,
        length=method.length,
        paths=method.paths,
        widths=method.widths,
        siblings=method.siblings,
        path_temperatures=method.path_temperatures,
        path_drafts=tuple(map(drafts_of(method).index, method.path_drafts)),
        tree_attention=method.tree_attention,
        stop=method.stop,
        threshold=method.threshold,
        limit=method.limit,
        calibration=method.calibration or UNCALIBRATED,
        draft_seconds=method.draft_seconds,
        token_seconds=method.token_seconds,
        mean_acceptance=method.mean_acceptance,
        **asdict(sampling),
    )


def check_methods(config: EvalConfig, sampling: SamplingConfig, *, head: bool) -> None:
    """Find impossible methods before any model is loaded.

    Raises:
        ConfigError: naming the method.
    """
    for method in config.methods:
        try:
            decode_config(method, sampling)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"method {method.name!r}: {error}") from error
        if method.stop == "head" and not head:
            raise ConfigError(f"method {method.name!r} stops by a head, but none was trained")
        for reader, unused in _unused(method).items():
            if unused:
                raise ConfigError(
                    f"method {method.name!r}: {reader} does not use {', '.join(unused)}"
                )
        if config.batch > 1:
            _check_untimed(method)


def _unused(method: MethodConfig) -> dict[str, list[str]]:
    """Settings that were given and that nothing would read, by what does not read them."""
    given = [item.name for item in fields(method) if getattr(method, item.name) != _default(item)]
    if method.engine != "draft":
        used = ("name", "engine") if method.engine == "plain" else ("name", "engine", "length")
        return {f"engine {method.engine}": [name for name in given if name not in used]}
    shape, stop = method.drafter, method.stop
    unread = [name for name in given if stop not in ONLY_READ_BY.get(name, (stop,))]
    return {
        f"drafter {shape}": [n for n in given if shape not in ONLY_SHAPED_BY.get(n, (shape,))],
        f"stop {stop}": unread,
    }


def _check_untimed(method: MethodConfig) -> None:
    """Refuse what needs times, which texts that are decoded together do not have."""
    if method.engine == "transformers":
        raise ConfigError(
            f"method {method.name!r}: engine transformers decodes one prompt at a time: leave it "
            "out, or set eval.batch to 1"
        )
    if method.stop == "cost" and not (method.draft_seconds and method.token_seconds):
        raise ConfigError(
            f"method {method.name!r}: stop cost measures its costs, and nothing is timed with "
            "eval.batch above 1: give draft_seconds and token_seconds, or set eval.batch to 1"
        )


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def drafts_of(method: MethodConfig) -> list[str]:
    """The draft models of a method, each once; the first, "", is the run's own."""
    return list(dict.fromkeys(["", *method.path_drafts]))


def path_drafts(config: EvalConfig) -> list[str]:
    """The draft models beside the run's own, each once."""
    return list(dict.fromkeys(name for one in config.methods for name in drafts_of(one)[1:]))


def deepest(method: MethodConfig) -> int:
    """The deepest position that a draft of this method can have."""
    if method.drafter == "tree":
        return len(method.widths)
    return method.length if method.stop == "fixed" else method.limit


def calibrates(config: EvalConfig) -> bool:
    """Whether a method needs the logistic model fitted."""
    return any(m.stop in ONLY_READ_BY["calibration"] and not m.calibration for m in config.methods)


def with_calibration(config: EvalConfig, calibration: tuple[float, float]) -> EvalConfig:
    """The same evaluation with that logistic model wherever a method gives none of its own."""
    methods = [
        replace(method, calibration=calibration)
        if method.stop in ONLY_READ_BY["calibration"] and not method.calibration
        else method
        for method in config.methods
    ]
    return replace(config, methods=methods)


def asks_head(method: MethodConfig) -> bool:
    """Whether the stopping rule reads an acceptance head (the cost rule: if there is one)."""
    return method.stop == "head" or (method.stop == "cost" and method.head)


def parameters(method: MethodConfig) -> dict[str, Any]:
    """The settings of a method that have no column of their own."""
    named: dict[str, Any] = dict(method.verifier_args)
    if method.drafter == "paths":
        named["paths"] = method.paths
        if method.path_temperatures:
            named["path_temperatures"] = list(method.path_temperatures)
        if method.path_drafts:
            named["path_drafts"] = list(method.path_drafts)
    if method.drafter == "tree":
        named["widths"] = list(method.widths)
        named["siblings"] = decode_config(method, SamplingConfig()).how
    if not method.tree_attention:
        named["tree_attention"] = False
    if method.stop in ONLY_READ_BY["calibration"]:
        named["calibration"] = list(method.calibration or UNCALIBRATED)
    if method.stop == "cost":
        named |= {name: getattr(method, name) for name in COSTS}
    return named
