"""An evaluation's configuration: methods, prompt sets and sizes, and the checks of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from eval.decode_config import FOREIGN_DECODERS, Method
from eval.measuring.scores import ScoreName, check_scores
from eval.runtime.engines import Engine
from specdata.config import Config, Count, PromptSet
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig

PLAIN = "plain"
"""Name of the method that all others are compared with: the target alone."""
SERVED = "server alone"
"""Name of the method that served engines are compared with: one without a draft."""


class EvalConfig(Config):
    """The evaluation's configuration."""

    sets: list[PromptSet] = Field(description="prompt sets, each a block of the report")
    methods: list[Method] = Field(description="ways of decoding, plain among them")
    max_new_tokens: Count = Field(default=128, ge=1, description="longest continuation, in tokens")
    engine: Engine = Field(
        default="eager",
        description="how our forwards run: eager (the model's own code) or captured (a graph "
        "traced once)",
    )
    batch: Count = Field(
        default=1,
        ge=1,
        description="prompts decoded together; above 1 only counts are measured, no times",
    )
    threads: Count = Field(
        default=0, ge=0, description="threads of torch while measuring; 0 leaves its default"
    )
    scores: list[ScoreName] = Field(
        default=[],
        description="task scores of texts whose prompts have a reference: rougeL, bleu, "
        "exact_match (needs pip install '.[scores]')",
    )
    verifier_seconds: float = Field(
        default=0.0,
        ge=0.0,
        description="for the table of every verifier on every kind of draft; 0: no table",
    )
    folder: str | None = Field(
        default=None,
        description="its folder in the run's output: another list of methods needs another; null: "
        "eval, and eval-2 where head.folder is head-2",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sets:
            raise ConfigError("eval.sets must name at least one prompt set, got []")
        parts = [f"{each.name}, split {each.split}" for each in self.sets]
        if again := [part for part in parts if parts.count(part) > 1]:
            raise ConfigError(
                f"each entry of eval.sets is a block of the report, and {again[0]}, is named "
                "twice: name it once"
            )
        if self.folder is not None and not re.fullmatch(r"eval[\w.-]*", self.folder):
            raise ConfigError(
                "eval.folder is a folder in the run's output and must be a single name that begins "
                "with 'eval', of letters, digits, '_', '.' and '-', without '/'; got "
                f"{self.folder!r}"
            )
        # The report must tell methods apart, and compare them.
        names = [method.name for method in self.methods]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"two methods are named {twice[0]!r}: give each a name of its own")
        if not all(names):
            raise ConfigError("a method's name is empty: give each method a name")
        for method in self.methods:
            if (method.name == PLAIN) != (method.decoder == "plain"):
                must = "have decoder: plain" if method.name == PLAIN else f"be named {PLAIN!r}"
                raise ConfigError(
                    f"method {method.name!r} has decoder: {method.decoder}. The target alone is the"
                    f" method {PLAIN!r}, with decoder: plain; this one must {must}, or be another"
                    " method"
                )
        served = SERVED in names and all(method.decoder == "server" for method in self.methods)
        if PLAIN not in names and not served:
            raise ConfigError(
                f"no method is {PLAIN!r}, the target alone, which every other is compared with: add"
                f" {{name: {PLAIN}, decoder: plain}}; got {', '.join(names) or 'no method'}"
            )
        return self


def check_methods(config: EvalConfig, sampling: SamplingConfig, *, head: bool) -> None:
    """Find impossible methods before any model is loaded; `head`: whether there will be one."""
    check_scores(config.scores)
    for method in config.methods:
        where, stop = f"method {method.name!r}", method.stop
        try:
            method.decoding(sampling)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if stop.needs_head and not head:
            raise ConfigError(f"{where} stops by a head, but none was trained")
        if config.batch > 1 and method.decoder in FOREIGN_DECODERS:
            raise ConfigError(
                f"{where}: decoder {method.decoder} decodes one prompt at a time: leave it out, or "
                "set eval.batch to 1"
            )
        if config.batch > 1 and stop.measured:
            raise ConfigError(
                f"{where}: stop {stop.name} measures times, and nothing is timed with eval.batch "
                f"above 1: give {' and '.join(stop.measured)}, or set eval.batch to 1"
            )


def baseline(method: Method) -> str:
    """The name of the method that a speed-up is over."""
    return SERVED if method.decoder == "server" else PLAIN


def needs_fit(config: EvalConfig) -> bool:
    """True if a method has parameters that are fitted on labels."""
    return any(method.stop.needs_fit for method in config.methods)


def with_fit(config: EvalConfig, values: Mapping[str, Any]) -> EvalConfig:
    """The same evaluation with these values of parameters wherever a method gives none."""
    methods = [
        method.model_copy(update={"stop": method.stop.with_fit(values)})
        for method in config.methods
    ]
    return config.model_copy(update={"methods": methods})
