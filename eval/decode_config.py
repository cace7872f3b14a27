"""How to decode, as plain values; what cannot work is refused before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eval.drafting.calibration import Calibration
from eval.drafting.cost_rule import MEAN_ACCEPTANCE, CostRule
from eval.drafting.drafters import BranchingDrafter, ChainDrafter, Drafter, DraftPath
from eval.drafting.stopping import (
    StoppingRule,
    calibrated,
    confidence,
    cumulative,
    entropy_above,
    fixed,
    predicted_rejection,
)
from eval.drafts import How
from eval.runtime.model import CachedModel
from eval.verifiers import VERIFIERS, Verifier
from heads import AcceptanceHead
from specdata.errors import ConfigError
from specdata.probability import SamplingConfig

StopName = Literal["fixed", "confidence", "entropy", "cumulative", "logit", "head", "cost"]
DrafterName = Literal["chain", "paths", "tree"]
SiblingOption = Literal["auto", "iid", "distinct", "greedy"]


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One way of decoding.

    Args:
        verifier: a name in `VERIFIERS`.
        verifier_args: the verifier's parameters.
        drafter: "chain", "paths" (independent rollouts) or "tree" (a k-configuration).
        length: tokens drafted a round: of a chain with stop="fixed", of each path.
        paths: number of paths.
        widths: children of every node of a tree at depth 0, 1, ..., for example (4, 2, 2).
        siblings: how a tree's siblings are drawn; "auto" takes what the verifier has a proof for,
            "iid" if that is among them.
        path_temperatures: for paths, the draft's temperature on each path; empty: as the target.
        path_drafts: for paths, which of several draft models drafts each path; empty: the first.
        tree_attention: whether the target scores paths and trees in one row with a tree mask; if
            not, as a batch of paths: the same tokens, usually slower (an ablation).
        stop: when to end the draft of a chain.
        threshold: of the stopping rule, in its own unit.
        limit: most tokens drafted a round with a stopping rule other than "fixed".
        calibration: (intercept, slope) of the acceptance probability on logit(max q), for
            stop="logit" and "cost" (`eval.drafting.calibration` fits them); by default max q is trusted.
        draft_seconds: cost of one more drafted token, for stop="cost"; 0 measures it.
        token_seconds: time of an emitted token, for stop="cost"; 0 measures it. With both given,
            decoding depends on its seed alone; otherwise on times and on earlier generations too.
        mean_acceptance: of a token that is not drawn yet, for stop="cost"; where a cost is
            measured, only the first guess.
        temperature: see `SamplingConfig`.
        top_k: see `SamplingConfig`.
        top_p: see `SamplingConfig`.

    Raises:
        ConfigError: for unknown names and for combinations that cannot work.
    """

    verifier: str = "token"
    verifier_args: Mapping[str, Any] = field(default_factory=dict)
    drafter: DrafterName = "chain"
    length: int = 4
    paths: int = 1
    widths: tuple[int, ...] = ()
    siblings: SiblingOption = "auto"
    path_temperatures: tuple[float, ...] = ()
    path_drafts: tuple[int, ...] = ()
    tree_attention: bool = True
    stop: StopName = "fixed"
    threshold: float = 0.7
    limit: int = 20
    calibration: tuple[float, float] = (0.0, 1.0)
    draft_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_acceptance: float = MEAN_ACCEPTANCE
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        self._check_distributions()
        _one_of("verifier", self.verifier, VERIFIERS)
        _one_of("drafter", self.drafter, ("chain", "paths", "tree"))
        _one_of("stop", self.stop, RULES)
        _one_of("siblings", self.siblings, ("auto", "iid", "distinct", "greedy"))
        if min(self.length, self.limit, self.paths, *self.widths) < 1:
            raise ConfigError(
                "length, limit, paths and widths must be 1 or larger, got "
                f"{self.length}, {self.limit}, {self.paths} and {self.widths}"
            )
        if not math.isfinite(self.threshold):
            raise ConfigError(f"threshold must be a number, got {self.threshold}")
        self._check_costs()
        if (self.drafter == "tree") != bool(self.widths):
            raise ConfigError(
                f"a tree needs widths, and only a tree: got {self.drafter} with {self.widths}"
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
        self._check_combination()

    def _check_distributions(self) -> None:
        try:
            for temperature in (self.temperature, *self.path_temperatures):
                SamplingConfig(temperature, self.top_k, self.top_p)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _check_costs(self) -> None:
        if len(self.calibration) != 2 or not all(map(math.isfinite, self.calibration)):
            raise ConfigError(
                f"calibration must be two numbers, intercept and slope, got {self.calibration}"
            )
        if not all(0.0 <= cost < math.inf for cost in (self.draft_seconds, self.token_seconds)):
            raise ConfigError(
                "draft_seconds and token_seconds must be 0 (measured) or larger, got "
                f"{self.draft_seconds} and {self.token_seconds}"
            )
        if not 0.0 < self.mean_acceptance <= 1.0:
            raise ConfigError(f"mean_acceptance must lie in (0, 1], got {self.mean_acceptance}")

    def _check_combination(self) -> None:
        verifier = self.make_verifier()
        if self.kind not in verifier.takes:
            raise ConfigError(
                f"verifier {self.verifier!r} has a proof for {'; '.join(verifier.takes)}, and this "
                f"drafter gives {self.kind}"
            )
        if self.stop != "fixed" and self.drafter != "chain":
            raise ConfigError(f"stop={self.stop!r} ends chains; {self.drafter} need stop='fixed'")
        if self.stop != "fixed" and verifier.carries_residual:
            raise ConfigError(
                f"verifier {self.verifier!r} owes a residual for the planned length of its draft, "
                f"so the length must not depend on drafted tokens: stop={self.stop!r} is biased"
            )

    @property
    def sampling(self) -> SamplingConfig:
        """The distribution of both models."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)

    @property
    def how(self) -> How:
        """How siblings of a tree are drawn."""
        if self.siblings != "auto":
            return self.siblings
        takes = self.make_verifier().takes
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

    def reads_states(self, head: AcceptanceHead | None) -> bool:
        """Whether the stopping rule asks the head, which reads the draft's hidden state."""
        return self.stop == "head" or (self.stop == "cost" and head is not None)

    def make_verifier(self) -> Verifier:
        """Build the verifier with its parameters. Raises ConfigError for parameters it has not."""
        try:
            return VERIFIERS[self.verifier].make(**self.verifier_args)
        except ValueError as error:
            raise ConfigError(f"verifier {self.verifier!r}: {error}") from error

    def make_drafters(
        self, models: Sequence[CachedModel], head: AcceptanceHead | None, ends: frozenset[int]
    ) -> Callable[[int], Drafter]:
        """What builds the drafter, with its stopping rule, of the text in a row of a batch.

        Raises:
            ConfigError: if the rule needs a head, or paths more drafts, than there are.
        """
        wanted = 1 + max(self.path_drafts, default=0)
        if len(models) != wanted:
            raise ConfigError(
                f"path_drafts {self.path_drafts} needs {wanted} draft models, got {len(models)}"
            )
        if self.drafter == "chain":
            RULES[self.stop](self, head)  # a missing head is found now
            return lambda row: ChainDrafter(
                models[0].sequence(row, self.sampling), RULES[self.stop](self, head), ends
            )
        if self.drafter == "tree":
            return lambda row: BranchingDrafter(
                [DraftPath(models[0].sequence(row, self.sampling))], self.widths, self.how, ends
            )
        return lambda row: BranchingDrafter(
            self._make_paths(models, row),
            (self.paths, *[1] * (self.length - 1)),
            "iid",
            ends,
            shape="paths",
        )

    def _make_paths(self, models: Sequence[CachedModel], row: int) -> list[DraftPath]:
        sequences = [model.sequence(row, self.sampling) for model in models]
        which = self.path_drafts or (0,) * self.paths
        warps: list[SamplingConfig | None] = [None] * self.paths
        if self.path_temperatures:
            warps = [
                SamplingConfig(temperature, self.top_k, self.top_p)
                for temperature in self.path_temperatures
            ]
        return [DraftPath(sequences[index], warp) for index, warp in zip(which, warps, strict=True)]


def _one_of(what: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        raise ConfigError(f"unknown {what} {name!r}; choose from {', '.join(choices)}")


def _head_rule(config: DecodeConfig, head: AcceptanceHead | None) -> StoppingRule:
    if head is None:
        raise ConfigError("stop='head' needs an acceptance head: pass head=...")
    return predicted_rejection(head, config.threshold, limit=config.limit)


def _cost_rule(config: DecodeConfig, head: AcceptanceHead | None) -> StoppingRule:
    rule = CostRule(
        Calibration(*config.calibration),
        head,
        draft_seconds=config.draft_seconds,
        token_seconds=config.token_seconds,
        mean_acceptance=config.mean_acceptance,
    )
    return StoppingRule(config.limit, rule.begin, rule.observe)


RULES: Mapping[str, Callable[[DecodeConfig, AcceptanceHead | None], StoppingRule]] = {
    "fixed": lambda config, head: fixed(config.length),
    "confidence": lambda config, head: confidence(config.threshold, limit=config.limit),
    "entropy": lambda config, head: entropy_above(config.threshold, limit=config.limit),
    "cumulative": lambda config, head: cumulative(config.threshold, limit=config.limit),
    "logit": lambda config, head: calibrated(
        Calibration(*config.calibration), config.threshold, limit=config.limit
    ),
    "head": _head_rule,
    "cost": _cost_rule,
}
