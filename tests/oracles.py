"""Exact distributions of small cases, by enumeration: what every verifier is held against.

Models are lookup tables: a distribution for every prefix, drawn at random, with zeros. Nothing here uses the
formulas of a verifier: drafts are enumerated with their probability, a verdict is completed with
the target's own distribution to a fixed length, and the result is compared with the target's joint distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from eval.drafts import DraftTree, How
from eval.verifiers import Verifier

Prefix = tuple[int, ...]
Table = Mapping[Prefix, Tensor]
"""The distribution (V,) of the next token after every prefix."""
Drafts = Iterator[tuple[float, DraftTree]]
"""Every draft with its probability."""
Weighted = Sequence[tuple[float, DraftTree]]


def random_distribution(vocabulary: int, generator: torch.Generator, zeros: float = 0.0) -> Tensor:
    """A distribution (V,) in float64; each entry is zero with probability `zeros`, never all of them."""
    skew = 0.5 + 2.5 * torch.rand((), generator=generator, dtype=torch.float64)
    uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
    weights = (-torch.log(uniform.clamp(min=1e-12))) ** skew + 1e-9
    keep = torch.rand(vocabulary, generator=generator) >= zeros
    keep[int(torch.randint(vocabulary, (), generator=generator))] = True
    weights = torch.where(keep, weights, 0.0)
    return weights / weights.sum()


def random_table(vocabulary: int, depth: int, seed: int, zeros: float = 0.0) -> Table:
    """Context-dependent distributions for every prefix of at most `depth` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: random_distribution(vocabulary, generator, zeros)
        for length in range(depth + 1)
        for prefix in itertools.product(range(vocabulary), repeat=length)
    }


def constant_table(distribution: Sequence[float], depth: int) -> Table:
    """The same distribution after every prefix."""
    row = torch.tensor(distribution, dtype=torch.float64)
    return {
        prefix: row
        for length in range(depth + 1)
        for prefix in itertools.product(range(len(distribution)), repeat=length)
    }


def markov_table(first: Sequence[float], rows: Sequence[Sequence[float]], depth: int) -> Table:
    """A Markov chain: `first` after the empty prefix, `rows[last token]` after any other."""
    table = {
        prefix: torch.tensor(rows[prefix[-1]], dtype=torch.float64)
        for length in range(1, depth + 1)
        for prefix in itertools.product(range(len(first)), repeat=length)
    }
    return {(): torch.tensor(first, dtype=torch.float64), **table}


def shifted(table: Table, prefix: Prefix, depth: int) -> Table:
    """The table as seen after a prefix, for `depth` further tokens."""
    vocabulary = table[()].shape[0]
    return {
        rest: table[prefix + rest]
        for length in range(depth + 1)
        for rest in itertools.product(range(vocabulary), repeat=length)
    }


# --- drafts -------------------------------------------------------------------------------------


def support(distribution: Tensor) -> list[tuple[float, int]]:
    """Tokens of positive probability: (probability, token)."""
    return [(float(mass), token) for token, mass in enumerate(distribution.tolist()) if mass > 0]


def sibling_groups(distribution: Tensor, count: int, how: How) -> list[tuple[float, Prefix]]:
    """Every draw of `count` siblings from one distribution, fewer where the support runs out."""
    if how == "iid":
        return [
            (math.prod(mass for mass, _ in draws), tuple(token for _, token in draws))
            for draws in itertools.product(support(distribution), repeat=count)
        ]
    if how == "distinct":
        return _distinct(distribution, min(count, len(support(distribution))))
    ranked = sorted(support(distribution), key=lambda pair: (-pair[0], pair[1]))
    top = tuple(token for _, token in ranked[: count - 1])
    rest = ranked[count - 1 :]
    mass = sum(weight for weight, _ in rest)
    return [(weight / mass, (*top, token)) for weight, token in rest] or [(1.0, top)]


def _distinct(distribution: Tensor, count: int) -> list[tuple[float, Prefix]]:
    if count == 0:
        return [(1.0, ())]
    groups = []
    for mass, token in support(distribution / distribution.sum()):
        rest = distribution.clone()
        rest[token] = 0.0
        groups += [(mass * weight, (token, *later)) for weight, later in _distinct(rest, count - 1)]
    return groups


def continuations(table: Table, length: int) -> list[tuple[float, Prefix]]:
    """Every sequence of `length` tokens with its probability; impossible ones left out."""
    sequences: list[tuple[float, Prefix]] = [(1.0, ())]
    for _ in range(length):
        sequences = [
            (weight * mass, (*prefix, token))
            for weight, prefix in sequences
            for mass, token in support(table[prefix])
        ]
    return sequences


