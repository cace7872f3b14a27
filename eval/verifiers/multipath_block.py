"""Block verification of a path that is selected, position by position, from several rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.block import block
from eval.verifiers.importance import SMALLEST, as_distribution, as_distributions
from eval.verifiers.multi_candidate import follow_if_drafted
from eval.verifiers.rule import Outcome, Rng, Rule
from eval.verifiers.selection.solvers import Select, Solver, selector


def multipath_block(solver: Solver = "truncated", s: int = 5) -> Rule:
    """Selection down the paths, then block verification with the selected tokens' distributions.

    Ours: the canonical decomposition of Khisti et al. 2025 (arXiv:2410.18234) at every position,
    and Sun et al. 2025 (arXiv:2403.10444v2), Algorithm 2, along the selected path. At every depth
    one of the tokens of the paths still alive is selected, with a distribution b that is known
    exactly, and the paths with that token stay alive. The selected tokens are then a single draft
    whose distributions are the b's: which paths are alive has the same probability under p and b,
    so it cancels in every ratio.

    Where the block ends, the next token may be one that another path drafted there. Nothing below
    it has been read, so verification starts again on that path. Lossless for independent rollouts,
    each with its own distributions. With one path this is block verification, with one position
    `importance`. E[tau] >= sum_i E[r_i] of the block ratios, with equality if every selection is
    optimal.

    Args:
        solver: the selection, as in `importance`.
        s: as in `importance`.

    Raises:
        ValueError: for an unknown solver or s < 1.
    """
    select = selector(solver, s)

    def rule(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
        alive = [0]
        while True:
            groups, distributions = _selected(tree, target, rng, alive, select)
            reached, distribution = _end_of_block(tree, target, rng, groups, distributions)
            children = tree.children(groups[reached])
            if reached == len(distributions):
                return Outcome(groups[reached][0], distribution)
            tokens = [tree.token_list[child - 1] for child in children]
            outcome = follow_if_drafted(distribution, tokens, rng)
            if isinstance(outcome, Tensor):
                return Outcome(groups[reached][0], outcome)
            alive = tree.follow(children, outcome)

    return rule


def _selected(
    tree: DraftTree, target: Tensor, rng: Rng, alive: list[int], select: Select
) -> tuple[list[list[int]], list[Tensor]]:
    """Groups of nodes alive at every depth, and the distribution (V,) of each selected token."""
    groups, distributions = [alive], []
    while children := tree.children(groups[-1]):
        tokens = [tree.token_list[child - 1] for child in children]
        drafts = [tree.distribution_of(child) for child in children]
        p = target[groups[-1][0]]
        if len(tokens) == 1:
            chosen, distribution = 0, drafts[0].double()
        else:
            selection = select(as_distribution(p), as_distributions(drafts))
            chosen = rng.categorical(selection.weights(tokens))
            distribution = torch.from_numpy(selection.distribution)
        distributions.append(distribution.clamp(min=SMALLEST).to(p.device))
        groups.append(tree.follow(children, chosen))
    return groups, distributions


def _end_of_block(
    tree: DraftTree, target: Tensor, rng: Rng, groups: list[list[int]], distributions: list[Tensor]
) -> tuple[int, Tensor]:
    """Block verification of the selected path: accepted length, next token's distribution (V,)."""
    nodes = [group[0] for group in groups]
    rows = target[nodes].double()
    if not distributions:
        return 0, rows[0]
    steps = torch.arange(len(distributions))
    tokens = torch.tensor([tree.token_list[node - 1] for node in nodes[1:]])
    end = block(DraftTree(tokens, steps, torch.stack(distributions), steps, "chain"), rows, rng)
    return end.node, end.distribution
