"""Drafters, which propose tokens: a chain, independent paths, or a tree.

Each drafter returns a `DraftTree` with the very distributions that it drew from, and keeps its own
KV cache in step with the committed sequence. None proposes anything after a drafted end token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from eval.drafting.stopping import ActiveRule, DraftedToken
from eval.drafting.stopping.rule import Embed, Numbers
from eval.drafts import DraftTree, How, TreeShape, path_to
from eval.rounds import Round
from eval.runtime.batches import ForwardCoroutine
from eval.runtime.feeding.plain import CachedSequence
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig, draw_and_read, draw_one, draw_several


class Drafter(ABC):
    """Proposes tokens after the committed tokens of one sequence; nothing after an end token."""

    def __init__(self, sequences: Sequence[CachedSequence], end_tokens: frozenset[int]) -> None:
        self._drafts = [CachedDraft(sequence) for sequence in sequences]
        self._end_tokens = end_tokens

    @abstractmethod
    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft at most `max_depth` tokens deep. `accept` is due before the next draft.

        The cache holds all committed tokens but the last, or fewer; the generator makes every draw.
        """

    def reach(self, length: int) -> int:
        """The most tokens that it can propose after a text of so many."""
        return min(draft.sequence.reach(length) for draft in self._drafts)

    def accept(self, nodes: list[int]) -> None:
        """Commit the accepted nodes of the last draft, from the root down, and drop the others."""
        for draft in self._drafts:
            draft.accept(nodes)

    def observe(self, record: Round) -> None:  # noqa: B027 (most learn nothing)
        """Take note of a finished round."""

    def follow(self, target: CachedSequence) -> None:
        """Read the states of a target's sequence, in drafts that read any."""
        for draft in self._drafts:
            draft.sequence.follow(target)

    def set_residual_persists(self, persists: bool) -> None:
        """Keep the distributions of the last draft, as functions of the text, for its residual."""
        for draft in self._drafts:
            draft.sequence.set_residual_persists(persists)

    def reset(self) -> None:
        """Forget the sequence; what a stopping rule has measured is kept."""
        for draft in self._drafts:
            draft.reset()

    @property
    def forwards(self) -> int:
        """Forwards of drafts so far."""
        return sum(draft.sequence.forwards for draft in self._drafts)


