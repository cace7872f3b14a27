"""One rule, two readers.

A verifier is written once, as the random procedure of its paper: it looks at a draft and at the
target's laws, throws dice, and says at which node the accepted path ends and what law the next
token has there. The two readers differ in the dice only:

* `Verifier.draw` throws real dice, so it visits just the nodes that it walks (the decoder);
* `Verifier.__call__` follows every outcome of every throw and adds up the weights, which gives the
  exact law of the procedure (tests, replay, reports).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.frames import Frame, Frames, framed_target, frames_after, needs_tail
from specdata.probability import draw_one

T = TypeVar("T")


class Dice(Protocol):
    """A source of choices whose probabilities the rule states."""

    def flip(self, probability: float) -> bool:
        """True with the given probability (clamped to [0, 1])."""

    def pick(self, weights: Sequence[float]) -> int:
        """An index, drawn in proportion to non-negative weights."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the accepted path ends, and what comes next.

    Args:
        node: the last accepted node; 0 if no drafted token was accepted.
        law: (V,) law of the token that is emitted after it.
        opens: the frame that this rejection leaves behind for the tokens after `node`, the one
            drawn from `law` being the first; None for all rules but greedy block verification.
    """

    node: int
    law: Tensor
    opens: Frame | None = None


Rule = Callable[[DraftTree, Tensor, Dice], Stop]
"""(draft, target (N+1, V), dice) -> Stop."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The drafted tokens that compete for one place, in draw order.

    Args:
        tokens: n token ids; they may repeat unless drawn without replacement.
        laws: n laws (V,), the one each token was drawn from.
        how: "iid", "distinct" or "greedy", as in `DraftTree`.
    """

    tokens: list[int]
    laws: list[Tensor]
    how: str

    @classmethod
    def of(cls, tree: DraftTree, children: Sequence[int]) -> Siblings:
        """Those that some nodes of a draft make."""
        tokens = [tree.token_list[child - 1] for child in children]
        return cls(tokens, [tree.law_of(child) for child in children], tree.how)


NodeRule = Callable[[Tensor, Siblings, Dice], "int | Tensor"]
"""(p (V,), siblings, dice) -> index of the accepted sibling, or the law (V,) if none is."""


def walk(node_rule: NodeRule) -> Rule:
    """Apply a rule for one place from the root down: the walk shared by most verifiers.

    A rule for one place keeps p: sum_i P(accept i) [token i = y] + P(reject all) law(y) = p(y).
    Walking keeps the joint law, because the siblings below a node are drawn independently of how
    the node was chosen.
    """

    def rule(tree: DraftTree, target: Tensor, dice: Dice) -> Stop:
        group = [0]
        while children := tree.children(group):
            outcome = node_rule(target[group[0]], Siblings.of(tree, children), dice)
            if isinstance(outcome, Tensor):
                return Stop(group[0], outcome)
            group = tree.follow(children, outcome)
        return Stop(group[0], target[group[0]])

    return rule


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exact law of a verification.

    Args:
        stop: (N+1,) probability that the accepted path ends at each node; sums to 1.
        bonus: (N+1, V) law of the next token given that it ended there; zero rows where stop = 0.
    """

    stop: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn verification.

    Args:
        nodes: accepted nodes from the root down, without node 0.
        token: the token emitted after them.
        verifier: what verifies the next round: the same verifier, or one that holds frames.
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
        carries: whether a rejection opens a frame. The length of every draft must then be planned
            before its first token is drawn: a stopping rule that looks at drafted tokens is biased.
        frames: what earlier rounds left behind; the rule sees the target through them.
        branching: whether it takes drafts with more than one candidate for a place.
        lossless: whether the output law is exactly the target's.
        paper: where it comes from.
    """

    name: str
    rule: Rule = field(repr=False)
    takes: tuple[str, ...]
    carries: bool = False
    frames: Frames = ()
    branching: bool = False
    lossless: bool = True
    paper: str = ""

    def needs_tail(self, length: int) -> bool:
        """Whether a chain of `length` tokens must carry the draft's law after its last one."""
        return needs_tail(self.frames, length)

    def check(self, tree: DraftTree, target: Tensor) -> None:
        """Raise ValueError unless there is a proof for this form of draft and p fits it."""
        if tree.kind not in self.takes:
            raise ValueError(
                f"verifier {self.name!r} is proved for {'; '.join(self.takes)}; got {tree.kind}"
            )
        if not target.is_floating_point() or target.dtype.itemsize < 4:
            raise ValueError(f"target must be float32 or wider, got {target.dtype}")
        # An empty draft has no law, so it does not know V.
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
            ValueError: for a draft without a proof, or a target of another shape or that is no law.
        """
        self.check(tree, target)
        off = float((target.sum(dim=-1) - 1).abs().max())
        if bool((target < 0).any()) or not off <= 1e-3:
            raise ValueError(
                f"target must hold laws: no negative entry, rows that sum to 1; one is off by {off}"
            )
        stop = torch.zeros(len(tree) + 1, dtype=torch.float64)
        bonus = torch.zeros(target.shape, dtype=torch.float64)
        for weight, end in self.outcomes(tree, target):
            stop[end.node] += weight
            bonus[end.node] += weight * end.law.double().cpu()
        # By its own sum rather than by `stop`, which may be too small to divide by.
        mass = bonus.sum(dim=-1, keepdim=True)
        bonus /= torch.where(mass > 0, mass, 1.0)
        return Verdict(stop.to(target), bonus.to(target))

    def outcomes(self, tree: DraftTree, target: Tensor) -> Iterator[tuple[float, Stop]]:
        """Every way in which the round can end, with its probability. Arguments as above."""
        self.check(tree, target)
        seen = framed_target(self.frames, tree, target) if self.frames else target
        return outcomes(lambda dice: self.rule(tree, seen, dice))

    def after(self, tree: DraftTree, target: Tensor, end: Stop, token: int) -> Verifier:
        """The verifier of the next round, given how this one ended and the token drawn there."""
        if not self.frames and end.opens is None:
            return self
        frames = frames_after(self.frames, end.opens, tree, target, end.node, token)
        return replace(self, frames=frames)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        """Draw one outcome, visiting only the nodes walked. Arguments as in `__call__`."""
        self.check(tree, target)
        seen = framed_target(self.frames, tree, target) if self.frames else target
        end = self.rule(tree, seen, RealDice(generator))
        token = draw_one(end.law, generator)
        nodes, node = [], end.node
        while node:
            nodes.append(node)
            node = int(tree.parents[node - 1])
        return Drawn(nodes[::-1], token, self.after(tree, target, end, token))


class RealDice:
    """Dice thrown with a generator; uniforms are drawn in blocks, which is cheaper."""

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

    def flip(self, probability: float) -> bool:
        """True with the given probability."""
        return self._uniform() < probability

    def pick(self, weights: Sequence[float]) -> int:
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


class ScriptedDice:
    """Dice that follow a script of outcomes and then take the first possible one."""

    def __init__(self, script: list[int]) -> None:
        self.weight = 1.0
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self._script = script

    def flip(self, probability: float) -> bool:
        """Outcome 1 is True."""
        chance = min(1.0, max(0.0, probability))
        return self.pick((1.0 - chance, chance)) == 1

    def pick(self, weights: Sequence[float]) -> int:
        """Take the scripted outcome and multiply the weight by its probability."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        step = len(self.taken)
        index = self._script[step] if step < len(self._script) else possible[0]
        self.weight *= weights[index] / sum(weights)
        self.taken.append(index)
        self.possible.append(possible)
        return index


def outcomes(procedure: Callable[[Dice], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of a random procedure with its probability.

    The procedure is run once an outcome; it must depend on nothing but its dice.
    """
    script: list[int] | None = []
    while script is not None:
        dice = ScriptedDice(script)
        result = procedure(dice)
        yield dice.weight, result
        script = None
        for step in reversed(range(len(dice.taken))):
            later = [index for index in dice.possible[step] if index > dice.taken[step]]
            if later:
                script = [*dice.taken[:step], later[0]]
                break
