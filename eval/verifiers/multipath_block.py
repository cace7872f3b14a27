"""Block verification of a path that is selected, place by place, from several rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers.block import block
from eval.verifiers.importance import SMALLEST, as_law, as_laws
from eval.verifiers.multi_candidate import settle
from eval.verifiers.rule import Dice, Rule, Stop
from eval.verifiers.selection import Select, Solver, selector


def multipath_block(solver: Solver = "truncated", s: int = 5) -> Rule:
    """Selection down the paths, then block verification with the selected tokens' laws.

    Ours: the canonical decomposition of Khisti et al. 2025 (arXiv:2410.18234) at every place, and
    Sun et al. 2025 (arXiv:2403.10444v2), Algorithm 2, over the places. At every depth one of the
    tokens of the paths still alive is selected, with a law b that is known exactly, and the paths
    with that token live on. The selected tokens are then a single draft whose laws are the b's:
    which paths are alive is a coin that p and b share, so it cancels in every ratio.

    Where the block ends, the next token may be one that another path drafted there. Nothing below
    it has been looked at, so that path is verified next, afresh. Lossless for independent rollouts,
    each with its own laws. One path: block verification. One place: `importance`.
    E[tau] >= sum_i E[r_i] of the block ratios, with equality if every selection is optimal.

    Args:
        solver: the selection, as in `importance`.
        s: as in `importance`.

    Raises:
        ValueError: for an unknown solver or s < 1.
    """
    select = selector(solver, s)

    def rule(tree: DraftTree, target: Tensor, dice: Dice) -> Stop:
        alive = [0]
        while True:
            groups, laws = _selected(tree, target, dice, alive, select)
            reached, law = _end_of_block(tree, target, dice, groups, laws)
            children = tree.children(groups[reached])
            if reached == len(laws):
                return Stop(groups[reached][0], law)
            tokens = [tree.token_list[child - 1] for child in children]
            outcome = settle(law, tokens, dice)
            if isinstance(outcome, Tensor):
                return Stop(groups[reached][0], outcome)
            alive = tree.follow(children, outcome)

    return rule


def _selected(
    tree: DraftTree, target: Tensor, dice: Dice, alive: list[int], select: Select
) -> tuple[list[list[int]], list[Tensor]]:
    """The groups of paths alive at every depth, and the law of the token selected at each."""
    groups, laws = [alive], []
    while children := tree.children(groups[-1]):
        tokens = [tree.token_list[child - 1] for child in children]
        drafts = [tree.law_of(child) for child in children]
        p = target[groups[-1][0]]
        if len(tokens) == 1:
            chosen, law = 0, drafts[0].double()
        else:
            selection = select(as_law(p), as_laws(drafts))
            chosen, law = dice.pick(selection.weights(tokens)), torch.from_numpy(selection.law)
        laws.append(law.clamp(min=SMALLEST).to(p.device))
        groups.append(tree.follow(children, chosen))
    return groups, laws


def _end_of_block(
    tree: DraftTree, target: Tensor, dice: Dice, groups: list[list[int]], laws: list[Tensor]
) -> tuple[int, Tensor]:
    """Block verification of the selected path: its accepted length and the next token's law."""
    nodes = [group[0] for group in groups]
    rows = target[nodes].double()
    if not laws:
        return 0, rows[0]
    steps = torch.arange(len(laws))
    tokens = torch.tensor([tree.token_list[node - 1] for node in nodes[1:]])
    stop = block(DraftTree(tokens, steps, torch.stack(laws), steps, "chain"), rows, dice)
    return stop.node, stop.law