def chain_drafts(
    q: Table, length: int, stop: Callable[[Prefix], bool] = lambda _: False, tail: bool = False
) -> Drafts:
    """Every chain of at most `length` tokens that ends early where `stop` says so.

    `stop` is asked after a token has been drafted and sees the kept tokens only.
    """
    open_ends: list[tuple[float, Prefix]] = [(1.0, ())]
    while open_ends:
        weight, prefix = open_ends.pop()
        if len(prefix) == length or (prefix and stop(prefix)):
            yield weight, chain_draft(prefix, q, tail)
        else:
            open_ends += [(weight * mass, (*prefix, token)) for mass, token in support(q[prefix])]


def chain_draft(tokens: Prefix, q: Table, tail: bool = False) -> DraftTree:
    """The chain with these tokens."""
    vocabulary = q[()].shape[0]
    rows = [q[tokens[:depth]] for depth in range(len(tokens))]
    distributions = torch.stack(rows) if rows else torch.zeros(0, vocabulary, dtype=torch.float64)
    ids = torch.tensor(tokens, dtype=torch.long)
    return DraftTree.chain(ids, distributions, q[tokens] if tail else None)


def sibling_drafts(q: Table, count: int, how: How) -> Drafts:
    """Every group of siblings drawn from one distribution."""
    for weight, tokens in sibling_groups(q[()], count, how):
        yield weight, DraftTree.siblings(torch.tensor(tokens), q[()], how)


def independent_siblings(tables: Sequence[Table]) -> Drafts:
    """One sibling from each distribution."""
    distributions = torch.stack([table[()] for table in tables])
    for draws in itertools.product(*(support(distribution) for distribution in distributions)):
        weight = math.prod(mass for mass, _ in draws)
        yield weight, DraftTree.siblings(torch.tensor([token for _, token in draws]), distributions)


def path_drafts(tables: Sequence[Table], length: int) -> Drafts:
    """One rollout from each table (the same table several times for iid paths)."""
    for rollouts in itertools.product(*(continuations(table, length) for table in tables)):
        weight = math.prod(mass for mass, _ in rollouts)
        distributions = [
            torch.stack([table[tokens[:depth]] for depth in range(length)])
            for table, (_, tokens) in zip(tables, rollouts, strict=True)
        ]
        tokens = torch.tensor([tokens for _, tokens in rollouts])
        yield weight, DraftTree.paths(tokens, torch.stack(distributions))


def tree_drafts(q: Table, widths: Sequence[int], how: How) -> Drafts:
    """Every k-configuration; nodes have fewer children where the support runs out."""
    partial: list[tuple[float, list[Prefix], list[int], list[int]]] = [(1.0, [()], [], [0])]
    for width in widths:
        builder = []
        for weight, prefixes, parents, level in partial:
            choices = [sibling_groups(q[prefixes[node]], width, how) for node in level]
            for groups in itertools.product(*choices):
                new_prefixes, new_parents = list(prefixes), list(parents)
                for node, (_, tokens) in zip(level, groups, strict=True):
                    new_prefixes += [(*prefixes[node], token) for token in tokens]
                    new_parents += [node] * len(tokens)
                total = weight * math.prod(mass for mass, _ in groups)
                new_level = list(range(len(prefixes), len(new_prefixes)))
                builder.append((total, new_prefixes, new_parents, new_level))
        partial = builder
    for weight, prefixes, parents, _ in partial:
        yield weight, _tree_draft(q, widths, how, prefixes, parents)


def _tree_draft(
    q: Table, widths: Sequence[int], how: How, prefixes: list[Prefix], parents: list[int]
) -> DraftTree:
    tokens = torch.tensor([prefix[-1] for prefix in prefixes[1:]])
    inner = sorted(set(parents))
    distributions = torch.stack([q[prefixes[node]] for node in inner])
    full = sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))
    if len(parents) == full:
        return DraftTree.tree(widths, tokens, distributions, how)
    distribution = torch.tensor([inner.index(parent) for parent in parents])
    return DraftTree(
        tokens, torch.tensor(parents), distributions, distribution, "tree", how
    ).checked()


@dataclass(frozen=True)
class Case:
    """A form of draft over random models.

    Args:
        kind: what `DraftTree.kind` must say (or a kind that it degenerates to).
        vocabulary: V.
        depth: tokens on the longest path.
        tables: how many draft models it needs.
        drafts: all drafts of those models.
    """

    kind: str
    vocabulary: int
    depth: int
    tables: int
    drafts: Callable[[Sequence[Table]], Drafts]

    def models(self, seed: int, zeros: float) -> tuple[Table, list[Table]]:
        """The target and the drafts, as random tables."""
        p = random_table(self.vocabulary, self.depth, 1000 * seed, zeros)
        qs = [
            random_table(self.vocabulary, self.depth, 1000 * seed + 1 + index, zeros)
            for index in range(self.tables)
        ]
        return p, qs

    @cache  # noqa: B019  the cases live as long as the module
    def enumerated(self, seed: int, zeros: float) -> tuple[Table, Table, Weighted]:
        """The target, the (first) draft, and all drafts with their probability."""
        p, qs = self.models(seed, zeros)
        return p, qs[0], tuple(self.drafts(qs))


