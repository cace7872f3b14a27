"""Paths and trees: tree attention is exact, and every verifier keeps the distribution."""

import itertools
import math
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.drafters import BranchingDrafter
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from eval.drafting.lookup import LookupDrafter
from eval.drafts import DraftTree
from eval.runtime.batches import drive
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from eval.verifiers import VERIFIERS
from specdata import probability
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig
from tests.support.block_draft import block_draft
from tests.support.branching import SAMPLED, greedy_rounds
from tests.support.chi_square import LEVEL, p_value, power
from tests.support.decoder import PROMPT, head
from tests.support.families import tiny
from tests.support.tiny import END, joint_distribution, tiny_llama

DRAWS = 200


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_the_joint_distribution_over_rounds_is_that_of_plain_sampling(name: str) -> None:
    """Of caches and rows: the laws are enumerated. Fails by chance once in a million."""
    config = SAMPLED[name]
    target, draft = tiny_llama(0), tiny_llama(1)
    distribution = joint_distribution(target, PROMPT, 4, config.sampling)
    drafts = None if name == "plain" else draft
    decoder = SpeculativeDecoder.from_config(target, drafts, config, head())
    generator = torch.Generator().manual_seed(17)
    prompt = torch.tensor(PROMPT)
    outs = [decoder.generate(prompt, max_new_tokens=4, generator=generator) for _ in range(DRAWS)]
    assert p_value(Counter(tuple(out.tokens.tolist()) for out in outs), distribution) > LEVEL


