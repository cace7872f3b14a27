"""A verifier: one random procedure, evaluated in two ways.

A verifier is written once, as the random procedure of its paper: it reads a draft and the target's
distributions, draws random numbers from an `Rng`, and returns the node at which the accepted path
ends and the distribution of the next token there. The two ways of evaluating it differ only in
the `Rng` that it is given:

* `Verifier.draw` samples from a generator, and so visits just the nodes on its way (the decoder);
* `Verifier.__call__` enumerates every outcome of every draw with its probability, which gives the
  exact distribution of the procedure (tests, measured bias, reports).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.persistent_residual import (
    PersistentResidual,
    PersistentResiduals,
    modified_rows,
    needs_tail,
    residuals_after_round,
)
from specdata.errors import NotFiniteError
from specdata.probability import draw_one

T = TypeVar("T")


class Rng(Protocol):
    """The only source of randomness of a rule."""

    def bernoulli(self, probability: float) -> bool:
        """True with the given probability, which is clamped to [0, 1]."""

    def categorical(self, weights: Sequence[float]) -> int:
        """An index, drawn in proportion to non-negative weights that need not sum to 1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of the accepted path, and what comes next.

    A residual persists over the tokens after the node, the one drawn from `distribution` being the
    first; only greedy block verification has one.
    """

    node: int  # the last accepted one; 0 if no drafted token was accepted
    distribution: Tensor  # (V,) of the token that is emitted after it
    residual: PersistentResidual | None = None


Rule = Callable[[DraftTree, Tensor, Rng], Outcome]
"""(draft of N nodes, target (N+1, V), rng) -> Outcome."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafted tokens for one position, in draw order."""

    tokens: list[int]  # n ids; they may repeat unless drawn without replacement
    distributions: list[Tensor]  # n (V,), the one that each token was drawn from
    p: list[float]  # n probabilities that the target's distribution gives them
    q: list[float]  # n probabilities that the distributions they were drawn from give them

    @classmethod
    def of(
        cls, tree: DraftTree, children: Sequence[int], chances: tuple[list[float], list[float]]
    ) -> Candidates:
        """The candidates that these nodes hold, given `DraftTree.chances` of the draft."""
        p, q = chances
        if any(math.isnan(p[child - 1]) for child in children):
            raise NotFiniteError
        return cls(
            [tree.token_list[child - 1] for child in children],
            [tree.distribution_of(child) for child in children],
            [p[child - 1] for child in children],
            [q[child - 1] for child in children],
        )