CASES: Mapping[str, Case] = {
    "chain of 1, V=2": Case("chain", 2, 1, 1, lambda q: chain_drafts(q[0], 1)),
    "chain of 3, V=2": Case("chain", 2, 3, 1, lambda q: chain_drafts(q[0], 3)),
    "chain of 2, V=3": Case("chain", 3, 2, 1, lambda q: chain_drafts(q[0], 2)),
    "2 siblings": Case("siblings, iid", 4, 1, 1, lambda q: sibling_drafts(q[0], 2, "iid")),
    "3 siblings": Case("siblings, iid", 3, 1, 1, lambda q: sibling_drafts(q[0], 3, "iid")),
    "2 independent siblings": Case(
        "siblings, independent", 3, 1, 2, lambda q: independent_siblings(q)
    ),
    "3 independent siblings": Case(
        "siblings, independent", 3, 1, 3, lambda q: independent_siblings(q)
    ),
    "2 distinct siblings": Case(
        "siblings, distinct", 4, 1, 1, lambda q: sibling_drafts(q[0], 2, "distinct")
    ),
    "3 distinct siblings": Case(
        "siblings, distinct", 4, 1, 1, lambda q: sibling_drafts(q[0], 3, "distinct")
    ),
    "2 greedy siblings": Case(
        "siblings, greedy", 4, 1, 1, lambda q: sibling_drafts(q[0], 2, "greedy")
    ),
    "3 greedy siblings": Case(
        "siblings, greedy", 4, 1, 1, lambda q: sibling_drafts(q[0], 3, "greedy")
    ),
    "2 paths of 2, V=2": Case("paths, iid", 2, 2, 1, lambda q: path_drafts(q[:1] * 2, 2)),
    "3 paths of 2, V=2": Case("paths, iid", 2, 2, 1, lambda q: path_drafts(q[:1] * 3, 2)),
    "2 paths of 2, V=3": Case("paths, iid", 3, 2, 1, lambda q: path_drafts(q[:1] * 2, 2)),
    "2 paths of 3, V=2": Case("paths, iid", 2, 3, 1, lambda q: path_drafts(q[:1] * 2, 3)),
    "2 independent paths of 2": Case("paths, independent", 2, 2, 2, lambda q: path_drafts(q, 2)),
    "3 independent paths of 2": Case("paths, independent", 2, 2, 3, lambda q: path_drafts(q, 2)),
    "tree 2x2, V=2": Case("tree, iid", 2, 2, 1, lambda q: tree_drafts(q[0], (2, 2), "iid")),
    "tree 3x1, V=2": Case("tree, iid", 2, 2, 1, lambda q: tree_drafts(q[0], (3, 1), "iid")),
    "tree 2x1, V=3": Case("tree, iid", 3, 2, 1, lambda q: tree_drafts(q[0], (2, 1), "iid")),
    "distinct tree 2x2": Case(
        "tree, distinct", 3, 2, 1, lambda q: tree_drafts(q[0], (2, 2), "distinct")
    ),
    "distinct tree 3x1": Case(
        "tree, distinct", 3, 2, 1, lambda q: tree_drafts(q[0], (3, 1), "distinct")
    ),
    "greedy tree 2x2": Case("tree, greedy", 3, 2, 1, lambda q: tree_drafts(q[0], (2, 2), "greedy")),
}
"""Small forms that are enumerated in full, every kind of `DraftTree` among them."""


# --- distributions of outputs ----------------------------------------------------------------------------


def node_prefixes(tree: DraftTree) -> list[Prefix]:
    """The tokens that lead to every node, the root's empty prefix first."""
    prefixes: list[Prefix] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        prefixes.append((*prefixes[parent], token))
    return prefixes


def target_rows(tree: DraftTree, p: Table) -> Tensor:
    """(N+1, V) the target's distributions after every node."""
    return torch.stack([p[prefix] for prefix in node_prefixes(tree)])


