"""One rule, two readers.

A verifier is written once, as the random procedure of its paper: it looks at a draft and at the
target's distributions, throws rng, and says at which node the accepted path ends and what distribution the next
token has there. The two readers differ in the rng only:

* `Verifier.draw` throws real rng, so it visits just the nodes that it walks (the decoder);
* `Verifier.__call__` follows every outcome of every throw and adds up the weights, which gives the
  exact distribution of the procedure (tests, replay, reports).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.carried_residual import (
    CarriedResidual,
    CarriedResiduals,
    carried_after,
    needs_tail,
    target_with_carried,
)
from specdata.probability import draw_one

T = TypeVar("T")


class Rng(Protocol):
    """A source of choices whose probabilities the rule states."""

    def bernoulli(self, probability: float) -> bool:
        """True with the given probability (clamped to [0, 1])."""

    def categorical(self, weights: Sequence[float]) -> int:
        """An index, drawn in proportion to non-negative weights."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the accepted path ends, and what comes next.

    Args:
        node: the last accepted node; 0 if no drafted token was accepted.
        distribution: (V,) distribution of the token that is emitted after it.
        opens: the carried residual that this rejection leaves behind for the tokens after `node`, the one
            drawn from `distribution` being the first; None for all rules but greedy block verification.
    """

    node: int
    distribution: Tensor
    opens: CarriedResidual | None = None


Rule = Callable[[DraftTree, Tensor, Rng], Outcome]
"""(draft, target (N+1, V), rng) -> Outcome."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafted tokens that compete for one place, in draw order.

    Args:
        tokens: n token ids; they may repeat unless drawn without replacement.
        distributions: n distributions (V,), the one each token was drawn from.
        how: "iid", "distinct" or "greedy", as in `DraftTree`.
    """

    tokens: list[int]
    distributions: list[Tensor]
    how: str

    @classmethod
    def of(cls, tree: DraftTree, children: Sequence[int]) -> Candidates:
        """Those that some nodes of a draft make."""
        tokens = [tree.token_list[child - 1] for child in children]
        return cls(tokens, [tree.distribution_of(child) for child in children], tree.how)


NodeRule = Callable[[Tensor, Candidates, Rng], "int | Tensor"]
"""(p (V,), siblings, rng) -> index of the accepted sibling, or the distribution (V,) if none is."""


def walk(node_rule: NodeRule) -> Rule:
    """Apply a rule for one place from the root down: the walk shared by most verifiers.

    A rule for one place keeps p: sum_i P(accept i) [token i = y] + P(reject all) distribution(y) = p(y).
    Walking keeps the joint distribution, because the siblings below a node are drawn independently of how
    the node was chosen.
    """

    def rule(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
        group = [0]
        while children := tree.children(group):
            outcome = node_rule(target[group[0]], Candidates.of(tree, children), rng)
            if isinstance(outcome, Tensor):
                return Outcome(group[0], outcome)
            group = tree.follow(children, outcome)
        return Outcome(group[0], target[group[0]])

    return rule


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exact distribution of a verification.

    Args:
        stop: (N+1,) probability that the accepted path ends at each node; sums to 1.
        bonus: (N+1, V) distribution of the next token given that it ended there; zero rows where stop = 0.
    """

    stop: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn verification.

    Args:
        nodes: accepted nodes from the root down, without node 0.
        token: the token emitted after them.
        verifier: what verifies the next round: the same verifier, or one that holds carried.
    """

    nodes: list[int]
    token: int
    verifier: Verifier


@dataclass(frozen=True, slots=True)
class Verifier:
    """A named rule with the drafts that it has a proof for.

    Args:
        name: its key in `VERIFIERS`.
        rule: the procedure.
        takes: the `DraftTree.kind`s that it may be given.
        carries_residual: whether a rejection opens a carried residual. The length of every draft must then be planned
            before its first token is drawn: a stopping rule that looks at drafted tokens is biased.
        carried: what earlier rounds left behind; the rule sees the target through them.
        branching: whether it takes drafts with more than one candidate for a place.
        lossless: whether the output distribution is exactly the target's.
        paper: where it comes from.
    """

    name: str
    rule: Rule = field(repr=False)
    takes: tuple[str, ...]
    carries_residual: bool = False
    carried: CarriedResiduals = ()
    branching: bool = False
    lossless: bool = True
    paper: str = ""

    def needs_tail(self, length: int) -> bool:
        """Whether a chain of `length` tokens must carry the draft's distribution after its last one."""
        return needs_tail(self.carried, length)

    def check(self, tree: DraftTree, target: Tensor) -> None:
        """Raise ValueError unless there is a proof for this form of draft and p fits it."""
        if tree.kind not in self.takes:
            raise ValueError(
                f"verifier {self.name!r} is proved for {'; '.join(self.takes)}; got {tree.kind}"
            )
        if not target.is_floating_point() or target.dtype.itemsize < 4:
            raise ValueError(f"target must be float32 or wider, got {target.dtype}")
        # An empty draft has no distribution, so it does not know V.
        expected = (len(tree) + 1, tree.vocabulary if len(tree) else target.shape[-1])
        if tuple(target.shape) != expected:
            raise ValueError(f"target must be (N+1, V) = {expected}, got {tuple(target.shape)}")

    def __call__(self, tree: DraftTree, target: Tensor) -> Verdict:
        """Enumerate the rule.

        Args:
            tree: N drafted nodes.
            target: (N+1, V), float32 or wider: row 0 after the last committed token, row i+1 after
                node i's token.

        Raises:
            ValueError: for a draft without a proof, or a target of another shape or that is no distribution.
        """
        self.check(tree, target)
        off = float((target.sum(dim=-1) - 1).abs().max())
        if bool((target < 0).any()) or not off <= 1e-3:
            raise ValueError(
                f"target must hold distributions: no negative entry, rows that sum to 1; one is off by {off}"
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
        """Every way in which the round can end, with its probability. Arguments as above."""
        self.check(tree, target)
        seen = target_with_carried(self.carried, tree, target) if self.carried else target
        return outcomes(lambda rng: self.rule(tree, seen, rng))

    def after(self, tree: DraftTree, target: Tensor, end: Outcome, token: int) -> Verifier:
        """The verifier of the next round, given how this one ended and the token drawn there."""
        if not self.carried and end.opens is None:
            return self
        carried = carried_after(self.carried, end.opens, tree, target, end.node, token)
        return replace(self, carried=carried)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        """Draw one outcome, visiting only the nodes walked. Arguments as in `__call__`."""
        self.check(tree, target)
        seen = target_with_carried(self.carried, tree, target) if self.carried else target
        end = self.rule(tree, seen, GeneratorRng(generator))
        token = draw_one(end.distribution, generator)
        return Drawn(tree.path_to(end.node), token, self.after(tree, target, end, token))


class GeneratorRng:
    """Rng thrown with a generator; uniforms are drawn in blocks, which is cheaper."""

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
    """Rng that follow a script of outcomes and then take the first possible one."""

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
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

    The procedure is run once an outcome; it must depend on nothing but its rng.
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
