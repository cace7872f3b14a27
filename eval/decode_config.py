"""The configuration of decoding; what cannot work is refused before a model is loaded.

The settings of drafting and verification are declared once, in `DraftingConfig`. What a decoder is
given (`DecodeConfig`) and what an evaluation lists (`eval.measuring.methods.MethodConfig`) extend
it. Written out (YAML, results, keyword arguments), they are flat: the parameters of the stopping
rule stand beside the rule's name, as in `stop: confidence, threshold: 0.3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from eval.drafting.stopping import StoppingRule, read_rule
from eval.drafting.stopping.thresholds import Fixed
from eval.verifiers import VERIFIERS
from specdata.config import Config, mistakes, nearest
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:
    from eval.drafts import How
    from eval.verifiers.rule import Verifier

# Nodes of a draft: each takes a distribution over the vocabulary, of both models.
MOST_NODES = 4096
DrafterName = Literal["chain", "paths", "tree", "dynamic_tree"]
SiblingOption = Literal["auto", "iid", "distinct", "greedy"]


class DraftingConfig(Config):
    """Drafting and verification, as a decoder and an evaluated method share them.

    Any parameter of the stopping rule is given beside these, under its own name.
    """

    strict_parameters: ClassVar[bool] = True
    """True if parameters of other stopping rules than the chosen one are refused. If not, they are
    ignored, so that one call can name parameters of several."""

    verifier: str = Field(default="token", description="acceptance rule: a name in `VERIFIERS`")
    verifier_args: dict[str, Any] = Field(
        default={}, description="parameters of the acceptance rule"
    )
    drafter: DrafterName = Field(
        default="chain",
        description="chain, paths (independent rollouts of one length), tree (a k-configuration) "
        "or dynamic_tree (the draft's most probable continuations)",
    )
    paths: int = Field(default=1, ge=1, description="number of paths")
    widths: tuple[int, ...] = Field(
        default=(),
        description="children of every node of a tree at depth 0, 1, ..., such as [4, 2, 2]",
    )
    siblings: SiblingOption = Field(
        default="auto",
        description="how a tree's siblings are drawn: iid, distinct, greedy, or auto: what the "
        "verifier has a proof for, iid if that is among them",
    )
    nodes: int = Field(default=0, ge=0, description="most nodes of a dynamic tree")
    depth: int = Field(default=0, ge=0, description="most levels of a dynamic tree")
    gain: float = Field(
        default=0.0,
        ge=0.0,
        description="a dynamic tree gets another level while the last one's nodes are worth this "
        "together: a node is worth the draft's probability of its path; 0: always",
    )
    path_temperatures: tuple[float, ...] = Field(
        default=(), description="the draft's temperature on each path; empty: as the target's"
    )
    path_drafts: tuple[int, ...] | tuple[str, ...] = Field(
        default=(), description="which of several drafts drafts each path; empty: the first"
    )
    tree_attention: bool = Field(
        default=True,
        description="score paths and trees in one row with a tree mask; false: as a batch of "
        "paths, the same tokens, usually slower (an ablation)",
    )
    stop: SerializeAsAny[StoppingRule] = Field(
        default=Fixed(),
        description="stopping rule of a chain; its parameters stand beside it",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_rule(cls, given: Any) -> Any:
        """Hand the rule its parameters."""
        if not isinstance(given, Mapping):
            return given
        own = {name: value for name, value in given.items() if name in cls.model_fields}
        rest = {str(name): value for name, value in given.items() if name not in own}
        stop = own.get("stop", Fixed.name)
        rule = read_rule(stop, rest, others=list(cls.model_fields), strict=cls.strict_parameters)
        return {**own, "stop": rule}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Every setting, those of the rule beside its name."""
        settings = handler(self)
        return {**settings, "stop": self.stop.name, **settings["stop"]}

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, checked anew.

        Another `stop` begins with its own defaults.

        Raises:
            ValueError: if they cannot work.
        """
        settings = self.model_dump()
        if "stop" in changes:
            settings = {n: v for n, v in settings.items() if n not in type(self.stop).model_fields}
        return type(self)(**{**settings, **changes})


class DecodeConfig(DraftingConfig):
    """One way of decoding.

    Fields are keyword arguments, those of the stopping rule too:
    `DecodeConfig(verifier="block", stop="confidence", threshold=0.2)`, or the rule as a value:
    `DecodeConfig(verifier="block", stop=Confidence(threshold=0.2))`.

    Args:
        path_drafts: for paths, the index of the draft model that drafts each of them.
        temperature: see `SamplingConfig`.
        top_k: see `SamplingConfig`.
        top_p: see `SamplingConfig`.

    Raises:
        ConfigError: for unknown names, for values out of range and for combinations that cannot
            work.
    """

    strict_parameters: ClassVar[bool] = False

    path_drafts: tuple[int, ...] = Field(
        default=(),
        description="for paths, the index of the draft that drafts each; empty: the first",
    )
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __init__(self, verifier: str = "token", **settings: Any) -> None:
        try:
            super().__init__(verifier=verifier, **settings)
        except ValidationError as error:
            raise ConfigError("; ".join(mistakes(error, type(self)))) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        for temperature in (self.temperature, *self.path_temperatures):
            SamplingConfig(temperature, self.top_k, self.top_p)
        if self.verifier not in VERIFIERS:
            raise ConfigError(
                f"unknown verifier {self.verifier!r}: {nearest(self.verifier, VERIFIERS)}"
            )
        if min((1, *self.widths)) < 1:
            raise ConfigError(f"widths must be 1 or larger, got {self.widths}")
        if (self.drafter == "tree") != bool(self.widths):
            raise ConfigError(
                f"a tree needs widths, and only a tree: got {self.drafter} with {self.widths}"
            )
        if (self.drafter == "dynamic_tree") != bool(self.nodes and self.depth) or (
            self.drafter != "dynamic_tree" and (self.nodes or self.depth or self.gain)
        ):
            raise ConfigError(
                "a dynamic tree needs nodes and depth of 1 or more, and only it has them, and "
                f"gain: got {self.drafter} with nodes {self.nodes}, depth {self.depth} and gain "
                f"{self.gain:g}"
            )
        nodes = sum(math.prod(self.widths[: depth + 1]) for depth in range(len(self.widths)))
        paths = self.paths * self.stop.longest if self.drafter == "paths" else 0
        nodes = max(nodes, paths, self.nodes)
        if nodes > MOST_NODES:
            raise ConfigError(
                f"a draft may have at most {MOST_NODES} nodes, which the target scores in one "
                f"forward, got {nodes}: lower widths, nodes, or paths and length"
            )
        if self.path_temperatures and len(self.path_temperatures) != self.paths:
            raise ConfigError(
                f"path_temperatures must name one for each of {self.paths} paths, got "
                f"{self.path_temperatures}"
            )
        if self.path_drafts and (len(self.path_drafts) != self.paths or min(self.path_drafts) < 0):
            raise ConfigError(
                f"path_drafts must name one draft (0, 1, ...) for each of {self.paths} paths, got "
                f"{self.path_drafts}"
            )
        verifier = VERIFIERS[self.verifier]
        if self.verifier_args or verifier.required:
            self.make_verifier()  # only the rule itself, which needs torch, knows their ranges
        if self.kind not in verifier.takes:
            raise ConfigError(
                f"verifier {self.verifier!r} has a proof for {'; '.join(verifier.takes)}, and this "
                f"drafter gives {self.kind}"
            )
        if self.stop.adaptive and self.drafter != "chain":
            raise ConfigError(
                f"stop={self.stop.name!r} ends chains; {self.drafter} need stop={Fixed.name!r}"
            )
        if self.stop.adaptive and verifier.residual_persists:
            raise ConfigError(
                f"verifier {self.verifier!r} has a residual that persists for the planned length "
                "of its draft, so the length must not depend on drafted tokens: "
                f"stop={self.stop.name!r} is biased"
            )
        return self

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution of both models."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)

    @property
    def how(self) -> How:
        """The way in which siblings of a tree are drawn."""
        if self.drafter == "dynamic_tree":
            return "chosen"
        if self.siblings != "auto":
            return self.siblings
        takes = VERIFIERS[self.verifier].takes
        kinds: tuple[How, ...] = ("iid", "distinct", "greedy")
        return next((how for how in kinds if f"tree, {how}" in takes), "iid")

    @property
    def kind(self) -> str:
        """The `DraftTree.kind` of its drafts."""
        if self.drafter == "chain":
            return "chain"
        if self.drafter == "paths":
            distributions = max(len(set(self.path_temperatures)), len(set(self.path_drafts)))
            return f"paths, {'independent' if distributions > 1 else 'iid'}"
        return f"tree, {self.how}"

    def make_verifier(self) -> Verifier:
        """Build the verifier with its parameters. Raises ConfigError for parameters it has not."""
        try:
            return VERIFIERS[self.verifier].make(**self.verifier_args)
        except ValueError as error:
            raise ConfigError(f"verifier {self.verifier!r}: {error}") from error
