"""What a search for the best tree found: the stored value, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from eval.analysis.static_trees import Tree, depth_of, inner_nodes_of, nodes_of
from eval.measuring.intervals import Interval
from eval.measuring.records import Strict
from specdata.storage.files import write_json

SCHEMA_VERSION: Literal[1] = 1
FOUND = "trees.json"
Family = Literal["chain", "k-configuration", "static tree"]


class RoundTimes(Strict):
    """Seconds of a round, fitted to medians over rounds of a few shapes.

    Attributes:
        chain_round: of a chain's round, whatever its length.
        chain_token: and for each of its tokens.
        tree_round: of a tree's round, whatever its form.
        level: and for each level, a forward of the draft.
        run: for each node that the draft runs to draw its children.
        node: for each drafted node.
        largest_error: largest relative difference between a timed shape and the fit.
    """

    chain_round: float
    chain_token: float
    tree_round: float
    level: float
    run: float
    node: float
    largest_error: float

    def chain(self, length: int) -> float:
        """Of a chain of so many tokens."""
        return self.chain_round + length * self.chain_token

    def tree(self, tree: Tree) -> float:
        """Of a tree."""
        seconds = (self.tree_round, self.level, self.run, self.node)
        return sum(each * count for each, count in zip(seconds, tree_parts(tree), strict=True))


def tree_parts(tree: Tree) -> tuple[float, float, float, float]:
    """How often a round of a tree takes each of its four times."""
    return 1.0, float(depth_of(tree)), float(inner_nodes_of(tree)), float(nodes_of(tree))


class Clocked(Strict):
    """What decoding measured.

    Attributes:
        prompts: how many were decoded.
        tokens: emitted tokens a round, with its interval.
        seconds_per_token: wall time, prefill included, over emitted tokens.
        speed: tokens a second over those of the chain that was timed beside it; None for itself.
    """

    prompts: int
    tokens: Interval
    seconds_per_token: float
    speed: Interval | None


class Candidate(Strict):
    """A draft, how many tokens a round it emits, and what a token takes.

    Attributes:
        family: what it is.
        children: of each node, level by level from the root, as `child_counts` gives them.
        verifier: the acceptance rule.
        nodes: drafted nodes.
        depth: levels.
        tokens: expected tokens a round along held-out text, with its interval over prompts.
        seconds_per_token: predicted; without the prefill.
        clocked: what decoding measured, of the short list.
    """

    family: Family
    children: list[list[int]]
    verifier: str
    nodes: int
    depth: int
    tokens: Interval
    seconds_per_token: float
    clocked: Clocked | None = None

    @property
    def widths(self) -> list[int]:
        """Of a chain or a k-configuration: children of every node, by depth."""
        return [level[0] for level in self.children]

    @property
    def paths(self) -> int:
        """Leaves, which for a k-configuration is the product of its widths."""
        inner = sum(sum(count > 0 for count in level) for level in self.children)
        return self.nodes + 1 - inner

    @property
    def name(self) -> str:
        """As a report calls it: K=4, 2x2x1x1, or 12 nodes."""
        if self.family == "chain":
            return f"K={self.depth}"
        if self.family == "static tree":
            form = "a chain" if self.nodes == self.depth else f"{self.depth} deep"
            return f"{self.nodes} nodes, {form}"
        return "x".join(map(str, self.widths))


class Prediction(Strict):
    """Expected tokens a round of an evaluated method on the held-out text of a prompt set."""

    dataset: str
    method: str
    tokens: Interval


class TreeSearch(Strict):
    """The whole file.

    Attributes:
        made_of: what it was made of, by name -> contents.
        rollouts: held-out rollouts that were gone through.
        positions: their tokens.
        accepted: "iid" and "distinct" -> the chance that one of k candidates is accepted, under
            recursive rejection, for k = 1, 2, ...
        times: what rounds take.
        searched: k-configurations that were compared.
        candidates: chains, k-configurations and static trees that a report shows, and those that
            were timed.
        frontier: the most tokens a round of each family with at most so many nodes.
        predictions: of the evaluation's own methods.
        seconds: that all of it took.
    """

    schema_version: Literal[1]
    made_of: dict[str, str | None]
    rollouts: int
    positions: int
    accepted: dict[str, list[float]]
    times: RoundTimes
    searched: int
    candidates: list[Candidate]
    frontier: dict[Family, list[tuple[int, float]]]
    predictions: list[Prediction]
    seconds: float

    def best(self, family: Family) -> Candidate:
        """The one with the lowest predicted time a token."""
        own = [each for each in self.candidates if each.family == family]
        return min(own, key=lambda each: each.seconds_per_token)

    def clocked(self) -> list[Candidate]:
        """Those that were timed, fastest first."""
        timed = [(each.clocked.seconds_per_token, each) for each in self.candidates if each.clocked]
        return [each for _, each in sorted(timed, key=lambda pair: pair[0])]

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path, made_of: Mapping[str, str | None]) -> TreeSearch | None:
        """A stored value; None if there is none that was made of this, by this version."""
        try:
            stored = cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return stored if stored.made_of == dict(made_of) else None
