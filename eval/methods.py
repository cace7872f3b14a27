"""What is measured: methods and prompt sets, as configuration, and what of it cannot work."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, Literal

from eval.cost_rule import MEAN_ACCEPTANCE
from eval.decode_config import DecodeConfig, Shape, Siblings, Stop
from eval.results import PLAIN
from specdata.errors import ConfigError, at_least_one
from specdata.probability import SamplingConfig
from specdata.prompts import PromptSet

Engine = Literal["plain", "draft", "transformers"]
UNCALIBRATED = (0.0, 1.0)
"""Intercept and slope that take max q itself for the acceptance probability."""
COSTS = ("draft_seconds", "token_seconds", "mean_acceptance")
ONLY_READ_BY = {
    "calibration": ("logit", "cost"),
    "head": ("cost",),
    **dict.fromkeys(COSTS, ("cost",)),
}
"""Settings that few stopping rules read; elsewhere they are a mistake."""


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """One row of the report."""

    name: str = field(metadata={"help": "unique name shown in the report"})
    engine: Engine = field(
        default="draft",
        metadata={"help": "plain (target alone), draft, or transformers (its assisted generation)"},
    )
    verifier: str = field(default="token", metadata={"help": "acceptance rule"})
    verifier_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "parameters of the acceptance rule"}
    )
    drafter: Shape = field(default="chain", metadata={"help": "chain, paths or tree"})
    length: int = field(default=4, metadata={"help": "drafted tokens a round with stop: fixed"})
    paths: int = field(default=1, metadata={"help": "number of paths"})
    widths: tuple[int, ...] = field(default=(), metadata={"help": "k-configuration of a tree"})
    siblings: Siblings = field(
        default="auto", metadata={"help": "iid, distinct, greedy, or auto: as the verifier needs"}
    )
    path_temperatures: tuple[float, ...] = field(
        default=(), metadata={"help": "the draft's temperature on each path"}
    )
    stop: Stop = field(default="fixed", metadata={"help": "stopping rule"})
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
        at_least_one(self, "eval", "max_new_tokens", "warmup_tokens")
        names = [method.name for method in self.methods]
        if not self.sets:
            raise ConfigError("eval.sets must name at least one prompt set")
        if not re.fullmatch(r"eval[\w.-]*", self.folder):
            raise ConfigError(
                f"eval.folder must be a name that begins with 'eval', got {self.folder!r}"
            )
        if self.threads < 0:
            raise ConfigError(f"eval.threads must be 0 or larger, got {self.threads}")
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
        if unused := _unused(method):
            reader = f"stop {method.stop}"
            if method.engine != "draft":
                reader = f"engine {method.engine}"
            raise ConfigError(f"method {method.name!r}: {reader} does not use {', '.join(unused)}")


def _unused(method: MethodConfig) -> list[str]:
    """Settings that were given and that nothing would read."""
    given = [item.name for item in fields(method) if getattr(method, item.name) != _default(item)]
    if method.engine != "draft":
        used = ("name", "engine") if method.engine == "plain" else ("name", "engine", "length")
        return [name for name in given if name not in used]
    unused = [name for name in given if method.stop not in ONLY_READ_BY.get(name, (method.stop,))]
    return [*unused, "threshold"] if method.stop == "cost" and "threshold" in given else unused


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


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
    if method.drafter == "tree":
        named["widths"] = list(method.widths)
        named["siblings"] = decode_config(method, SamplingConfig()).how
    if method.stop in ONLY_READ_BY["calibration"]:
        named["calibration"] = list(method.calibration or UNCALIBRATED)
    if method.stop == "cost":
        named |= {name: getattr(method, name) for name in COSTS}
    return named
