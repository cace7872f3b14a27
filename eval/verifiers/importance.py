"""Importance-weighted selection of one draft, then speculative sampling from its distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eval.verifiers.multi_candidate import follow_if_drafted, token
from eval.verifiers.rule import Candidates, NodeRule, Rng, remembered
from eval.verifiers.selection.pairs import Array, largest
from eval.verifiers.selection.solvers import Solver, selector
from specdata.probability import residual

# A drafted token has b > 0, but a product of tiny probabilities may round to 0.
SMALLEST = torch.finfo(torch.float64).tiny


def importance(solver: Solver = "truncated", s: int = 5, alphabet: int | None = None) -> NodeRule:
    """Selection by importance weights, then speculative sampling.

    Implements Khisti et al. 2025 (ICLR, arXiv:2410.18234): the canonical decomposition (Theorems 1
    and 4), the linear program, its truncation (Algorithm 2), its variant without sorting (appendix
    G.1), drafts of different distributions (appendix I), more than two drafts (Remark 3), the
    truncated alphabet. Paper symbols: target q and draft p there. Luce selection is ours. Lossless
    for independent drafts, each with its own distribution, because b, the distribution of the
    selected token, is computed exactly from the weights in use.

    Acceptance is sum_x min(p, b), plus, where the selection is not optimal, the part of the
    residual that falls on a drafted token: the walk goes on below that token.

    Args:
        solver: "lp" is the optimum for two drafts, for vocabularies of some hundred tokens;
            "truncated" is Algorithm 2 or a softer filling, whichever accepts more, over at most
            512 likely tokens and groups of others; "truncated_nosort" is appendix G.1, over the
            same; "luce" is near the optimum for any K and V.
        s: tokens whose pairs are optimised by the truncated solvers (the paper uses 5).
        alphabet: select among the drafts that are one of this many most likely tokens of p (the
            paper uses 40). The paper's acceptance test ignores drafts outside; here the selected
            token is tested against the whole of p, which never accepts less.
    """
    select = selector(solver, s)
    if alphabet is not None and not (isinstance(alphabet, int) and alphabet >= 1):
        raise ValueError(f"alphabet must be None or a whole number from 1, got {alphabet!r}")

    @remembered
    def fitted(p: Tensor, candidates: Candidates) -> tuple[list[int], list[float], Array, Array]:
        """Drafts to select from, the weight of each, p and b (V,)."""
        tokens = candidates.tokens
        target, distributions = as_distribution(p), as_distributions(candidates.distributions)
        if alphabet is None or alphabet >= len(target):
            selected = select(target, distributions)
            inside = list(range(len(tokens)))
            return inside, selected.weights(tokens), target, selected.distribution
        likely, b = largest(target, alphabet), np.zeros_like(target)
        inside = np.flatnonzero(np.isin(tokens, likely)).tolist()
        if not inside:
            return [], [], target, b
        # Conditional on the likely tokens; drafts that share one array go on sharing one.
        drafts = [distributions[i] for i in inside]
        parts = {id(each): each[likely] / each[likely].sum() for each in drafts}
        selected = select(target[likely], [parts[id(each)] for each in drafts])
        b[likely] = selected.distribution
        places = [int((likely == tokens[i]).argmax()) for i in inside]
        return inside, selected.weights(places), target, b

    def rule(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
        tokens = candidates.tokens
        if len(tokens) == 1:
            return token(p, candidates, rng)
        inside, weights, target, b = fitted(p, candidates)
        if not inside:
            return follow_if_drafted(p, tokens, rng)
        selected = inside[rng.categorical(weights)]
        x = tokens[selected]
        if rng.bernoulli(float(target[x]) / max(float(b[x]), SMALLEST)):
            return selected
        rest = residual(torch.from_numpy(target), torch.from_numpy(b))
        return follow_if_drafted(rest.to(p.device), tokens, rng)

    return rule


def as_distribution(distribution: Tensor) -> Array:
    """A distribution (V,) as a float64 array that sums to 1 in that precision.

    Later steps subtract nearly equal sums, so the rounding of single precision would show.
    """
    exact = distribution.detach().double() / distribution.detach().sum(dtype=torch.float64)
    array: Array = exact.cpu().numpy()
    return array


def as_distributions(distributions: Sequence[Tensor]) -> list[Array]:
    """`as_distribution` of every draft, (V,); drafts with equal distributions share one array."""
    arrays: list[Array] = []
    for index, distribution in enumerate(distributions):
        equal = (
            array
            for seen, array in zip(distributions[:index], arrays, strict=True)
            if seen.data_ptr() == distribution.data_ptr() or torch.equal(seen, distribution)
        )
        shared = next(equal, None)
        arrays.append(as_distribution(distribution) if shared is None else shared)
    return arrays
