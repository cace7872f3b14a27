"""A draft: tokens, the node that each follows, and the distribution that each was drawn from.

Nodes are numbered from 1 in draft order; node 0 is the last committed token. Siblings keep their
draw order and may repeat a token: multiplicity is part of the verifiers' proofs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

How = Literal["iid", "distinct", "greedy", "chosen"]
"""The drawing of siblings: independently, without replacement, the top K - 1 and one draw; or they
were chosen, all of them, without a draw."""
TreeShape = Literal["chain", "siblings", "paths", "tree"]
"""One path; candidates for one position; independent paths from the root; a k-configuration."""

# Rows that are one distribution (same context, same draft) may differ by rounding in a forward.
SAME_DISTRIBUTION_EPSILONS = 64
# A distribution that sums to 1 + d biases the output by about d.
SUM_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class DraftTree:
    """N drafted nodes over a vocabulary of V tokens.

    Build it with `chain`, `paths`, `siblings` or `tree`, which check everything; the plain
    constructor checks nothing and is for drafters that have just drawn the tokens themselves.

    Args:
        tokens: (N,) int64, the token of node i+1.
        parents: (N,) int64, the node that node i+1 follows; parents[i] <= i.
        distributions: (M, V) the distinct distributions that tokens were drawn from (q), float32 or
            float64; rows sum to 1.
        distribution_index: (N,) int64, the row of `distributions` that node i+1's token was drawn
            from. For "distinct" and "greedy" siblings this is the distribution before earlier picks
            were removed; "chosen" ones were chosen by it.
        shape: the form of the tree.
        how: how siblings were drawn: "iid" (independently, from one distribution or several),
            "distinct" (without replacement, in draw order), "greedy" (top K-1, then one draw) or
            "chosen" (by a rule that draws nothing).
        tail: (V,) the draft's distribution after the last node of a chain, where a verifier asked
            for it.
        planned: the length that a chain was to have, where an end token or a stopping rule may have
            cut it short; None: all planned tokens are there.
    """

    tokens: Tensor
    parents: Tensor
    distributions: Tensor
    distribution_index: Tensor
    shape: TreeShape
    how: How = "iid"
    tail: Tensor | None = None
    planned: int | None = None

    def __len__(self) -> int:
        """Number of drafted nodes, N."""
        return self.tokens.shape[0]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.distributions.shape[-1]

    @cached_property
    def token_list(self) -> list[int]:
        """Tokens as Python ints, read from the device once."""
        return list(self.tokens.tolist())

    @cached_property
    def parent_list(self) -> list[int]:
        """Parents as Python ints, read from the device once."""
        return list(self.parents.tolist())

    @cached_property
    def distribution_indices(self) -> list[int]:
        """Rows of `distributions` as Python ints."""
        return list(self.distribution_index.tolist())

    @cached_property
    def children_of(self) -> list[list[int]]:
        """Children of every node, in draw order: N+1 lists."""
        children_of: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parent_list, start=1):
            children_of[parent].append(node)
        return children_of

    @cached_property
    def depth(self) -> int:
        """Tokens on the longest path from the root."""
        depths = [0]
        for parent in self.parent_list:
            depths.append(depths[parent] + 1)
        return max(depths)

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root's child down to a node; empty for node 0."""
        return path_to(self.parent_list, node)

    def children(self, group: Sequence[int]) -> list[int]:
        """Nodes that follow any node of a group, in draw order."""
        return [child for node in group for child in self.children_of[node]]

    def follow(self, children: Sequence[int], chosen: int) -> list[int]:
        """The nodes that an accepted child leads to, whose children compete next.

        On paths these are the children with the accepted token; elsewhere it is the child itself
        (siblings with the same token keep their own subtrees, as in MCSD and SpecTr).
        """
        if self.shape != "paths":
            return [children[chosen]]
        token = self.token_list[children[chosen] - 1]
        return [child for child in children if self.token_list[child - 1] == token]

    def distribution_of(self, node: int) -> Tensor:
        """The distribution (V,) that the token of a drafted node was drawn from."""
        return self.distributions[self.distribution_indices[node - 1]]

    @cached_property
    def identical(self) -> bool:
        """True if tokens that compete for one position were drawn from one distribution."""
        drawn_from: dict[int, set[int]] = {}
        for after, index in zip(self.verified_after, self.distribution_indices, strict=True):
            drawn_from.setdefault(after, set()).add(index)
        return all(len(rows) == 1 for rows in drawn_from.values())

    @cached_property
    def verified_after(self) -> list[int]:
        """The node after which each node's token competes: its parent, or its equal on a path.

        A group of nodes (`children`, `follow`) is verified by the target after its first node.
        """
        if self.shape != "paths":
            return self.parent_list
        after = list(self.parent_list)
        groups: list[list[int]] = [[0]]
        while groups:
            group = groups.pop()
            children = self.children(group)
            for child in children:
                after[child - 1] = group[0]
            followed = [self.follow(children, index) for index in range(len(children))]
            groups += {each[0]: each for each in followed if each}.values()
        return after

    def chances(self, target: Tensor, after: Sequence[int]) -> tuple[list[float], list[float]]:
        """The chances that the target and the draft gave each node's token, all read at once.

        Args:
            target: (N+1, V) the target's distributions.
            after: the node whose row of `target` each token is verified by: `verified_after` or
                `parent_list`.

        Returns:
            N probabilities of each; the target's are NaN where it has no distribution.
        """
        if not len(self):
            return [], []
        index = torch.tensor([list(after), self.token_list, self.distribution_indices])
        rows, tokens, drawn_from = index.to(target.device, non_blocking=True)
        p, q = target[rows, tokens], self.distributions[drawn_from, tokens]
        ps, qs = torch.stack([p.double(), q.double()]).tolist()
        return ps, qs

    @property
    def kind(self) -> str:
        """The form that a verifier must have a proof for, for example "paths, independent"."""
        if self.shape == "chain":
            return "chain"
        return f"{self.shape}, {self.how if self.identical else 'independent'}"

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor, tail: Tensor | None = None) -> DraftTree:
        """Build one path (L,) drawn from q (L, V); the tail (V,) is q after its last token."""
        _require(tokens.ndim == 1 and q.ndim == 2, "a chain needs tokens (L,) and q (L, V)", q)
        length = tokens.shape[0]
        _require(q.shape[0] == length, f"q needs one row a token, {length}", q)
        order = torch.arange(length)
        return cls(tokens, order, q, order, "chain", "iid", tail).checked()

    @classmethod
    def paths(cls, tokens: Tensor, q: Tensor) -> DraftTree:
        """Build K independent rollouts (K, L) drawn from q (K, L, V), which may differ by path."""
        _require(tokens.ndim == 2 and q.ndim == 3, "paths need tokens (K, L) and q (K, L, V)", q)
        count, length = tokens.shape
        _require(q.shape[:2] == tokens.shape, f"q needs shape ({count}, {length}, V)", q)
        _require(count > 0 and length > 0, "paths need at least one path and one token", tokens)
        index = torch.arange(count * length)
        parents = torch.where(index % length == 0, 0, index)
        flat = tokens.reshape(-1)
        distributions = q.reshape(count * length, -1)
        prefixes = [tuple(row[:depth]) for row in tokens.tolist() for depth in range(length)]
        distribution_index = _share_distributions(prefixes, distributions)
        return cls(flat, parents, distributions, distribution_index, "paths").checked()

    @classmethod
    def siblings(cls, tokens: Tensor, q: Tensor, how: How = "iid") -> DraftTree:
        """Build K candidates for one position from tokens (K,) in draw order.

        All were drawn from q (V,), or each from its own (K, V) if how="iid".
        """
        _require(tokens.ndim == 1 and q.ndim in (1, 2), "siblings need tokens (K,), q (V,)", q)
        count = tokens.shape[0]
        _require(count > 0, "siblings need at least one token", tokens)
        if q.ndim == 2:
            _require(how == "iid", f"q (K, V) needs how='iid', not {how!r}; give q (V,)", q)
            _require(q.shape[0] == count, f"q needs one row a token, {count}", q)
            distribution_index = _share_distributions([()] * count, q)
        else:
            q, distribution_index = q.unsqueeze(0), torch.zeros(count, dtype=torch.long)
        parents = torch.zeros(count, dtype=torch.long)
        return cls(tokens, parents, q, distribution_index, "siblings", how).checked()

    @classmethod
    def tree(cls, widths: Sequence[int], tokens: Tensor, q: Tensor, how: How = "iid") -> DraftTree:
        """A k-configuration such as (4, 2, 2), breadth first.

        Args:
            widths: children of every node at depth 0, 1, ...
            tokens: (N,), N the sum of the cumulative products of `widths`.
            q: (nodes with children, V), row i the draft's distribution after node i.
            how: how siblings were drawn.
        """
        _require(len(widths) > 0 and min(widths) > 0, f"widths must be positive: {widths}", q)
        level, parents, next_node = [0], [], 1
        for width in widths:
            parents += [node for node in level for _ in range(width)]
            level = list(range(next_node, next_node + len(level) * width))
            next_node += len(level)
        inner = next_node - len(level)
        _require(
            tokens.shape == (len(parents),), f"widths {tuple(widths)} need {len(parents)} tokens", q
        )
        _require(q.ndim == 2 and q.shape[0] == inner, f"q needs {inner} rows", q)
        # Rows of q are numbered as the nodes that have children: by the parent.
        parent = torch.tensor(parents)
        return cls(tokens, parent, q, parent, "tree", how).checked()

    def checked(self) -> DraftTree:
        """Return self if the class's documented properties hold.

        Raises:
            ValueError: that states what must hold and what was given.
        """
        count, q = len(self), self.distributions
        if self.how not in get_args(How):
            raise ValueError(f"how must be one of {get_args(How)}, got {self.how!r}")
        _require(q.ndim == 2 and q.dtype in FLOATS, "q must be (M, V), float32 or float64", q)
        for index in (self.tokens, self.parents, self.distribution_index):
            fits = index.shape == (count,) and index.dtype in INTEGERS
            _require(fits, f"tokens, parents and rows of q must be ({count},) integers", index)
        every = q if self.tail is None else torch.cat([q, self.tail.unsqueeze(0)])
        if not bool(torch.isfinite(every).all()) or bool((every < 0).any()):
            raise ValueError("distributions q must be finite and non-negative")
        error = (every.sum(dim=-1) - 1).abs()
        if len(every) and float(error.max()) > SUM_TOLERANCE[q.dtype]:
            raise ValueError(
                f"every distribution q must sum to 1; row {int(error.argmax())} is off by"
                f" {float(error.max()):.3g}: pass probabilities, not logits"
            )
        if count:
            _in_range("token ids", self.tokens, self.vocabulary)
            _in_range("rows of distributions", self.distribution_index, len(q))
        for node, parent in enumerate(self.parent_list, start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"a parent must come before its child: node {node} follows node {parent}"
                )
        widths = [len(siblings) for siblings in self.children_of]
        most = {"chain": (1, 1), "paths": (count, 1), "siblings": (count, 0)}
        first, later = most.get(self.shape, (count, count))
        if widths[0] > first or max(widths[1:], default=0) > later:
            raise ValueError(
                f"these parents do not make a draft of form {self.shape}: children a node {widths}"
            )
        for siblings in self.children_of:
            tokens = [self.token_list[child - 1] for child in siblings]
            if self.how != "iid" and len(set(tokens)) < len(tokens):
                raise ValueError(f"{self.how} siblings must differ, got tokens {tokens}")
            # Greedy siblings but the last were chosen, not drawn; any set may be chosen.
            drawn = {"greedy": siblings[-1:], "chosen": []}.get(self.how, siblings)
            for child in drawn:
                token = self.token_list[child - 1]
                if not float(self.distribution_of(child)[token]) > 0:
                    raise ValueError(
                        f"node {child} holds token {token}, to which its distribution q gives"
                        " probability 0: pass the distribution the token was really drawn from"
                    )
        return self


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to a node; empty for node 0."""
    path = []
    while node:
        path.append(node)
        node = parents[node - 1]
    return path[::-1]


def _require(holds: bool, message: str, got: Tensor) -> None:
    if not holds:
        raise ValueError(f"{message}; got shape {tuple(got.shape)}, dtype {got.dtype}")


def _in_range(name: str, index: Tensor, size: int) -> None:
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= size:
        raise ValueError(f"{name} must lie in [0, {size}), got {low} to {high}")


def _share_distributions(contexts: Sequence[tuple[int, ...]], distributions: Tensor) -> Tensor:
    """For every row of `distributions` the first equal row of the same context: (rows,).

    Equal but for rounding: the tolerance is relative to each probability, so zeros must coincide;
    an absolute one would merge distributions of many small probabilities that differ as a whole.
    """
    tolerance = SAME_DISTRIBUTION_EPSILONS * torch.finfo(distributions.dtype).eps
    index = list(range(len(contexts)))
    order = sorted(index, key=lambda row: (contexts[row], row))
    for previous, row in pairwise(order):
        first = distributions[index[previous]]
        gap, smaller = (first - distributions[row]).abs(), first.minimum(distributions[row])
        if contexts[previous] == contexts[row] and bool((gap <= tolerance * smaller).all()):
            index[row] = index[previous]
    return torch.tensor(index, dtype=torch.long)
