"""Candidates for a position, one or several: `token`, `naive`, `rrs`, `rrs_wor`, `greedy_draft`.

Beside them `batch`, whose rollouts compete for the first position only.

A candidate counts as accepted whenever the emitted token equals it, also if that token was drawn
from a residual: the next position is then verified below that candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.rule import Candidates, Outcome, Rng
from specdata.probability import residual


def token(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Token verification: accept x with probability min(1, p(x)/q(x)), else draw from (p - q)+.

    Implements Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1, and Chen et al. 2023
    (arXiv:2302.01318), Algorithm 2. Lossless. Expected accepted length on a chain:
    sum_l sum_{x^l} prod_i min(p, q)(x_i | x^{i-1}).
    """
    if rng.bernoulli(candidates.p[0] / candidates.q[0]):
        return 0
    return residual(p, candidates.distributions[0])


def follow_if_drafted(distribution: Tensor, tokens: Sequence[int], rng: Rng) -> int | Tensor:
    """Draw the next token, and follow the candidate that carries it if there is one.

    The distribution (V,) must not depend on what was drafted after the candidates; of equal ones
    the first is followed.
    """
    distinct = list(dict.fromkeys(tokens))
    index = torch.tensor(distinct).to(distribution.device, non_blocking=True)
    # Zeroing and summing keeps the mass of the rest exact; 1 - sum(hit) would cancel.
    rest = distribution.index_fill(0, index, 0.0)
    chances = torch.cat([distribution[index], rest.sum().unsqueeze(0)]).tolist()
    hit, mass = rng.categorical(chances), chances[-1]
    return tokens.index(distinct[hit]) if hit < len(distinct) else rest / mass


def naive(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Naive sampling: draw y from p and follow it if it was drafted.

    Implements multi-candidate naive sampling (MCNS), the baseline of Yang et al. 2024
    (arXiv:2401.06706). Lossless whatever the candidates are, chosen ones included: they play no
    part in the draw. Acceptance for iid candidates: sum_x p(x) (1 - (1 - q(x))^K).
    """
    return follow_if_drafted(p, candidates.tokens, rng)


def rrs(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Recursive rejection: test candidates in turn, each against the residual of those before it.

    Implements SpecInfer (Miao et al. 2023, arXiv:2305.09781, Algorithm 2) and Yang et al. 2024
    (arXiv:2401.06706), Algorithm 1. Lossless for independent candidates, each with its own
    distribution: every step is token verification of a fresh draft, with the residual as its
    target. Acceptance: 1 - prod_k TV(p^k, q_k), with p^1 = p and p^(k+1) = norm((p^k - q_k)+).
    """
    for index, (x, q) in enumerate(zip(candidates.tokens, candidates.distributions, strict=True)):
        chance = float(p[x]) if index else candidates.p[0]
        if rng.bernoulli(chance / candidates.q[index]):
            return index
        p = residual(p, q)
    return p


def rrs_wor(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Recursive rejection of candidates drawn without replacement.

    Implements Yang et al. 2024 (arXiv:2401.06706), Algorithm 2. Candidate k was drawn from q with
    the earlier ones removed, and is verified against that distribution. Lossless. Where q has fewer
    than K tokens the draft is shorter, and the next token comes from the residual after its last.
    """
    q = candidates.distributions[0]
    for index, x in enumerate(candidates.tokens):
        if rng.bernoulli(float(p[x]) / float(q[x])):
            return index
        p = residual(p, q)
        q = _without(q, [x])
    return p


def greedy_draft(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """Greedy drafts: the K-1 most likely candidates, and one drawn from the rest of q.

    Implements the greedy draft sampling of Hu et al. 2025 (ICLR, "Towards optimal multi-draft
    speculative decoding"). The last candidate goes through token verification against its own
    distribution q' = norm(q outside T), T being the set of the others; a token drawn from the
    residual is accepted if it lies in T. Lossless for any T that was fixed before the last draw.
    Acceptance: P(T) + sum_{x not in T} min(p, q').
    """
    *best, x = candidates.tokens
    q = _without(candidates.distributions[0], best)
    if not float(q[x]) > 0:  # nothing was left to draw from: every candidate was chosen
        return follow_if_drafted(p, candidates.tokens, rng)
    if rng.bernoulli(float(p[x]) / float(q[x])):
        return len(best)
    return follow_if_drafted(residual(p, q), candidates.tokens, rng)


def _without(q: Tensor, tokens: Sequence[int]) -> Tensor:
    """(V,) q with some tokens removed, normalised; all zeros if nothing is left."""
    rest = q.index_fill(0, q.new_tensor(list(tokens)).long(), 0.0)
    mass = rest.sum()
    return rest / mass if float(mass) > 0 else rest


def batch(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Recursive rejection over the first tokens, then token verification of the accepted rollout.

    Implements Yin et al. 2024 (NeurIPS, arXiv:2411.00841), Algorithm 4. Paper symbols: the paper's
    q is the target p here and its p the draft q. Lossless. A rollout that merely shares a prefix
    with the accepted one is not used again. Its expected number of rejections is Theorem 3
    (benchmarks/papers/theory.py); here a round that accepts a whole rollout adds a token drawn
    from p.
    """
    node, children, rule = 0, tree.children_of[0], rrs
    chances = tree.chances(target, tree.parent_list)
    while children:
        outcome = rule(target[node], Candidates.of(tree, children, chances), rng)
        if isinstance(outcome, Tensor):
            return Outcome(node, outcome)
        node, rule = children[outcome], token
        children = tree.children_of[node]
    return Outcome(node, target[node])
