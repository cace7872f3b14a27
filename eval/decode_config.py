"""The configuration of decoding; what cannot work is refused before a model is loaded.

A `Method` is one value from the configuration to the report: an evaluation lists it, the
experiment decodes with it, results keep it and the report asks it. With the sampler that tokens are
drawn by it is a `DecodeConfig`, which a decoder is given. Written out (YAML, results, keyword
arguments), both are flat: the parameters of the stopping rule stand beside the rule's name, as in
`stop: confidence, threshold: 0.3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from eval.drafting.stopping import StoppingRule, read_rule
from eval.drafting.stopping.thresholds import Confidence, Fixed
from eval.verifiers import VERIFIERS
from specdata.config import Config, Count, Few, ServerConfig, mistakes, nearest
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:
    from eval.drafts import How
    from eval.verifiers.rule import Verifier

# Nodes of a draft: each takes a distribution over the vocabulary, of both models.
MOST_NODES = 4096
DrafterName = Literal["chain", "paths", "tree", "dynamic_tree", "lookup"]
SiblingOption = Literal["auto", "iid", "distinct", "greedy"]


DecoderName = Literal["plain", "speculative", "generate", "assisted", "server"]
FOREIGN_DECODERS = ("generate", "assisted", "server")
"""Decoders that are not ours: transformers', alone and with the draft, and an engine's."""

SERVED_BY = ("url", "served_model")
ONLY_READ_BY = {
    "widths": ("tree",),
    "siblings": ("tree",),
    **dict.fromkeys(("nodes", "depth", "gain"), ("dynamic_tree",)),
    **dict.fromkeys(("paths", "path_temperatures"), ("paths",)),
}
"""Settings that only some drafters read; elsewhere they are a mistake."""


class Method(Config):
    """One way of decoding: how it drafts, when a draft ends, and how it is verified.

    Any parameter of the stopping rule is given beside these, under its own name.
    """

    strict_parameters: ClassVar[bool] = True
    """True if parameters of other stopping rules than the chosen one are refused. If not, they are
    ignored, so that one call can name parameters of several."""

    name: str = Field(description="unique name shown in the report")
    decoder: DecoderName = Field(
        default="speculative",
        description="plain (target alone), speculative (ours), generate (transformers' own, target "
        "alone), assisted (transformers' own, which drafts `length` tokens, or stops by "
        "confidence if it is given a `threshold`, or has no draft if it is given `lookup`), or "
        "server (an engine at `url`, whatever it drafts with)",
    )
    url: str = Field(default="", description="address of the engine of decoder server")
    served_model: str = Field(
        default="", description="its name of the target (default: models.target)"
    )
    lookup: Few = Field(
        default=0,
        ge=0,
        description="tokens that are taken from the text where what was written last stands in it "
        "already: the drafter drafts only where it does not. Decoder assisted has no drafter then "
        "(transformers' prompt_lookup_num_tokens). 0: none",
    )
    match: Few = Field(
        default=3, ge=1, description="tokens that must stand in the text already for a lookup"
    )
    mtp: bool = Field(
        default=False,
        description="drafts with the head that the target brings along (MTP), as it is, instead of "
        "the draft",
    )
    verifier: str = Field(default="token", description="acceptance rule: a name in `VERIFIERS`")
    verifier_args: dict[str, Any] = Field(
        default={}, description="parameters of the acceptance rule"
    )
    drafter: DrafterName = Field(
        default="chain",
        description="chain, paths (independent rollouts of one length), tree (a k-configuration), "
        "dynamic_tree (the draft's most probable continuations) or lookup (no draft, `lookup` "
        "alone)",
    )
    paths: Few = Field(default=1, ge=1, description="number of paths")
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="children of every node of a tree at depth 0, 1, ..., such as [4, 2, 2]",
    )
    siblings: SiblingOption = Field(
        default="auto",
        description="how a tree's siblings are drawn: iid, distinct, greedy, or auto: what the "
        "verifier has a proof for, iid if that is among them; at temperature 0 the likeliest",
    )
    nodes: Count = Field(default=0, ge=0, description="most nodes of a dynamic tree")
    depth: Few = Field(default=0, ge=0, description="most levels of a dynamic tree")
    gain: float = Field(
        default=0.0,
        ge=0.0,
        description="a dynamic tree gets another level while the last one's nodes are worth this "
        "together: a node is worth the draft's probability of its path; 0: always",
    )
    path_temperatures: tuple[float, ...] = Field(
        default=(), description="the draft's temperature on each path; empty: as the target's"
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
        settings = {name: value for name, value in given.items() if name in cls.model_fields}
        rest = {str(name): value for name, value in given.items() if name not in settings}
        # Transformers' own loop is known by its threshold.
        by_threshold = given.get("decoder") == "assisted" and "threshold" in rest
        stop = settings.get("stop", Confidence.name if by_threshold else Fixed.name)
        rule = read_rule(stop, rest, known=list(cls.model_fields), strict=cls.strict_parameters)
        return {**settings, "stop": rule}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Every setting, those of the rule beside its name."""
        settings = handler(self)
        return {**settings, "stop": self.stop.name, **settings["stop"]}

    def replace(self, **changes: Any) -> Self:
        """The same settings with some changed, checked anew (ValueError if they cannot work).

        Another `stop` begins with its own defaults.
        """
        settings = self.model_dump()
        if "stop" in changes:
            settings = {n: v for n, v in settings.items() if n not in type(self.stop).model_fields}
        return type(self)(**{**settings, **changes})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.verifier not in VERIFIERS:
            raise ConfigError(
                f"unknown verifier {self.verifier!r}: {nearest(self.verifier, VERIFIERS)}"
            )
        if self.decoder == "server":
            ServerConfig(url=self.url)
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
                f"path_temperatures must name one temperature for each of {self.paths} paths, got "
                f"{self.path_temperatures}"
            )
        verifier = VERIFIERS[self.verifier]
        try:
            verifier.check_names(self.verifier_args)
        except ValueError as error:
            raise ConfigError(f"verifier {self.verifier!r}: {error}") from error
        if self.kind not in verifier.takes:
            raise ConfigError(
                f"verifier {self.verifier!r} has a proof for {'; '.join(verifier.takes)}, and this "
                f"drafter gives {self.kind}"
            )
        if self.stop.adaptive and self.drafter != "chain":
            raise ConfigError(
                f"stop={self.stop.name!r} ends chains; drafter {self.drafter!r} takes "
                f"stop={Fixed.name!r}"
            )
        if self.stop.adaptive and verifier.residual_persists:
            raise ConfigError(
                f"verifier {self.verifier!r} has a residual that persists for the planned length "
                "of its draft, so the length must not depend on drafted tokens: "
                f"stop={self.stop.name!r} is biased"
            )
        if self.mtp and self.stop.reads_head:
            raise ConfigError(
                "an acceptance head is trained for the run's draft, and mtp drafts with the head "
                "of the target: take another stop, or head: false"
            )
        if self.mtp and self.stop.needs_fit:
            fitted = " and ".join(self.stop.fitted)
            raise ConfigError(
                f"stop={self.stop.name!r} is fitted on labels, which are of the run's draft, and "
                f"mtp drafts with the head of the target: give {fitted}, [0, 1] for its own "
                "probabilities, or what a run with draft.init.kind: mtp keeps in calibration.json"
            )
        return self

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.decoder != "speculative":
            return self
        if self.drafter == "lookup" and (not self.lookup or self.mtp):
            raise ConfigError(
                "drafter lookup needs the number of its tokens, such as lookup: 8, and no mtp"
            )
        # Rounds of two kinds share no residual, and a bias is that of the draft's own tokens.
        fit = [
            name
            for name, each in VERIFIERS.items()
            if {"chain", self.kind} <= {*each.takes}
            and each.lossless
            and not each.residual_persists
        ]
        if self.lookup and self.verifier not in fit:
            raise ConfigError(
                f"lookups are chains, and verifier {self.verifier!r} cannot take turns between "
                f"them and {self.kind}: take {' or '.join(fit)}, or leave lookup out"
            )
        return self

    @model_validator(mode="after")
    def _check_read(self) -> Self:
        reader, unread = self._unread() if self.strict_parameters else ("", [])
        if unread:
            instead = ""
            if "stop" in unread and self.decoder == "assisted":
                instead = (
                    " (transformers' own loop drafts a fixed number of tokens, `length`, or stops "
                    f"by confidence, `{Confidence.name}`), or take decoder: speculative"
                )
            elif "match" in unread and self.decoder == "speculative":
                instead = ", or say with lookup how many tokens are looked up, which match needs"
            raise ConfigError(
                f"{reader} does not use {', '.join(unread)}: leave "
                f"{'it' if len(unread) == 1 else 'them'} out{instead}"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _name_mistakes(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Name the method in the message of a mistake, besides its place in the list.

        The last validator, around the others.
        """
        try:
            return handler(given)
        except ValidationError as error:
            if not isinstance(given, Mapping) or not given.get("name"):
                raise
            reasons = "; ".join(mistakes(error, cls))
            raise ConfigError(f"method {given['name']!r}: {reasons}") from error

    def decoding(self, sampling: SamplingConfig) -> DecodeConfig:
        """The configuration of a decoder that draws tokens so."""
        settings = {name: getattr(self, name) for name in Method.model_fields}
        return DecodeConfig(**settings, **asdict(sampling))

    @property
    def uses_draft(self) -> bool:
        """True if the draft model proposes tokens."""
        alone = self.lookup if self.decoder == "assisted" else self.drafter == "lookup"
        return self.speculates and not alone

    @property
    def speculates(self) -> bool:
        """False if the target decodes alone, or an engine does."""
        return self.decoder in ("speculative", "assisted")

    @property
    def lossless(self) -> bool:
        """True if the output distribution is proved to be the target's."""
        return self.decoder != "speculative" or VERIFIERS[self.verifier].lossless

    @property
    def is_chain(self) -> bool:
        """True if our decoder drafts chains."""
        return self.decoder == "speculative" and self.drafter == "chain"

    @property
    def branches(self) -> bool:
        """True if a draft may have several candidates for a position."""
        return self.decoder == "speculative" and self.drafter not in ("chain", "lookup")

    @property
    def fixed_length(self) -> int | None:
        """Positions that are drafted in every round; None if their number may change."""
        varies = self.stop.adaptive or self.drafter == "dynamic_tree" or self.lookup
        return self.deepest if self.uses_draft and not varies else None

    @property
    def deepest(self) -> int:
        """The deepest position that a draft can have."""
        of_trees = {"tree": len(self.widths), "dynamic_tree": self.depth}
        return of_trees.get(self.drafter, self.stop.longest)

    def check_block(self, size: int) -> None:
        """Refuse to draft longer paths than a draft's block; what a rule ends is cut there."""
        if self.uses_draft and not self.stop.adaptive and self.deepest > size:
            raise ConfigError(
                f"a draft in blocks of {size} tokens proposes no longer paths, and {self.deepest} "
                f"tokens are asked for: lower length, depth or the number of widths to {size}, or "
                "train it with a larger draft.init.block"
            )

    def _unread(self) -> tuple[str, list[str]]:
        """Name the decoder or drafter that does not read some of the settings, and these."""
        default = Method.model_construct(name=self.name).model_dump()
        given = [k for k, value in self.model_dump().items() if default.get(k, ...) != value]
        if self.decoder != "speculative":
            used = {"decoder", *(SERVED_BY if self.decoder == "server" else ())}
            if self.decoder == "assisted" and self.lookup:
                used.add("lookup")
            elif self.decoder == "assisted" and isinstance(self.stop, Fixed | Confidence):
                used |= {"stop", *type(self.stop).model_fields}
            unread = [name for name in given if name not in used]
            if "stop" in unread:  # one mistake: the parameters came with the rule
                unread = [name for name in unread if name not in type(self.stop).model_fields]
            return f"decoder {self.decoder}", unread
        drafter = self.drafter
        unread = [name for name in given if drafter not in ONLY_READ_BY.get(name, (drafter,))]
        unread += [name for name in SERVED_BY if name in given]
        if "match" in given and not self.lookup:
            unread.append("match")
        if drafter in ("tree", "dynamic_tree", "lookup"):  # these have depths of their own
            unread += [name for name in type(self.stop).model_fields if name in given]
        return f"drafter {drafter}", unread

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
        if self.drafter in ("chain", "lookup"):
            return "chain"
        if self.drafter == "paths":
            return f"paths, {'independent' if len(set(self.path_temperatures)) > 1 else 'iid'}"
        return f"tree, {self.how}"

    def make_verifier(self) -> Verifier:
        """Build the verifier with its parameters. Raises ConfigError for parameters it has not."""
        try:
            return VERIFIERS[self.verifier].make(**self.verifier_args)
        except ValueError as error:
            raise ConfigError(f"verifier {self.verifier!r}: {error}") from error


class DecodeConfig(Method):
    """A method and the sampler (`SamplingConfig`) that it decodes by, as a decoder is given them.

    Fields are keyword arguments, those of the stopping rule too:
    `DecodeConfig(verifier="block", stop="confidence", threshold=0.2)`, or the rule as a value:
    `DecodeConfig(verifier="block", stop=Confidence(threshold=0.2))`.
    """

    strict_parameters: ClassVar[bool] = False

    name: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __init__(self, verifier: str = "token", **settings: Any) -> None:
        try:
            super().__init__(verifier=verifier, **settings)
        except ValidationError as error:
            raise ConfigError("; ".join(mistakes(error, type(self)))) from error

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        for temperature in (self.temperature, *self.path_temperatures):
            replace(self.sampling, temperature=temperature)
        if self.verifier_args:
            self.make_verifier()  # only the rule itself, which needs torch, knows their ranges
        return self

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution of both models."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def chooses(self) -> bool:
        """Whether a tree holds its draft's likeliest tokens: at temperature 0 it would draw one.

        The k-configurations of Yang et al. 2024 (arXiv:2401.06706) at temperature 0.
        """
        return self.drafter == "tree" and self.temperature == 0.0

    def make_verifier(self) -> Verifier:
        """Build the verifier; of tokens that were chosen, any follows the target's own (`naive`).

        Raises ConfigError for parameters it has not.
        """
        verifier = super().make_verifier()
        return VERIFIERS["naive"].make() if self.chooses else verifier
