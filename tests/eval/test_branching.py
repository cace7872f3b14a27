"""Paths and trees: tree attention is exact, and every verifier keeps the distribution."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.drafters import BranchingDrafter
from eval.runtime.batches import drive
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from eval.verifiers import VERIFIERS
from specdata import probability
from specdata.errors import NotFiniteError
from specdata.probability import SamplingConfig
from tests.support.branching import SAMPLED, greedy_rounds
from tests.support.chi_square import LEVEL, p_value, power
from tests.support.decoder import PROMPT, head
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