class ChainDrafter(Drafter):
    """Drafts one path, until the stopping rule, the maximal depth or an end token ends it."""

    def __init__(
        self, sequence: CachedSequence, rule: ActiveRule, end_tokens: frozenset[int]
    ) -> None:
        super().__init__([sequence], end_tokens)
        self._sequence = sequence
        self._rule = rule

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a chain."""
        rule, sequence = self._rule, self._sequence
        rule.begin()
        uncached = committed[sequence.length :]
        planned = min(max_depth, rule.longest)
        tokens: list[int] = []
        distributions: list[Tensor] = []
        while len(tokens) < planned:
            for piece in sequence.pieces(uncached):
                logits = yield sequence.append(piece, 1, drafted=bool(tokens))
            distribution, state = sequence.distribution(logits[0]), sequence.hidden
            known = distribution, state, sequence.model.embed
            read_numbers = rule.number_reader and partial(_read, rule.number_reader, known)
            token, numbers = draw_and_read(distribution, generator, read_numbers)
            tokens.append(token)
            distributions.append(distribution)
            if token in self._end_tokens:
                break
            if rule.should_stop(DraftedToken(token, *known, numbers)):
                break
            uncached = [token]
        return drawn_chain(tokens, distributions, planned)

    def with_tail(self, draft: DraftTree, committed: list[int]) -> ForwardCoroutine[DraftTree]:
        """The same draft with the distribution after its last token, which some verifiers need."""
        uncached = [*committed, *draft.token_list][self._sequence.length :]
        for piece in self._sequence.pieces(uncached):
            drafted = min(len(draft), len(piece))
            logits = yield self._sequence.append(piece, 1, drafted=drafted)
        return replace(draft, tail=self._sequence.distribution(logits[0]))

    def accept(self, nodes: list[int]) -> None:
        """Drop what was rejected; the accepted tokens of a chain are where they belong."""
        self._sequence.keep(nodes)

    def observe(self, record: Round) -> None:
        """Show the round to the stopping rule."""
        self._rule.observe(record)


def _read(numbers: Numbers, known: tuple[Tensor, Tensor | None, Embed], token: Tensor) -> Tensor:
    """The numbers of a token (1,) that is still on the device."""
    return numbers(DraftedToken(token, *known))


class CachedDraft:
    """The nodes of the current draft that are in the cache of one draft model.

    Only nodes that get children are run, and only by the model that drafts their path. So a node
    has one number in the draft and another in a cache; node 0 is 0 in both.
    """

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence
        self.cached_number: dict[int, int] = {0: 0}

    def append(
        self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> ForwardCoroutine[Tensor]:
        """Run n nodes of the draft, whose parents are in the cache: logits (n, V).

        `tokens` and `parents` are those of nodes 1, 2, ...
        """
        logits: Tensor = yield self.sequence.append_tree(
            [tokens[node - 1] for node in nodes],
            [self.cached_number[parents[node - 1]] for node in nodes],
        )
        for node in nodes:
            self.cached_number[node] = len(self.cached_number)
        return logits

    def accept(self, nodes: Sequence[int]) -> None:
        """Commit the accepted nodes, as far as they are in the cache, and drop the others.

        The tokens of the rest are run with the committed ones when the next draft is made.
        """
        cached = takewhile(self.cached_number.__contains__, nodes)
        self.sequence.keep([self.cached_number[node] for node in cached])
        self.cached_number = {0: 0}

    def reset(self) -> None:
        """Forget the sequence and the draft."""
        self.sequence.reset()
        self.cached_number = {0: 0}


class BranchingDrafter(Drafter):
    """Drafts several candidates for a position, level by level: one forward a level.

    Args:
        widths: children of every node at depth 0, 1, ...; for paths (K, 1, 1, ...).
        shape: "paths" for independent rollouts, else "tree".
        samplings: those of the paths, one each, in place of the sequence's own.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        widths: Sequence[int],
        how: How,
        end_tokens: frozenset[int],
        *,
        shape: TreeShape = "tree",
        samplings: Sequence[SamplingConfig] = (),
    ) -> None:
        super().__init__([sequence], end_tokens)
        self._sequence, self._samplings = sequence, samplings
        self._widths, self._how, self._shape = tuple(widths), how, shape

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft as many levels as fit."""
        builder, sequence = TreeBuilder(self._how, self._shape), self._sequence
        (draft,) = self._drafts
        level = [0]
        for depth, width in enumerate(self._widths[:max_depth]):
            if depth:
                level = [node for node in level if builder.tokens[node - 1] not in self._end_tokens]
            if not level:
                break
            if depth:
                logits = yield from draft.append(level, builder.tokens, builder.parents)
            else:
                logits = yield sequence.append(committed[sequence.length :], 1)
            # Distributions of a level are made together, unless paths have samplings of their own.
            rows = logits if self._samplings else sequence.distribution(logits)
            level = self._expand(builder, level, rows, width, generator)
        return builder.tree()

    def _expand(
        self,
        builder: TreeBuilder,
        level: list[int],
        rows: Tensor,
        width: int,
        generator: torch.Generator,
    ) -> list[int]:
        """Draw the children of a level's nodes, of which rows (n, N) are; return their nodes."""
        children: list[int] = []
        for node, row in zip(level, rows, strict=True):
            if self._shape != "paths":
                index = builder.add_distribution(node, row)
                tokens = _candidates(builder.distributions[index], width, self._how, generator)
                children += builder.add(node, index, tokens)
                continue
            for number in [builder.path_numbers[node - 1]] if node else range(width):
                sampling = self._samplings[number] if self._samplings else None
                distribution = self._sequence.distribution(row, sampling) if sampling else row
                index = builder.add_distribution(node, distribution, sampling)
                token = draw_one(builder.distributions[index], generator)
                children += builder.add(node, index, [token])
        return children


