"""Exact distributions of small cases by enumeration, the reference for every verifier.

Models are tabular: a distribution for every prefix, drawn at random, with zeros. Nothing here uses
the formulas of a verifier: drafts are enumerated with their probability, a verdict is completed
with the target's own distribution to a fixed length, and the result is compared with the target's
joint distribution.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from eval.drafts import DraftTree, How
from eval.verifiers.rule import Verifier

Prefix = tuple[int, ...]
TabularModel = Mapping[Prefix, Tensor]
"""The distribution (V,) of the next token after every prefix."""
WeightedDrafts = Iterator[tuple[float, DraftTree]]
"""Every draft with its probability."""


def random_distribution(vocabulary: int, generator: torch.Generator, zeros: float = 0.0) -> Tensor:
    """A distribution (V,) in float64; each entry is zero with probability `zeros`, not all are."""
    skew = 0.5 + 2.5 * torch.rand((), generator=generator, dtype=torch.float64)
    uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
    weights = (-torch.log(uniform.clamp(min=1e-12))) ** skew + 1e-9
    keep = torch.rand(vocabulary, generator=generator) >= zeros
    keep[int(torch.randint(vocabulary, (), generator=generator))] = True
    weights = torch.where(keep, weights, 0.0)
    return weights / weights.sum()


def random_distributions(seed: int, size: int, zeros: float = 0.0) -> list[Tensor]:
    """The target's distribution (V,) and the draft's."""
    generator = torch.Generator().manual_seed(seed)
    return [random_distribution(size, generator, zeros) for _ in range(2)]


def random_model(vocabulary: int, depth: int, seed: int, zeros: float = 0.0) -> TabularModel:
    """Context-dependent distributions for every prefix of at most `depth` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix: random_distribution(vocabulary, generator, zeros)
        for length in range(depth + 1)
        for prefix in product(range(vocabulary), repeat=length)
    }


def constant_model(distribution: Sequence[float], depth: int) -> TabularModel:
    """The same distribution after every prefix."""
    row = torch.tensor(distribution, dtype=torch.float64)
    return {
        prefix: row
        for length in range(depth + 1)
        for prefix in product(range(len(distribution)), repeat=length)
    }


def markov_model(
    first: Sequence[float], rows: Sequence[Sequence[float]], depth: int
) -> TabularModel:
    """A Markov chain: `first` after the empty prefix, `rows[last token]` after any other."""
    model = {
        prefix: torch.tensor(rows[prefix[-1]], dtype=torch.float64)
        for length in range(1, depth + 1)
        for prefix in product(range(len(first)), repeat=length)
    }
    return {(): torch.tensor(first, dtype=torch.float64), **model}


def conditioned(model: TabularModel, prefix: Prefix, depth: int) -> TabularModel:
    """The model given a prefix, for `depth` further tokens."""
    vocabulary = model[()].shape[0]
    return {
        rest: model[prefix + rest]
        for length in range(depth + 1)
        for rest in product(range(vocabulary), repeat=length)
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
            for draws in product(support(distribution), repeat=count)
        ]
    if how == "distinct":
        return _distinct(distribution, min(count, len(support(distribution))))
    ranked = sorted(support(distribution), key=lambda pair: (-pair[0], pair[1]))
    if how == "chosen":
        return [(1.0, tuple(token for _, token in ranked[:count]))]
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


def continuations(model: TabularModel, length: int) -> list[tuple[float, Prefix]]:
    """Every sequence of `length` tokens with its probability; impossible ones left out."""
    sequences: list[tuple[float, Prefix]] = [(1.0, ())]
    for _ in range(length):
        sequences = [
            (weight * mass, (*prefix, token))
            for weight, prefix in sequences
            for mass, token in support(model[prefix])
        ]
    return sequences


def chain_drafts(
    q: TabularModel,
    length: int,
    stop: Callable[[Prefix], bool] = lambda _: False,
    tail: bool = False,
) -> WeightedDrafts:
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


def chain_draft(tokens: Prefix, q: TabularModel, tail: bool = False) -> DraftTree:
    """The chain with these tokens."""
    vocabulary = q[()].shape[0]
    rows = [q[tokens[:depth]] for depth in range(len(tokens))]
    distributions = torch.stack(rows) if rows else torch.zeros(0, vocabulary, dtype=torch.float64)
    ids = torch.tensor(tokens, dtype=torch.long)
    return DraftTree.chain(ids, distributions, q[tokens] if tail else None)