NodeRule = Callable[[Tensor, Candidates, Rng], "int | Tensor"]
"""(p (V,), candidates, rng) -> index of the accepted one, or the next token's distribution (V,)."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The rule that applies a rule for one position from the root down, as most verifiers do.

    A lossless rule for one position satisfies, for every token y and in expectation over the
    candidates, sum_i P(accept i) [token i = y] + P(reject all) distribution(y) = p(y). Applying it
    along a path then keeps the joint distribution, because the siblings below a node are drawn
    independently of how the node was chosen.
    """

    node_rule: NodeRule

    def __call__(self, tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
        """Visit one path."""
        group, chances = [0], tree.chances(target, tree.verified_after)
        while children := tree.children(group):
            candidates = Candidates.of(tree, children, chances)
            outcome = self.node_rule(target[group[0]], candidates, rng)
            if isinstance(outcome, Tensor):
                return Outcome(group[0], outcome)
            group = tree.follow(children, outcome)
        return Outcome(group[0], target[group[0]])

    def outcomes(self, tree: DraftTree, target: Tensor) -> Iterator[tuple[float, Outcome]]:
        """What `outcomes` of a call gives, each position being asked once and not once a leaf."""
        chances = tree.chances(target, tree.verified_after)
        level: dict[tuple[int, ...], float] = {(0,): 1.0}  # groups that are reached, and how likely
        while level:
            deeper: dict[tuple[int, ...], float] = {}
            for group, reached in level.items():
                p, children = target[group[0]], tree.children(group)
                if not children:
                    yield reached, Outcome(group[0], p)
                    continue
                candidates = Candidates.of(tree, children, chances)
                for weight, outcome in outcomes(partial(self.node_rule, p, candidates)):
                    if isinstance(outcome, Tensor):
                        yield reached * weight, Outcome(group[0], outcome)
                        continue
                    following = tuple(tree.follow(children, outcome))
                    deeper[following] = deeper.get(following, 0.0) + reached * weight
            level = deeper


def remembered(fit: Callable[[Tensor, Candidates], T]) -> Callable[[Tensor, Candidates], T]:
    """The function, which remembers its last result: enumeration asks for it at each outcome."""
    last: tuple[Tensor, Candidates, T] | None = None

    def again(p: Tensor, candidates: Candidates) -> T:
        nonlocal last
        if last is None or last[0] is not p or last[1] is not candidates:
            last = p, candidates, fit(p, candidates)
        return last[2]

    return again


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exact distribution of a verification's outcome.

    Rows of `bonus` are zero where `stop` is 0.
    """

    stop: Tensor  # (N+1,) probability that the accepted path ends at each node; sums to 1
    bonus: Tensor  # (N+1, V) distribution of the next token given that it ended there


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled verification."""

    nodes: list[int]  # accepted nodes from the root down, without node 0
    token: int  # emitted after them
    verifier: Verifier  # of the next round: the same, or a copy with persistent residuals


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named rule with the drafts that it has a proof for.

    Where the residual of a rejection persists over the next rounds, the length of every draft must
    be planned before its first token is drawn: with a stopping rule that looks at drafted tokens
    the output is biased.
    """

    name: str  # its key in `VERIFIERS`
    rule: Rule = field(repr=False)
    takes: tuple[str, ...]  # the `DraftTree.kind`s that it may be given
    residual_persists: bool = False
    residuals: PersistentResiduals = ()  # of earlier rounds; the rule is given the modified target
    branching: bool = False  # it takes drafts with more than one candidate for a position
    lossless: bool = True  # the output distribution is exactly the target's
    paper: str = ""

    def needs_tail(self, length: int) -> bool:
        """True if a chain of `length` tokens must hold q after its last one (`DraftTree.tail`)."""
        return needs_tail(self.residuals, length)

    def check(self, tree: DraftTree, target: Tensor) -> None:
        """Check the arguments of `__call__`.

        Raises:
            ValueError: if there is no proof for this form of draft, or if `target` has another
                shape than (N+1, V) or less than single precision.
        """
        if tree.kind not in self.takes:
            raise ValueError(
                f"verifier {self.name!r} is proved for {'; '.join(self.takes)}; got {tree.kind}"
            )
        if not target.is_floating_point() or target.dtype.itemsize < 4:
            raise ValueError(f"target must be float32 or wider, got {target.dtype}")
        # An empty draft has no distribution, so V cannot be read from it.
        expected = (len(tree) + 1, tree.vocabulary if len(tree) else target.shape[-1])
        if tuple(target.shape) != expected:
            raise ValueError(f"target must be (N+1, V) = {expected}, got {tuple(target.shape)}")

    def __call__(self, tree: DraftTree, target: Tensor) -> Verdict:
        """The exact distribution of the outcome, by enumeration of the rule.

        Of N drafted nodes and the target's (N+1, V), float32 or wider: row 0 after the last
        committed token, row i+1 after node i's token.

        Raises:
            ValueError: as `check`, or if a row of `target` is no distribution.
        """
        self.check(tree, target)
        off = float((target.sum(dim=-1) - 1).abs().max())
        if bool((target < 0).any()) or not off <= 1e-3:
            raise ValueError(
                "target must hold distributions: no negative entry, rows that sum to 1; one is off"
                f" by {off}"
            )
        stop = torch.zeros(len(tree) + 1, dtype=torch.float64)
        bonus = torch.zeros(target.shape, dtype=torch.float64)
        for weight, end in self.outcomes(tree, target):
            stop[end.node] += weight
            bonus[end.node] += weight * end.distribution.double().cpu()
        # By its own sum rather than by `stop`, which may be too small to divide by.
        mass = bonus.sum(dim=-1, keepdim=True)
        bonus /= torch.where(mass > 0, mass, 1.0)
        return Verdict(stop.to(target), bonus.to(target))

    def outcomes(self, tree: DraftTree, target: Tensor) -> Iterator[tuple[float, Outcome]]:
        """Every way in which the round can end, with its probability.

        Arguments and errors as in `__call__`, which merges the outcomes that end at one node.
        """
        self.check(tree, target)
        rows = modified_rows(self.residuals, tree, target) if self.residuals else target
        if isinstance(self.rule, Walk):
            return self.rule.outcomes(tree, rows)
        return outcomes(lambda rng: self.rule(tree, rows, rng))

    def after(self, tree: DraftTree, target: Tensor, end: Outcome, token: int) -> Verifier:
        """Return the verifier of the next round, given how this one ended.

        The draft of this round and the target's distributions are as in `__call__`; the token was
        drawn from `end.distribution`.
        """
        if not self.residuals and end.residual is None:
            return self
        residuals = residuals_after_round(
            self.residuals, end.residual, tree, target, end.node, token
        )
        return replace(self, residuals=residuals)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        """Sample one outcome, reading only the rows of `target` that the rule needs for it.

        Arguments are as in `__call__`. Raises ValueError as `check`.
        """
        self.check(tree, target)
        rows = modified_rows(self.residuals, tree, target) if self.residuals else target
        end = self.rule(tree, rows, GeneratorRng(generator))
        token = draw_one(end.distribution, generator)
        return Drawn(tree.path_to(end.node), token, self.after(tree, target, end, token))


class GeneratorRng:
    """An `Rng` that samples from a generator; uniforms are drawn in blocks, which is cheaper."""

    BLOCK = 32

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._uniforms: Iterator[float] = iter(())

    def _uniform(self) -> float:
        for value in self._uniforms:
            return value
        block = torch.rand(
            self.BLOCK,
            generator=self._generator,
            dtype=torch.float64,
            device=self._generator.device,
        )
        self._uniforms = iter(block.tolist())
        return next(self._uniforms)

    def bernoulli(self, probability: float) -> bool:
        """True with the given probability."""
        return self._uniform() < probability

    def categorical(self, weights: Sequence[float]) -> int:
        """An index, drawn in proportion to non-negative weights."""
        point = self._uniform() * sum(weights)
        last = 0
        for index, weight in enumerate(weights):
            if weight > 0:
                last = index
                if point < weight:
                    return index
            point -= weight
        return last


class ScriptedRng:
    """An `Rng` that returns given outcomes in order, and then always the first possible one."""

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0  # probability of everything returned so far
        self.taken: list[int] = []  # outcome of every call
        self.possible: list[list[int]] = []  # of every call, outcomes of positive probability
        self._script = script

    def bernoulli(self, probability: float) -> bool:
        """Outcome 1 is True."""
        chance = min(1.0, max(0.0, probability))
        return self.categorical((1.0 - chance, chance)) == 1

    def categorical(self, weights: Sequence[float]) -> int:
        """Take the scripted outcome and multiply the weight by its probability."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        step = len(self.taken)
        index = self._script[step] if step < len(self._script) else possible[0]
        self.weight *= weights[index] / sum(weights)
        self.taken.append(index)
        self.possible.append(possible)
        return index


def outcomes(procedure: Callable[[Rng], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of a random procedure with its probability.

    Depth-first over the tree of random choices: the procedure is run once for every leaf, each
    time with a script of choices up to the branch that is next. It must depend on nothing but its
    rng.
    """
    script: list[int] | None = []
    while script is not None:
        rng = ScriptedRng(script)
        result = procedure(rng)
        yield rng.weight, result
        script = None
        for step in reversed(range(len(rng.taken))):
            later = [index for index in rng.possible[step] if index > rng.taken[step]]
            if later:
                script = [*rng.taken[:step], later[0]]
                break