def joint_distribution(p: Table, prefix: Prefix, length: int) -> Tensor:
    """(V,) * length: the joint distribution of the tokens that follow a prefix."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    distribution = p[prefix]
    rest = [
        joint_distribution(p, (*prefix, token), length - 1)
        for token in range(distribution.shape[0])
    ]
    return torch.stack(
        [distribution[token] * rest[token] for token in range(distribution.shape[0])]
    )


def completed(p: Table, prefix: Prefix, distribution: Tensor, length: int) -> Tensor:
    """Joint distribution of `length` tokens: a fixed prefix, one token from `distribution`, the rest from p."""
    vocabulary = distribution.shape[0]
    joint = torch.zeros((vocabulary,) * length, dtype=torch.float64)
    rest = length - len(prefix) - 1
    for token in distribution.nonzero().flatten().tolist():
        following = joint_distribution(p, (*prefix, token), rest)
        joint[(*prefix, token)] = float(distribution[token]) * following
    return joint


def output_distribution(
    verifier: Verifier, drafts: Drafts, p: Table, length: int, q: Table
) -> Tensor:
    """(V,) * length: the joint distribution of what one round emits and plain decoding then adds.

    Plain decoding draws from p, and through the carried of a verifier that carries some; q is the
    draft's table, which carried refer to.
    """
    joint = torch.zeros((p[()].shape[0],) * length, dtype=torch.float64)
    for weight, tree in drafts:
        target = target_rows(tree, p)
        prefixes = node_prefixes(tree)
        if verifier.carries_residual:
            for chance, end in verifier.outcomes(tree, target):
                for mass, token in support(end.distribution):
                    text = (*prefixes[end.node], token)
                    after = verifier.after(tree, target, end, token)
                    joint += weight * chance * mass * plain_distribution(after, text, p, q, length)
            continue
        verdict = verifier(tree, target)
        for node, stop in enumerate(verdict.stop.tolist()):
            if stop > 0:
                joint += weight * stop * completed(p, prefixes[node], verdict.bonus[node], length)
    return joint


def plain_distribution(verifier: Verifier, text: Prefix, p: Table, q: Table, length: int) -> Tensor:
    """(V,) * length: a fixed text, and what rounds of empty drafts add to it."""
    joint = torch.zeros((p[()].shape[0],) * length, dtype=torch.float64)
    if len(text) >= length:
        joint[text[:length]] = 1.0
        return joint
    tree, target = chain_draft((), shifted(q, text, 0), tail=True), p[text].unsqueeze(0)
    for chance, end in verifier.outcomes(tree, target):
        for mass, token in support(end.distribution):
            after = verifier.after(tree, target, end, token)
            joint += chance * mass * plain_distribution(after, (*text, token), p, q, length)
    return joint


def expected_accepted(verifier: Verifier, drafts: Drafts, p: Table) -> float:
    """E[tau], the expected number of accepted tokens in a round."""
    total = 0.0
    for weight, tree in drafts:
        stop = verifier(tree, target_rows(tree, p)).stop.tolist()
        depths = [len(prefix) for prefix in node_prefixes(tree)]
        total += weight * sum(s * d for s, d in zip(stop, depths, strict=True))
    return total


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the L1 distance of two distributions of the same shape."""
    return 0.5 * float((first.double() - second.double()).abs().sum())


def rounds_distribution(
    verifier: Verifier,
    p: Table,
    length: int,
    draft: Callable[[Prefix, Verifier], Drafts],
) -> tuple[Tensor, float]:
    """The first `length` tokens of a decoder that runs as many rounds as it takes.

    Args:
        verifier: as it is before the first round.
        p: the target, known for `length` tokens plus a draft.
        length: tokens to emit; what a round emits beyond them is cut off.
        draft: all drafts after a committed prefix.

    Returns:
        Their joint distribution, (V,) * length, and the expected number of rounds.
    """
    joint = torch.zeros((p[()].shape[0],) * length, dtype=torch.float64)
    waiting: dict[tuple[Prefix, Verifier], float] = {((), verifier): 1.0}
    rounds = 0.0
    while waiting:
        # Shortest text first, so that equal states have met before they are expanded.
        state = min(waiting, key=lambda pair: len(pair[0]))
        weight = waiting.pop(state)
        rounds += weight
        for text, after, chance in _one_round(*state, p, draft):
            if len(text) >= length:
                joint[text[:length]] += weight * chance
            else:
                waiting[text, after] = waiting.get((text, after), 0.0) + weight * chance
    return joint, rounds


def _one_round(
    text: Prefix, verifier: Verifier, p: Table, draft: Callable[[Prefix, Verifier], Drafts]
) -> Iterator[tuple[Prefix, Verifier, float]]:
    for weight, tree in draft(text, verifier):
        prefixes = node_prefixes(tree)
        target = torch.stack([p[text + prefix] for prefix in prefixes])
        for chance, end in verifier.outcomes(tree, target):
            for mass, token in support(end.distribution):
                after = verifier.after(tree, target, end, token)
                yield (*text, *prefixes[end.node], token), after, weight * chance * mass