def sibling_drafts(q: TabularModel, count: int, how: How) -> WeightedDrafts:
    """Every group of siblings drawn from one distribution."""
    for weight, tokens in sibling_groups(q[()], count, how):
        yield weight, DraftTree.siblings(torch.tensor(tokens), q[()], how)


def independent_siblings(models: Sequence[TabularModel]) -> WeightedDrafts:
    """One sibling from each distribution."""
    distributions = torch.stack([model[()] for model in models])
    for draws in product(*(support(distribution) for distribution in distributions)):
        weight = math.prod(mass for mass, _ in draws)
        yield weight, DraftTree.siblings(torch.tensor([token for _, token in draws]), distributions)


def path_drafts(models: Sequence[TabularModel], length: int) -> WeightedDrafts:
    """One rollout from each model; the same model several times gives iid paths."""
    for rollouts in product(*(continuations(model, length) for model in models)):
        weight = math.prod(mass for mass, _ in rollouts)
        distributions = [
            torch.stack([model[tokens[:depth]] for depth in range(length)])
            for model, (_, tokens) in zip(models, rollouts, strict=True)
        ]
        tokens = torch.tensor([tokens for _, tokens in rollouts])
        yield weight, DraftTree.paths(tokens, torch.stack(distributions))


def tree_drafts(q: TabularModel, widths: Sequence[int], how: How) -> WeightedDrafts:
    """Every k-configuration; nodes have fewer children where the support runs out."""
    partial: list[tuple[float, list[Prefix], list[int], list[int]]] = [(1.0, [()], [], [0])]
    for width in widths:
        extended = []
        for weight, prefixes, parents, level in partial:
            choices = [sibling_groups(q[prefixes[node]], width, how) for node in level]
            for groups in product(*choices):
                new_prefixes, new_parents = list(prefixes), list(parents)
                for node, (_, tokens) in zip(level, groups, strict=True):
                    new_prefixes += [(*prefixes[node], token) for token in tokens]
                    new_parents += [node] * len(tokens)
                total = weight * math.prod(mass for mass, _ in groups)
                new_level = list(range(len(prefixes), len(new_prefixes)))
                extended.append((total, new_prefixes, new_parents, new_level))
        partial = extended
    for weight, prefixes, parents, _ in partial:
        yield weight, _tree_draft(q, widths, how, prefixes, parents)


