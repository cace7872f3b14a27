"""Batch verification: several rollouts compete for the first position only."""

from __future__ import annotations

from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.multi_candidate import rrs
from eval.verifiers.rule import Candidates, Outcome, Rng
from eval.verifiers.token import token


def batch(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
    """Recursive rejection over the first tokens, then token verification of the accepted rollout.

    Implements Yin et al. 2024 (NeurIPS, arXiv:2411.00841), Algorithm 4. Paper symbols: the paper's
    q is the target p here and its p the draft q. Lossless. A rollout that merely shares a prefix
    with the accepted one is not used again. `eval.analysis.theory.batch_rejections` is its expected
    number of rejections (Theorem 3); here a round that accepts a whole rollout adds a token drawn
    from p.
    """
    node, children, rule = 0, tree.children_of[0], rrs
    while children:
        outcome = rule(target[node], Candidates.of(tree, children, target, tree.parent_list), rng)
        if isinstance(outcome, Tensor):
            return Outcome(node, outcome)
        node, rule = children[outcome], token
        children = tree.children_of[node]
    return Outcome(node, target[node])
