"""Drafts out of the text itself: what followed its last tokens where they stood before."""

from __future__ import annotations

import sys

import torch

from eval.drafting.drafters import Drafter, drawn_chain
from eval.drafts import DraftTree
from eval.rounds import Round
from eval.runtime.batches import ForwardCoroutine


class LookupDrafter(Drafter):
    """Proposes what followed the last n committed tokens at their latest earlier occurrence.

    Prompt lookup decoding (Saxena 2023; Yang et al. 2023, arXiv:2304.04487). Where the n tokens are
    new, another drafter proposes, or nothing is drafted. A lookup is a function of committed tokens
    alone, so each of its tokens was drawn from a distribution in which it is certain.

    Args:
        count: most tokens of a lookup.
        match: the number n of tokens that must have stood before.
        vocabulary: V of the distributions, which are made on `device`.
        other: the other drafter.
    """

    def __init__(
        self,
        count: int,
        match: int,
        vocabulary: int,
        device: torch.device,
        end_tokens: frozenset[int],
        other: Drafter | None,
    ) -> None:
        super().__init__((), end_tokens)
        self._drafts = other._drafts if other else []
        self._count, self._match = count, match
        self._vocabulary, self._device = vocabulary, device
        self._other = other
        self._forget()

    def _forget(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n tokens -> the place after the latest
        self._indexed = self._match  # the first place that is not in it
        self._last: Drafter | None = None  # what made the last draft, if it was no lookup

    def reach(self, length: int) -> int:
        """No limit: the tokens are the text's, wherever the other drafter's model ends."""
        return sys.maxsize

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a chain of tokens of the text, or what the other drafter proposes."""
        for place in range(self._indexed, len(committed)):
            self._after[tuple(committed[place - self._match : place])] = place
        self._indexed = max(self._indexed, len(committed))
        start = self._after.get(tuple(committed[-self._match :])) if max_depth else None
        self._last = self._other if start is None else None
        if self._last is not None:
            most = min(max_depth, self._last.reach(len(committed)))
            return (yield from self._last.propose(committed, most, generator))
        if start is None:
            return drawn_chain([], [], 0)
        tokens: list[int] = []
        while len(tokens) < min(self._count, max_depth):
            place = start + len(tokens)  # a repetition goes on in what is drafted
            known = place < len(committed)
            tokens.append(committed[place] if known else tokens[place - len(committed)])
            if tokens[-1] in self._end_tokens:
                break
        certain = torch.zeros(len(tokens), self._vocabulary, device=self._device)
        certain[range(len(tokens)), tokens] = 1.0
        return drawn_chain(tokens, list(certain), len(tokens))

    def accept(self, nodes: list[int]) -> None:
        """Tell the other drafter, if it made the draft; a lookup is in no cache."""
        if self._last is not None:
            self._last.accept(nodes)

    def observe(self, record: Round) -> None:
        """Show the other drafter the rounds in which it drafted."""
        if self._last is not None:
            self._last.observe(record)

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._forget()
