"""What proposes tokens: a chain, independent paths, or a tree.

Each returns a `DraftTree` with the very distributions that it drew from, and keeps its own cache in step
with the committed text. No drafter proposes anything after a drafted end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from eval.drafting.stopping import ActiveRule, DraftedToken
from eval.drafting.tree_builder import TreeBuilder, chain
from eval.drafts import DraftTree, How, TreeShape
from eval.rounds import Round
from eval.runtime.sequence import CachedSequence, ForwardCoroutine
from specdata.probability import SamplingConfig, draw_one, draw_several


class Drafter(Protocol):
    """Proposes tokens after the committed text of one decoding."""

    def propose(
        self, text: list[int], room: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft at most `room` tokens deep after `text`, of which the cache holds a prefix."""

    def with_tail(self, draft: DraftTree, text: list[int]) -> ForwardCoroutine[DraftTree]:
        """The same draft with the distribution after its last token, for a verifier that needs it."""

    def accept(self, nodes: list[int], committed: int) -> None:
        """Keep the accepted nodes, so that the cache holds a prefix of `committed` tokens."""

    def observe(self, record: Round) -> None:
        """Take note of a finished round."""

    def reset(self) -> None:
        """Forget the text; what a stopping rule has learnt of times stays."""

    @property
    def forwards(self) -> int:
        """Forwards of drafts so far."""