def _candidates(
    distribution: Tensor, count: int, how: How, generator: torch.Generator
) -> list[int]:
    """Draw siblings from one distribution (V,), in order; "chosen" are its likeliest tokens.

    There are fewer than `count` if its support is smaller, except with "iid".
    """
    if how == "iid":
        return draw_several(distribution, count, generator)
    if how == "chosen":
        best = distribution.topk(min(count, len(distribution)))
        chances = best.values.tolist()
        if math.isnan(chances[0]):
            raise NotFiniteError
        chosen: list[int] = best.indices[: sum(chance > 0 for chance in chances)].tolist()
        return chosen
    rest, tokens = distribution.clone(), []
    if how == "greedy":
        ordered = distribution.sort(descending=True, stable=True)
        likely = zip(
            ordered.indices[: count - 1].tolist(), ordered.values[: count - 1].tolist(), strict=True
        )
        tokens = [token for token, chance in likely if chance > 0]
        rest[tokens] = 0.0
        count = len(tokens) + 1
    count = min(count, len(tokens) + int(rest.count_nonzero()))
    while len(tokens) < count:
        tokens.append(draw_one(rest, generator))
        rest[tokens[-1]] = 0.0
    return tokens


class TreeBuilder:
    """A draft tree to which nodes are added, parents before their children; it needs no check."""

    def __init__(self, how: How, shape: TreeShape) -> None:
        self.tokens: list[int] = []  # of node i + 1
        self.parents: list[int] = []  # the node that node i + 1 follows
        self.path_numbers: list[int] = []  # the path that node i + 1 is on, by its first node
        self.distributions: list[Tensor] = []  # the distinct ones (V,) that tokens were drawn from
        self._how, self._shape = how, shape
        self._distribution_index: list[int] = []
        self._index_of: dict[Hashable, int] = {}

    def add_distribution(self, parent: int, distribution: Tensor, source: Hashable = None) -> int:
        """The index of the distribution that children of a node are to be drawn from.

        Paths with the same tokens so far continue from one distribution (V,), the first that was
        given: rows that differ by rounding would leave a token recorded with another distribution
        than the one that its competitors were drawn from. `source` is what made it, where paths of
        one tree have samplings of their own.
        """
        path = path_to(self.parents, parent)
        prefix = tuple(self.tokens[step - 1] for step in path)
        key = prefix if self._shape == "paths" else (parent,), source
        if key not in self._index_of:
            self._index_of[key] = len(self.distributions)
            self.distributions.append(distribution)
        return self._index_of[key]

    def add(self, parent: int, distribution: int, tokens: list[int]) -> list[int]:
        """Add children that were drawn from the distribution of that index; return their nodes."""
        first = len(self.tokens) + 1
        for token in tokens:
            number = self.path_numbers[parent - 1] if parent else len(self.path_numbers)
            self.path_numbers.append(number)
            self.tokens.append(token)
            self.parents.append(parent)
            self._distribution_index.append(distribution)
        return list(range(first, first + len(tokens)))

    def tree(self) -> DraftTree:
        """The finished draft; an empty chain if no node was added."""
        if not self.tokens:
            return drawn_chain([], [], 0)
        return DraftTree(
            torch.tensor(self.tokens),
            torch.tensor(self.parents),
            torch.stack(self.distributions),
            torch.tensor(self._distribution_index),
            self._shape,
            self._how,
        )


def drawn_chain(tokens: list[int], distributions: list[Tensor], planned: int) -> DraftTree:
    """A chain of L tokens that were just drawn, without the checks of `DraftTree.chain`.

    Of the distribution (V,) of each; `planned` is the length that it was to have, at least L.
    """
    order, ids = torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)
    stacked = torch.stack(distributions) if distributions else torch.empty(0, 0)
    return DraftTree(ids, order, stacked, order, "chain", planned=planned)
