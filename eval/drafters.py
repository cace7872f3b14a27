"""What proposes tokens: today one chain; each returns a `DraftTree` with the laws it drew from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eval.cached import CachedModel
from eval.drafts import DraftTree
from eval.stopping import Step, StoppingRule
from specdata.probability import draw


class Drafter(Protocol):
    """Proposes tokens after a committed text."""

    model: CachedModel

    def propose(self, text: list[int], room: int, generator: torch.Generator) -> DraftTree:
        """Draft at most `room` tokens deep after `text`; nothing after a drafted end token."""


class ChainDrafter:
    """One path, until the stopping rule, the room or an end token ends it.

    Args:
        model: the draft.
        rule: when to stop.
        ends: token ids after which nothing is drafted.
    """

    def __init__(self, model: CachedModel, rule: StoppingRule, ends: frozenset[int]) -> None:
        self.model = model
        self._rule = rule
        self._ends = ends

    def propose(self, text: list[int], room: int, generator: torch.Generator) -> DraftTree:
        """Draft a chain. The cache must hold a prefix of `text`, and holds one after."""
        stop = self._rule.begin()
        unseen = text[self.model.length :]
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < min(room, self._rule.limit):
            law = self.model.feed(unseen, rows=1)[0]
            token = int(draw(law, generator))
            tokens.append(token)
            laws.append(law)
            if token in self._ends or stop(Step(token, law, self.model.state)):
                break
            unseen = [token]
        return chain(tokens, laws)


def chain(tokens: list[int], laws: list[Tensor]) -> DraftTree:
    """A chain whose tokens were just drawn from `laws`, so nothing needs a check."""
    steps = torch.arange(len(tokens))
    stacked = torch.stack(laws) if laws else torch.empty(0, 0)
    return DraftTree(torch.tensor(tokens, dtype=torch.long), steps, stacked, steps, "chain")