class ChainDrafter:
    """One path, until the stopping rule, the room or an end token ends it.

    Args:
        text: the draft's.
        rule: when to stop.
        ends: token ids after which nothing is drafted.
    """

    def __init__(self, text: CachedSequence, rule: ActiveRule, ends: frozenset[int]) -> None:
        self._text = text
        self._rule = rule
        self._ends = ends

    def propose(
        self, text: list[int], room: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a chain."""
        stop = self._rule.begin()
        mine = self._text
        unseen = text[mine.length :]
        planned = min(room, self._rule.longest)
        tokens: list[int] = []
        distributions: list[Tensor] = []
        while len(tokens) < planned:
            logits = yield mine.append(unseen, 1)
            distribution = mine.distribution(logits[0])
            token = draw_one(distribution, generator)
            tokens.append(token)
            distributions.append(distribution)
            if token in self._ends or stop(DraftedToken(token, distribution, mine.state)):
                break
            unseen = [token]
        return chain(tokens, distributions, planned)

    def with_tail(self, draft: DraftTree, text: list[int]) -> ForwardCoroutine[DraftTree]:
        """Run the draft once more, over what it has not seen of text and draft."""
        unseen = [*text, *draft.token_list][self._text.length :]
        logits = yield self._text.append(unseen, 1)
        tail = self._text.distribution(logits[0])
        return chain(draft.token_list, list(draft.distributions), draft.planned or 0, tail)

    def accept(self, nodes: list[int], committed: int) -> None:
        """The chain is part of the text already; drop what was rejected."""
        self._text.crop(committed)

    def observe(self, record: Round) -> None:
        """Show it to the stopping rule."""
        self._rule.observe(record)

    def reset(self) -> None:
        """Forget the text."""
        self._text.reset()

    @property
    def forwards(self) -> int:
        """Forwards of the draft so far."""
        return self._text.forwards


@dataclass(frozen=True, slots=True)
class Path:
    """How one of several paths is drafted.

    Args:
        text: of the draft that drafts it; paths may share one.
        sampling: the warp of its distributions, if not the text's own.
    """

    text: CachedSequence
    sampling: SamplingConfig | None = None


class BranchingDrafter:
    """Several candidates for a place, drafted level by level, a level in one forward a draft.

    Args:
        paths: for a tree one; for paths one of each, or one that all share.
        widths: children of every node at depth 0, 1, ...; for paths (K, 1, 1, ...).
        how: how siblings are drawn.
        ends: token ids after which nothing is drafted.
        shape: "paths" for independent rollouts, else "tree".
    """

    def __init__(
        self,
        paths: Sequence[Path],
        widths: Sequence[int],
        how: How,
        ends: frozenset[int],
        *,
        shape: TreeShape = "tree",
    ) -> None:
        self._paths = list(paths) * (widths[0] if len(paths) == 1 else 1)
        self._texts = list({id(path.text): path.text for path in paths}.values())
        # Distributions of a level are made together unless paths warp them differently.
        self._warped = any(path.sampling is not None for path in paths)
        self._widths = tuple(widths)
        self._how = how
        self._ends = ends
        self._shape = shape

    def propose(
        self, text: list[int], room: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft as many levels as fit."""
        widths = self._widths[:room]
        builder = TreeBuilder(self._how, self._shape)
        # Only nodes that get children are fed; numbering in a cache is that of feeding.
        self._fed: list[dict[int, int]] = [{0: 0} for _ in self._texts]
        level = [0]
        for depth, width in enumerate(widths):
            if depth:
                level = [node for node in level if builder.tokens[node - 1] not in self._ends]
            if not level:
                break
            scores = yield from self._score(builder, level, text)
            level = self._expand(builder, level, scores, width, generator)
        return builder.tree()

    def _score(
        self, builder: TreeBuilder, level: list[int], text: list[int]
    ) -> ForwardCoroutine[dict[tuple[int, int], Tensor]]:
        """Distributions (logits, if paths warp them) by the draft that scores a node and the node."""
        found = {}
        for index, mine in enumerate(self._texts):
            if level == [0]:
                logits = yield mine.append(text[mine.length :], 1)
                found[index, 0] = (logits if self._warped else mine.distribution(logits))[0]
                continue
            own = [node for node in level if self._paths[builder.path[node - 1]].text is mine]
            if not own:
                continue
            fed = self._fed[index]
            for node in own:
                fed[node] = len(fed)
            parents = [fed[builder.parents[node - 1]] for node in own]
            logits = yield mine.append_tree([builder.tokens[node - 1] for node in own], parents)
            rows = logits if self._warped else mine.distribution(logits)
            found |= {(index, node): row for node, row in zip(own, rows, strict=True)}
        return found

    def _expand(
        self,
        builder: TreeBuilder,
        level: list[int],
        scores: dict[tuple[int, int], Tensor],
        width: int,
        generator: torch.Generator,
    ) -> list[int]:
        """Draw the next level; return its nodes."""
        children: list[int] = []
        for node in level:
            if self._shape == "paths":
                paths = [builder.path[node - 1]] if node else range(len(self._paths))
                for number in paths:
                    path = self._paths[number]
                    index = self._texts.index(path.text)
                    distribution = scores[index, node]
                    if self._warped:
                        distribution = path.text.distribution(distribution, path.sampling)
                    known = builder.distribution(node, distribution, (index, path.sampling))
                    token = draw_one(builder.distributions[known], generator)
                    children += builder.add(node, known, [token])
            else:
                known = builder.distribution(node, scores[0, node])
                tokens = _candidates(builder.distributions[known], width, self._how, generator)
                children += builder.add(node, known, tokens)
        return children

    def with_tail(self, draft: DraftTree, text: list[int]) -> ForwardCoroutine[DraftTree]:
        """No verifier of branching drafts carries a residual."""
        raise ValueError("a branching draft has no distribution after its last token")

    def accept(self, nodes: list[int], committed: int) -> None:
        """Move the accepted path together and drop the rest."""
        for text, fed in zip(self._texts, self._fed, strict=True):
            # Another draft's nodes are not there: it reads them with the text, next round.
            text.accept([fed[node] for node in takewhile(fed.__contains__, nodes)])

    def observe(self, record: Round) -> None:
        """The number of nodes is fixed."""

    def reset(self) -> None:
        """Forget the text."""
        for text in self._texts:
            text.reset()

    @property
    def forwards(self) -> int:
        """Forwards of all drafts so far."""
        return sum(text.forwards for text in self._texts)


def _candidates(
    distribution: Tensor, count: int, how: How, generator: torch.Generator
) -> list[int]:
    """Draw siblings from one distribution; fewer than `count` if its support is smaller (not for iid)."""
    if how == "iid":
        return draw_several(distribution, count, generator)
    rest, tokens = distribution.clone(), []
    if how == "greedy":
        best = distribution.sort(descending=True, stable=True).indices[: count - 1].tolist()
        tokens = [token for token in best if distribution[token] > 0]
        rest[tokens] = 0.0
        count = len(tokens) + 1
    while len(tokens) < count and bool((rest > 0).any()):
        tokens.append(draw_one(rest, generator))
        rest[tokens[-1]] = 0.0
    return tokens