def _tree_draft(
    q: TabularModel, widths: Sequence[int], how: How, prefixes: list[Prefix], parents: list[int]
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
    """A form of draft over random models: V, the longest path, and how many models draft.

    `kind` is what `DraftTree.kind` must say (or a kind that it degenerates to).
    """

    kind: str
    vocabulary: int
    depth: int
    draft_models: int
    drafts: Callable[[Sequence[TabularModel]], WeightedDrafts]

    def models(self, seed: int, zeros: float) -> tuple[TabularModel, list[TabularModel]]:
        """The target and the drafts, as random models."""
        p = random_model(self.vocabulary, self.depth, 1000 * seed, zeros)
        qs = [
            random_model(self.vocabulary, self.depth, 1000 * seed + 1 + index, zeros)
            for index in range(self.draft_models)
        ]
        return p, qs

    @cache  # noqa: B019  the cases live as long as the module
    def enumerated(
        self, seed: int, zeros: float
    ) -> tuple[TabularModel, TabularModel, Sequence[tuple[float, DraftTree]]]:
        """The target, the (first) draft, and all drafts with their probability."""
        p, qs = self.models(seed, zeros)
        return p, qs[0], tuple(self.drafts(qs))


CASES: Mapping[str, Case] = {
    "chain of 1, V=2": Case("chain", 2, 1, 1, lambda q: chain_drafts(q[0], 1)),
    "chain of 3, V=2": Case("chain", 2, 3, 1, lambda q: chain_drafts(q[0], 3)),
    "chain of 2, V=3": Case("chain", 3, 2, 1, lambda q: chain_drafts(q[0], 2)),
    "2 siblings": Case("siblings, iid", 4, 1, 1, lambda q: sibling_drafts(q[0], 2, "iid")),
    "3 siblings": Case("siblings, iid", 3, 1, 1, lambda q: sibling_drafts(q[0], 3, "iid")),
    "2 independent siblings": Case("siblings, independent", 3, 1, 2, independent_siblings),
    "3 independent siblings": Case("siblings, independent", 3, 1, 3, independent_siblings),
    **{
        f"{n} {how} siblings": Case(
            f"siblings, {how}", 4, 1, 1, lambda q, n=n, how=how: sibling_drafts(q[0], n, how)
        )
        for n, how in product((2, 3), ("distinct", "greedy", "chosen"))
    },
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
    "chosen tree 2x2": Case("tree, chosen", 3, 2, 1, lambda q: tree_drafts(q[0], (2, 2), "chosen")),
    "greedy tree 2x2": Case("tree, greedy", 3, 2, 1, lambda q: tree_drafts(q[0], (2, 2), "greedy")),
}
"""Small forms that are enumerated in full, every kind of `DraftTree` among them."""


# --- distributions of outputs -------------------------------------------------------------------


def node_prefixes(tree: DraftTree) -> list[Prefix]:
    """The tokens that lead to every node, the root's empty prefix first."""
    prefixes: list[Prefix] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        prefixes.append((*prefixes[parent], token))
    return prefixes


def target_rows(tree: DraftTree, p: TabularModel) -> Tensor:
    """(N+1, V) the target's distributions after every node."""
    return torch.stack([p[prefix] for prefix in node_prefixes(tree)])


def joint_distribution(p: TabularModel, prefix: Prefix, length: int) -> Tensor:
    """(V,) * length: the joint distribution of the tokens that follow a prefix."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    first = enumerate(p[prefix])
    return torch.stack([x * joint_distribution(p, (*prefix, y), length - 1) for y, x in first])


def output_distribution(
    verifier: Verifier, drafts: WeightedDrafts, p: TabularModel, length: int, q: TabularModel
) -> Tensor:
    """(V,) * length: the joint distribution of what one round emits and plain decoding then adds.

    Plain decoding draws from p, or from the target as modified by the residuals that the verifier
    has; these refer to q, the draft's model.
    """
    if verifier.residual_persists:

        def then_empty(sequence: Prefix, _: Verifier) -> WeightedDrafts:
            empty = chain_draft((), conditioned(q, sequence, 0), tail=True)
            return iter([(1.0, empty)]) if sequence else drafts

        return rounds_distribution(verifier, p, length, then_empty)[0]
    joint = torch.zeros((p[()].shape[0],) * length, dtype=torch.float64)
    for weight, tree in drafts:
        verdict, prefixes = verifier(tree, target_rows(tree, p)), node_prefixes(tree)
        for node, stop in enumerate(verdict.stop.tolist()):
            for mass, token in support(verdict.bonus[node]) if stop > 0 else ():
                sequence = (*prefixes[node], token)
                rest = joint_distribution(p, sequence, length - len(sequence))
                joint[sequence] += weight * stop * mass * rest
    return joint


def expected_accepted(verifier: Verifier, drafts: WeightedDrafts, p: TabularModel) -> float:
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
    p: TabularModel,
    length: int,
    draft: Callable[[Prefix, Verifier], WeightedDrafts],
) -> tuple[Tensor, float]:
    """The first `length` tokens of a decoder that runs as many rounds as it takes.

    `draft` gives all drafts after a committed prefix. What a round emits beyond `length` is cut
    off. Returns the joint distribution, (V,) * length, and the expected number of rounds.
    """
    joint = torch.zeros((p[()].shape[0],) * length, dtype=torch.float64)
    waiting: dict[tuple[Prefix, Verifier], float] = {((), verifier): 1.0}
    rounds = 0.0
    while waiting:
        # Shortest sequence first, so that equal states are merged before they are expanded.
        state = min(waiting, key=lambda pair: len(pair[0]))
        weight = waiting.pop(state)
        rounds += weight
        for sequence, after, chance in _one_round(*state, p, draft):
            if len(sequence) >= length:
                joint[sequence[:length]] += weight * chance
            else:
                waiting[sequence, after] = waiting.get((sequence, after), 0.0) + weight * chance
    return joint, rounds


def _one_round(
    sequence: Prefix,
    verifier: Verifier,
    p: TabularModel,
    draft: Callable[[Prefix, Verifier], WeightedDrafts],
) -> Iterator[tuple[Prefix, Verifier, float]]:
    for weight, tree in draft(sequence, verifier):
        prefixes = node_prefixes(tree)
        target = torch.stack([p[sequence + prefix] for prefix in prefixes])
        for chance, end in verifier.outcomes(tree, target):
            for mass, token in support(end.distribution):
                after = verifier.after(tree, target, end, token)
                yield (*sequence, *prefixes[end.node], token), after, weight * chance * mass