@pytest.mark.parametrize(
    ("value", "waits"), [(float("nan"), False), (float("inf"), True)], ids=["cpu", "as a GPU"]
)
@pytest.mark.parametrize("name", SAMPLED)
def test_logits_that_are_not_finite_are_refused_with_the_models_name(
    name: str, value: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for temperature, bad in itertools.product((SAMPLED[name].temperature, 0.0), (0, 1)):
        config = SAMPLED[name].model_copy(update={"temperature": temperature})
        models = [tiny_llama(0), tiny_llama(1)][: 1 if name == "plain" else 2]
        if bad >= len(models):
            continue
        for model, called in zip(models, ("large", "small"), strict=False):
            model.config.name_or_path = called
        decoder = SpeculativeDecoder.from_config(
            models[0], models[1] if len(models) > 1 else None, config, head()
        )
        torch.nn.init.constant_(models[bad].lm_head.weight[2:], value)
        with monkeypatch.context() as changed:
            changed.setattr(probability, "read_waits", lambda _: waits)
            with pytest.raises(NotFiniteError, match=("large", "small")[bad]):
                decoder.generate(
                    torch.tensor(PROMPT), max_new_tokens=4, generator=torch.Generator()
                )


def test_so_many_draws_would_show_the_drafts_distribution() -> None:
    sampling = SamplingConfig()
    target, draft = (joint_distribution(tiny_llama(n), PROMPT, 4, sampling) for n in (0, 1))
    mixed = {s: 0.4 * target.get(s, 0.0) + 0.6 * draft.get(s, 0.0) for s in target | draft}
    assert power(target, mixed, DRAWS) > 0.99


def test_a_greedy_tree_is_the_whole_k_configuration_and_exact() -> None:
    """Of the draft's likeliest tokens, whatever the verifier; more are accepted than of a chain."""
    widths = (3, 2, 1)
    trees = [
        DecodeConfig(name, drafter="tree", widths=widths, temperature=0.0)
        for name, spec in VERIFIERS.items()
        if any(kind.startswith("tree") for kind in spec.takes)
    ]
    assert {tree.make_verifier().name for tree in trees} == {"naive"}
    tree = trees[-1]
    chain = greedy_rounds(DecodeConfig(length=len(widths), temperature=0.0))
    assert greedy_rounds(tree) < chain
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(2, vocab=40, layers=1)
    decoder = SpeculativeDecoder.from_config(target, draft, tree)
    out = decoder.generate(torch.tensor([2, 5]), max_new_tokens=24, generator=torch.Generator())
    assert max(record.drafted for record in out.rounds) == 3 + 6 + 6


@pytest.mark.parametrize(
    ("widths", "how", "shape", "temperatures"),
    [((3, 2), "iid", "tree", ()), ((3, 2), "distinct", "tree", ()), ((3, 2), "greedy", "tree", ()),
     ((3, 1, 1), "iid", "paths", ()), ((3, 1, 1), "independent", "paths", (0.5, 1.0, 2.0))],
)  # fmt: skip
def test_a_branching_draft_is_what_its_class_promises_and_no_deeper_than_allowed(
    widths: tuple[int, ...], how: Any, shape: Any, temperatures: tuple[float, ...]
) -> None:
    draft = tiny_llama(1, vocab=6)
    committed = [2, 3]
    for room in (1, 2, 5):
        for seed in range(15):
            sequence = sequence_of(CachedModel(draft, 6), 0, SamplingConfig())
            samplings = [SamplingConfig(each) for each in temperatures]
            drawn = "iid" if temperatures else how
            drafter = BranchingDrafter(
                sequence, widths, drawn, frozenset([END]), shape=shape, samplings=samplings
            )
            generator = torch.Generator().manual_seed(seed)
            with torch.inference_mode():
                tree = drive(drafter.propose(committed, room, generator)).checked()
            assert tree.kind == f"{shape}, {how}"
            assert tree.depth <= min(room, len(widths))
            for node in range(1, len(tree) + 1):
                first, *_ = path = tree.path_to(node)
                tokens = [tree.token_list[each - 1] for each in path[:-1]]
                assert END not in tokens, "nothing follows an end token"
                with torch.inference_mode():
                    logits = draft(input_ids=torch.tensor([committed + tokens])).logits[0, -1]
                temperature = temperatures[first - 1] if temperatures else 1.0
                q = (logits.float() / temperature).softmax(-1).to(tree.distributions)
                torch.testing.assert_close(tree.distribution_of(node), q, atol=1e-6, rtol=0)


def test_candidates_are_fewer_where_the_distribution_has_fewer_tokens() -> None:
    """Top-k 2 leaves two tokens: distinct and greedy siblings never include a third."""
    draft = tiny_llama(1, vocab=6)
    sampling = SamplingConfig(top_k=2)
    for how in ("distinct", "greedy"):
        sequence = sequence_of(CachedModel(draft, 6), 0, sampling)
        drafter = BranchingDrafter(sequence, (4,), how, frozenset(), shape="tree")  # type: ignore[arg-type]
        with torch.inference_mode():
            tree = drive(drafter.propose([2], 3, torch.Generator().manual_seed(0))).checked()
        assert len(tree) == 2


# --- Dynamic trees: the most probable continuations, found with one forward of the draft a level.


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


# --- A lookup is what followed the text's last tokens where they stood before, and costs no draft.


def expected(text: list[int], count: int, match: int) -> list[int]:
    """The definition: the latest earlier place, and a repetition that goes on."""
    places = [at for at in range(match, len(text)) if text[at - match : at] == text[-match:]]
    copied = list(text)
    while places and len(copied) < len(text) + count:
        copied.append(copied[places[-1] + len(copied) - len(text)])
        if copied[-1] == END:
            break
    return copied[len(text) :]


@pytest.mark.parametrize("match", [1, 2, 3])
def test_a_lookup_is_what_followed_the_latest_occurrence_of_the_last_tokens(match: int) -> None:
    """While the text grows, within the room, up to an end token, and after another text."""
    draws, found = random.Random(match), 0
    drafter = LookupDrafter(4, match, 5, torch.device("cpu"), frozenset([END]), None)
    for _ in range(20):
        drafter.reset()
        text = [draws.choice((0, 2, 3, 4))]
        while len(text) < 24:
            text += draws.choices(range(5), k=draws.randint(1, 3))
            for room in (0, 2, 9):
                tree = drive(drafter.propose(text, room, torch.Generator())).checked()
                assert tree.token_list == expected(text, min(4, room), match)
                assert tree.kind == "chain"
                found += len(tree) > 1
            drafter.accept([])
    assert found > 20


def test_greedy_text_is_that_of_generate_and_lookups_save_rounds() -> None:
    lookup = {"lookup": 4, "match": 1, "temperature": 0.0}
    alone = greedy_rounds(DecodeConfig("naive", drafter="lookup", **lookup))
    assert alone < 4 * 24
    chain = DecodeConfig("token", length=2, temperature=0.0)
    assert greedy_rounds(chain.replace(**lookup)) < greedy_rounds(chain)


LOOKUP = DecodeConfig("naive", drafter="lookup", lookup=4, temperature=0.0)
TREE = DecodeConfig("naive", drafter="dynamic_tree", nodes=4, depth=3, lookup=4, temperature=0.0)
PAIR = DecodeConfig("token", length=2, lookup=4, temperature=0.0)
PLACED = ("bloom", "mpt", "minimax_m3_vl_text")
NO_TREES = (*PLACED, pytest.param("qwen3_next", marks=pytest.mark.slow))


def looked_up(target: Any, draft: Any, config: DecodeConfig) -> None:
    """Whether a text that repeats itself is looked up in the first round, and goes on as plain."""
    target.generation_config.eos_token_id = None
    prompt, texts = torch.tensor([5, 6, 7, 8] * 14), []
    for each in (DecodeConfig(temperature=0.0), config):
        decoder = SpeculativeDecoder.from_config(target, draft if each is config else None, each)
        texts.append(decoder.generate(prompt, max_new_tokens=24, generator=torch.Generator()))
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist()
    assert texts[1].rounds[0].drafted == 4


@pytest.mark.parametrize("kind", NO_TREES)
def test_what_reads_no_tree_is_given_lookups(kind: str) -> None:
    looked_up(tiny(kind, 2, layers=4), None, LOOKUP)


@pytest.mark.parametrize("config", [TREE, PAIR], ids=["tree", "chain"])
@pytest.mark.parametrize("kind", ["gpt2", "blocks"])
def test_lookups_are_as_long_as_asked_for_whatever_a_draft_reads(
    kind: str, config: DecodeConfig
) -> None:
    """A draft of fewer positions than the text has, and one in blocks, on the target's states."""
    target = tiny_llama(2, vocab=40, layers=3)
    gpt2 = tiny("gpt2", 1, n_positions=32, n_embd=16)
    looked_up(target, gpt2 if kind == "gpt2" else block_draft(target, size=3), config)
