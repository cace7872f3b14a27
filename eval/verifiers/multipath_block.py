"""Block verification of a path that is selected, position by position, from several rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.block import block
from eval.verifiers.importance import SMALLEST, as_distribution, as_distributions
from eval.verifiers.multi_candidate import follow_if_drafted
from eval.verifiers.rule import Outcome, Rng, Rule
from eval.verifiers.selection.solvers import Solver, selector


def multipath_block(solver: Solver = "truncated", s: int = 5) -> Rule:
    """Selection down the paths, then block verification with the selected tokens' distributions.

    The canonical decomposition of Khisti et al. 2025 (arXiv:2410.18234) at every position, and Sun
    et al. 2025 (arXiv:2403.10444v2), Algorithm 2, along the selected path; other ways to verify
    blocks of several drafts are arXiv:2602.16961 and arXiv:2604.25925. At every depth one of the
    tokens of the paths still alive is selected, with a distribution b that is known exactly, and
    the paths with that token stay alive. The selected tokens are then a single draft whose
    distributions are the b's: which paths are alive has the same probability under p and b, so it
    cancels in every ratio.

    Where the block ends, the next token may be one that another path drafted there. Nothing below
    it has been read, so verification starts again on that path. Lossless for independent rollouts,
    each with its own distributions. With one path this is block verification, with one position
    `importance`, whose parameters and errors it has. E[tau] >= sum_i E[r_i] of the block ratios,
    with equality if every selection is optimal.
    """
    select = selector(solver, s)

    def rule(tree: DraftTree, target: Tensor, rng: Rng) -> Outcome:
        alive = [0]
        while True:
            # 1. Select down the paths: the nodes alive at every depth, and the distribution (V,)
            # of each selected token.
            groups, distributions = [alive], list[Tensor]()
            while children := tree.children(groups[-1]):
                tokens = [tree.token_list[child - 1] for child in children]
                drafts = [tree.distribution_of(child) for child in children]
                p = target[groups[-1][0]]
                if len(tokens) == 1:
                    index, distribution = 0, drafts[0].double()
                else:
                    selection = select(as_distribution(p), as_distributions(drafts))
                    index = rng.categorical(selection.weights(tokens))
                    distribution = torch.from_numpy(selection.distribution)
                distributions.append(distribution.clamp(min=SMALLEST).to(p.device))
                groups.append(tree.follow(children, index))
            # 2. Block verification of the selected path.
            nodes = [group[0] for group in groups]
            rows = target[nodes].double()
            if not distributions:
                return Outcome(nodes[0], rows[0])
            steps = torch.arange(len(distributions))
            selected = torch.tensor([tree.token_list[node - 1] for node in nodes[1:]])
            path = DraftTree(selected, steps, torch.stack(distributions), steps, "chain")
            end = block(path, rows, rng)
            if end.node == len(distributions):
                return Outcome(nodes[end.node], end.distribution)
            # 3. Where it ends, another path may have drafted the next token.
            children = tree.children(groups[end.node])
            tokens = [tree.token_list[child - 1] for child in children]
            outcome = follow_if_drafted(end.distribution, tokens, rng)
            if isinstance(outcome, Tensor):
                return Outcome(nodes[end.node], outcome)
            alive = tree.follow(children, outcome)

    return rule
