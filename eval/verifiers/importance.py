"""Importance-weighted selection of one draft, then speculative sampling with its exact law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.verifiers.multi_candidate import settle
from eval.verifiers.pairs import largest
from eval.verifiers.rule import Dice, NodeRule, Siblings
from eval.verifiers.selection import Solver, selector
from eval.verifiers.single import token
from specdata.probability import leftover

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

# A drafted token has b > 0, but a product of tiny probabilities may round to 0.
SMALLEST = torch.finfo(torch.float64).tiny


def importance(solver: Solver = "truncated", s: int = 5, alphabet: int | None = None) -> NodeRule:
    """Selection by importance weights, then speculative sampling.

    Implements Khisti et al. 2025 (ICLR, arXiv:2410.18234): the canonical decomposition (Theorems 1
    and 4), the linear program, its truncation (Algorithm 2), its variant without sorting (appendix
    G.1), drafts of different laws (appendix I), more than two drafts (Remark 3), the truncated
    alphabet. Paper symbols: target q and draft p there. Luce selection is ours. Lossless for
    independent drafts, each with its own law, because b is computed from the weights in use.

    Acceptance is sum_x min(p, b), plus, where the selection is not optimal, the part of the
    residual that falls on a drafted token: the walk goes on below that token.

    Args:
        solver: "lp" is the optimum for two drafts, for vocabularies of some hundred tokens;
            "truncated" is Algorithm 2 or a softer filling, whichever accepts more, over at most
            512 likely tokens and groups of others; "truncated_nosort" is appendix G.1, over the
            same; "luce" is near the optimum for any K and V.
        s: tokens whose pairs are optimised by the truncated solvers (the paper uses 5).
        alphabet: select among the drafts that are one of this many most likely tokens of p (the
            paper uses 40). Unlike the paper, whose second coin ignores drafts outside, the
            selected token is then tested against the whole of p, which never accepts less.

    Raises:
        ValueError: for an unknown solver, s < 1 or alphabet < 1.
    """
    select = selector(solver, s)
    if alphabet is not None and not (isinstance(alphabet, int) and alphabet >= 1):
        raise ValueError(f"alphabet must be None or a whole number from 1, got {alphabet!r}")

    def rule(p: Tensor, siblings: Siblings, dice: Dice) -> int | Tensor:
        tokens = siblings.tokens
        if len(tokens) == 1:
            return token(p, siblings, dice)
        target, laws = as_law(p), as_laws(siblings.laws)
        if alphabet is None or alphabet >= len(target):
            inside, selected = list(range(len(tokens))), select(target, laws)
            weights, b = selected.weights(tokens), selected.law
        else:
            letters = largest(target, alphabet)
            inside = np.flatnonzero(np.isin(tokens, letters)).tolist()
            if not inside:
                return settle(p, tokens, dice)
            selected = select(target[letters], _on_letters(letters, [laws[i] for i in inside]))
            weights = selected.weights([int((letters == tokens[i]).argmax()) for i in inside])
            b = np.zeros_like(target)
            b[letters] = selected.law
        chosen = inside[dice.pick(weights)]
        x = tokens[chosen]
        if dice.flip(float(target[x]) / max(float(b[x]), SMALLEST)):
            return chosen
        residual = leftover(torch.from_numpy(target), torch.from_numpy(b))
        return settle(residual.to(p.device), tokens, dice)

    return rule


def as_law(law: Tensor) -> Array:
    """(V,) a law as float64 that sums to 1: b is a difference of nearly equal sums elsewhere."""
    exact: Array = (law.detach().double() / law.detach().sum(dtype=torch.float64)).cpu().numpy()
    return exact


def as_laws(laws: Sequence[Tensor]) -> list[Array]:
    """The same for every draft; drafts that share a law share the array."""
    distinct: list[tuple[Tensor, Array]] = []
    shared = []
    for law in laws:
        known = [array for seen, array in distinct if _same(seen, law)]
        if not known:
            known = [as_law(law)]
            distinct.append((law, known[0]))
        shared.append(known[0])
    return shared


def _same(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def _on_letters(letters: Ids, laws: Sequence[Array]) -> list[Array]:
    """The laws of drafts that lie on the letters; drafts that share a law still do."""
    parts = {id(law): law[letters] / law[letters].sum() for law in laws}
    return [parts[id(law)] for law in laws]
