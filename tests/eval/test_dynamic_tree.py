"""Dynamic trees: the most probable continuations, found with one forward of the draft a level."""

import math
from functools import cache

import pytest
import torch

from eval.decoder import DecodeConfig
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from eval.drafts import DraftTree
from eval.runtime.batches import drive
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from specdata.probability import SamplingConfig
from tests.support.branching import greedy_rounds
from tests.support.tiny import END, tiny_llama

VOCABULARY = 6
SAMPLER = SamplingConfig(temperature=0.2, top_p=0.9)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [
        tuple(tree.token_list[node - 1] for node in tree.path_to(last))
        for last in range(1, len(tree) + 1)
    ]


@cache
def path_probabilities(committed: tuple[int, ...], depth: int) -> dict[tuple[int, ...], float]:
    """Every path of at most `depth` tokens that no end token is followed on."""
    draft = tiny_llama(1, vocab=VOCABULARY)
    found = {(): 1.0}
    for length in range(depth):
        for prefix in [path for path in found if len(path) == length and END not in path]:
            after = draft(input_ids=torch.tensor([[*committed, *prefix]])).logits[0, -1].softmax(-1)
            found |= {(*prefix, x): found[prefix] * p for x, p in enumerate(after.tolist())}
    return {path: value for path, value in found.items() if path}


def drafted(committed: list[int], room: int = 9, **settings: float) -> tuple[DraftTree, int]:
    model = CachedModel(tiny_llama(1, vocab=VOCABULARY), VOCABULARY)
    config = {"nodes": 5, "depth": 3, "gain": 0.0} | settings
    drafter = DynamicTreeDrafter(
        sequence_of(model, 0, SAMPLER),
        int(config["nodes"]),
        int(config["depth"]),
        config["gain"],
        frozenset([END]),
    )
    with torch.inference_mode():
        tree = drive(drafter.propose(committed, room, torch.Generator()))
    return tree.checked(), drafter.forwards


@pytest.mark.parametrize("nodes", [1, 3, 8, 20])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_dynamic_tree_holds_the_most_probable_paths_of_all(nodes: int, depth: int) -> None:
    """Under the draft's own distribution, whatever the sampler: ranked by enumeration."""
    with torch.inference_mode():
        for committed in ([2, 3], [4, 1, 5], [3]):
            ranked = path_probabilities(tuple(committed), depth)
            best = sorted(ranked, key=lambda path: -ranked[path])[:nodes]
            tree, forwards = drafted(committed, nodes=nodes, depth=depth)
            assert sorted(paths_of(tree)) == sorted(best)
            assert tree.kind == "tree, chosen"
            assert forwards <= depth


def test_a_level_is_added_while_the_last_ones_nodes_are_worth_the_gain_together() -> None:
    with torch.inference_mode():
        for committed in ([2, 3], [4, 1, 5], [3], [5, 5]):
            ranked = path_probabilities(tuple(committed), 1)
            first = sorted(ranked.values(), reverse=True)[:5]
            goes_on = [v for p, v in ranked.items() if v in first and p[-1] != END]
            worth = math.fsum(goes_on)
            assert drafted(committed, gain=worth * 1.001)[1] == 1
            assert drafted(committed, gain=worth * 0.999, depth=2)[1] == 2


def test_no_dynamic_tree_is_deeper_than_there_is_room() -> None:
    for room in (0, 1, 2):
        assert drafted([2, 3], room=room)[0].depth == room


def test_greedy_output_with_dynamic_trees_is_that_of_generate_in_fewer_forwards() -> None:
    """At temperature 0, too, the draft has second candidates: more are accepted than of a chain."""
    tree = DecodeConfig(
        verifier="naive", drafter="dynamic_tree", nodes=12, depth=3, temperature=0.0
    )
    assert greedy_rounds(tree) < greedy_rounds(DecodeConfig(length=3, temperature=0.0))
