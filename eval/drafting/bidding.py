"""Chains whose length is decided for a whole batch at a time: the drafter of a shared budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import DraftedToken, UpcomingToken
from eval.drafting.stopping.estimates import SurvivalEstimate
from eval.drafting.stopping.rule import ActiveRule
from eval.drafting.tree_builder import drawn_chain
from eval.drafts import DraftTree
from eval.rounds import Round
from eval.runtime.budget import Bid
from eval.runtime.sequence import CachedSequence, ForwardCoroutine
from specdata.probability import draw_one


class BiddingDrafter(ChainDrafter):
    """Drafts one path, and bids for each of its tokens twice.

    The first bid is made before the draft's forward for the token, from the tokens so far; the
    second before the token is drawn, from its distribution as well. A token that was drawn is kept,
    so that the draft's length is a stopping time: see `eval.runtime.budget`.

    Args:
        sequence: the draft model's.
        estimate: how likely the draft survives.
        limit: most tokens drafted.
        end_tokens: token ids after which nothing is drafted.
        observe: shown each finished round.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        estimate: SurvivalEstimate,
        limit: int,
        end_tokens: frozenset[int],
        observe: Callable[[Round], None],
    ) -> None:
        super().__init__(sequence, ActiveRule(limit, _no_rule, observe), end_tokens)
        self._estimate = estimate

    def propose(
        self, committed: list[int], max_depth: int, generator: torch.Generator
    ) -> ForwardCoroutine[DraftTree]:
        """Draft a chain while bids are admitted."""
        sequence, estimate = self._sequence, self._estimate
        estimate.begin()
        uncached, survival = committed[sequence.length :], 1.0
        planned = min(max_depth, self._rule.longest)
        tokens: list[int] = []
        distributions: list[Tensor] = []
        while len(tokens) < planned:
            place, since = len(tokens), self._since_rejection + len(tokens)
            if not (yield Bid(survival, place, known=False)):
                break
            logits = yield sequence.append(uncached, 1)
            distribution, state = sequence.distribution(logits[0]), sequence.hidden
            upcoming = UpcomingToken(distribution, state, place, since)
            if not (yield Bid(estimate.before(upcoming), place, known=True)):
                break
            token = draw_one(distribution, generator)
            tokens.append(token)
            distributions.append(distribution)
            if token in self._end_tokens:
                break
            embedding = sequence.embedding(token)
            drafted = DraftedToken(token, distribution, state, embedding, place, since)
            survival = estimate.after(drafted)
            uncached = [token]
        return drawn_chain(tokens, distributions, planned)

    def observe(self, record: Round) -> None:
        """Show the round to the estimate, too."""
        super().observe(record)
        self._estimate.observe(record)


def _no_rule() -> Callable[[DraftedToken], bool]:
    raise AssertionError("a drafter that bids asks no rule")
