"""Drafts: their shapes and kinds, and the errors for bad ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eval.drafts import DraftTree

Q2 = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens)


# --- shapes ---


def test_paths_branch_at_the_root_only_and_are_never_merged() -> None:
    q = Q2.expand(3, 2, 3)
    tree = DraftTree.paths(torch.tensor([[0, 2], [0, 1], [1, 2]]), q)
    assert tree.children_of == [[1, 3, 5], [2], [], [4], [], [6], []]
    assert tree.kind == "paths, iid"
    assert tree.follow([1, 3, 5], 1) == [1, 3]


def test_distributions_that_differ_where_paths_compete_make_them_independent() -> None:
    other = torch.tensor([[0.4, 0.6, 0.0], [0.2, 0.3, 0.5]])
    tokens = torch.tensor([[0, 2], [0, 1]])
    assert DraftTree.paths(tokens, torch.stack([Q2, other])).kind == "paths, independent"
    deep = torch.stack([Q2, torch.stack([Q2[0], torch.tensor([0.2, 0.5, 0.3])])])
    assert DraftTree.paths(tokens, deep).kind == "paths, independent"
    # The second tokens follow different first ones, so they never compete.
    apart = torch.tensor([[0, 2], [1, 1]])
    assert DraftTree.paths(apart, deep).kind == "paths, iid"


def test_the_same_distribution_up_to_rounding_is_one_distribution() -> None:
    tokens = torch.tensor([[0, 2], [0, 1]])
    q = torch.stack([Q2, Q2 * (1 + 4e-16)])
    assert DraftTree.paths(tokens, q).kind == "paths, iid"
    rounded = torch.stack([Q2, Q2 * (1 + 1e-6)]).float()
    assert DraftTree.paths(tokens, rounded).kind == "paths, iid"
    assert DraftTree.paths(tokens, torch.stack([Q2, Q2 + 1e-8])).kind == "paths, independent"


def test_distributions_of_many_small_probabilities_that_differ_as_a_whole_are_not_merged() -> None:
    half = torch.full((131072,), 1 / 131072)
    tilted = half.clone()
    tilted[::2] += 9e-7
    tilted[1::2] -= 9e-7
    draft = DraftTree.siblings(torch.tensor([0, 1]), torch.stack([half, tilted]))
    assert draft.kind == "siblings, independent"


def test_a_k_configuration_is_numbered_breadth_first() -> None:
    distributions = Q2[1].expand(3, 3)
    tree = DraftTree.tree((2, 2), ids(0, 1, 2, 2, 1, 0), distributions)
    assert tree.children_of == [[1, 2], [3, 4], [5, 6], [], [], [], []]
    assert tree.distribution_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert tree.follow([1, 2], 1) == [2]
    assert tree.depth == 2
    assert [tree.path_to(node) for node in (0, 2, 5)] == [[], [2], [2, 5]]


# --- bad ones ---

BAD: dict[str, tuple[Callable[[], DraftTree], str]] = {
    "padding": (lambda: DraftTree.chain(ids(0, -1), Q2), r"ids must lie in \[0, 3\), got -1 to 0"),
    "sum": (
        lambda: DraftTree.chain(ids(0, 1), Q2 * torch.tensor([[1.0], [1.1]])),
        r"must sum to 1; row 1 is off by 0\.1: pass probabilities, not logits",
    ),
    "never drawn": (
        lambda: DraftTree.chain(ids(2, 0), Q2),
        "node 1 holds token 2, to which its distribution q gives probability 0:"
        " pass the distribution",
    ),
    "repeated": (
        lambda: DraftTree.siblings(ids(1, 1), Q2[1], "distinct"),
        r"distinct siblings must differ, got tokens \[1, 1\]",
    ),
    "distributions of distinct": (
        lambda: DraftTree.siblings(ids(0, 1), Q2, "distinct"),
        r"q \(K, V\) needs how='iid', not 'distinct'; give q \(V,\)",
    ),
    "order": (
        lambda: DraftTree(ids(0, 1), ids(2, 0), Q2, ids(0, 1), "tree").checked(),
        "a parent must come before its child: node 1 follows node 2",
    ),
    "not a chain": (
        lambda: DraftTree(ids(0, 1), ids(0, 0), Q2, ids(0, 0), "chain").checked(),
        r"these parents do not make a draft of form chain: children a node \[2, 0, 0\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_draft_is_refused_with_what_must_hold_and_what_was_given(name: str) -> None:
    build, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        build()
