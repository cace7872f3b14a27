"""The search for a draft tree along held-out text: its chances, its rounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers.trees import (
    DEEPEST,
    WIDTHS,
    Acceptance,
    Siblings,
    acceptance_along,
    accepted,
    expected_rounds,
    k_configurations,
    search,
)
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.verifiers import VERIFIERS
from specdata.probability import SamplingConfig, probabilities
from specdata.sampling import generator_for
from tests.support.families import nearby, tiny
from tests.support.oracles import (
    TabularModel,
    chain_drafts,
    continuations,
    node_prefixes,
    random_model,
    target_rows,
    tree_drafts,
)
from tests.support.tiny import tiny_llama


def grid(ranks: int, points: int) -> torch.Tensor:
    """Uniforms that draw every sequence of rejected candidates as often as it is likely."""
    middles = [(at + 0.5) / points for at in range(points)]
    return torch.tensor([*itertools.product(middles, repeat=ranks - 1)], dtype=torch.float64)


def accepted_prefixes(
    name: str, p: TabularModel, q: TabularModel, widths: tuple[int, ...], siblings: Siblings
) -> dict[tuple[int, ...], float]:
    """P(a round accepts these tokens, and perhaps more), by enumeration of drafts and outcomes."""
    verifier, found = VERIFIERS[name].make(), dict[tuple[int, ...], float]()
    drafts = chain_drafts(q, len(widths)) if name == "token" else tree_drafts(q, widths, siblings)
    for weight, draft in drafts:
        stop = verifier(draft, target_rows(draft, p)).stop.tolist()
        for prefix, chance in zip(node_prefixes(draft), stop, strict=True):
            for depth in range(1, len(prefix) + 1):
                found[prefix[:depth]] = found.get(prefix[:depth], 0.0) + weight * chance
    return found


@pytest.mark.parametrize(
    ("name", "widths", "siblings", "tolerance"),
    [
        ("token", (1, 1, 1), "iid", 1e-9),
        ("rrs", (2, 2), "iid", 1e-9),
        ("rrs", (3, 1), "iid", 1e-9),
        # Drawn by a grid of uniforms, so a little of each sequence's chance is rounded.
        ("rrs_wor", (2, 2), "distinct", 5e-3),
        ("rrs_wor", (3, 1), "distinct", 4e-2),
    ],
)
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_the_chance_that_a_round_accepts_a_text_is_that_of_its_verifier_given_the_text(
    name: str, widths: tuple[int, ...], siblings: Siblings, tolerance: float, zeros: float
) -> None:
    most = max(widths)
    for seed in range(2):
        p, q = (random_model(3, len(widths), 2 * seed + own, zeros) for own in (0, 1))
        expected = accepted_prefixes(name, p, q, widths, siblings)
        for _, text in continuations(p, len(widths)):
            places = [text[:at] for at in range(len(text))]
            both = [torch.stack([model[prefix] for prefix in places]) for model in (p, q)]
            tokens, uniforms = torch.tensor(text), None
            if siblings == "distinct":
                drawn = grid(most, 24 if most > 2 else 300)
                both = [each.repeat_interleave(len(drawn), 0) for each in both]
                tokens = tokens.repeat_interleave(len(drawn))
                uniforms = drawn.repeat(len(text), 1)
            each = accepted(*both, tokens, uniforms, most)
            chances = each.unflatten(0, (len(text), -1)).mean(dim=1)
            mass = prefix_acceptance = 1.0
            for depth, width in enumerate(widths):
                mass *= float(p[text[:depth]][text[depth]])
                prefix_acceptance *= float(chances[depth, width - 1])
                got = expected.get(text[: depth + 1], 0.0)
                assert mass * prefix_acceptance == pytest.approx(got, abs=tolerance), (seed, text)


def test_candidates_that_the_draft_cannot_draw_are_not_accepted() -> None:
    """Where q has two tokens there is no third candidate without replacement."""
    p = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64).expand(50, -1)
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(50, -1)
    uniforms = torch.rand(50, 4, dtype=torch.float64, generator=generator_for(0))
    for token, most in ((0, 1.0), (2, 0.0)):
        tokens = torch.full((50,), token)
        chances = accepted(p, q, tokens, uniforms, 5)
        assert chances[:, -1].tolist() == pytest.approx([most] * 50)
        assert chances[:, 1:].diff(dim=-1).abs().max() < 1e-12
        assert torch.isfinite(accepted(p, q, tokens, None, 5)).all()


def test_the_rounds_of_a_text_follow_from_left_to_right() -> None:
    lengths = np.array([5, 3])
    inside = 1.0 * (np.arange(5) < lengths[:, None])
    # Three tokens a round, the bonus token among them.
    assert Acceptance(["a", "b"], lengths, {1: inside}).rounds([1, 1]).tolist() == [2, 1]
    assert Acceptance(["a", "b"], lengths, {1: 0 * inside}).rounds([1, 1]).tolist() == [5, 3]
    # With half a chance at each of two levels a round emits 1, 2 or 3 tokens with 1/2, 1/4, 1/4:
    # R(n) = 1 + R(n-1) / 2 + R(n-2) / 4 + R(n-3) / 4, so 1, 1.5, 2, 2.625.
    chances = np.multiply.outer([0.5, 0.25], np.ones((2, 4)))
    assert expected_rounds(chances, np.array([4, 2])).tolist() == [2.625, 1.5]


@pytest.mark.parametrize("siblings", ["iid", "distinct"])
def test_acceptance_along_a_text_is_that_of_both_models_distributions(siblings: Siblings) -> None:
    """One candidate draws nothing; several without replacement are means of draws."""
    target, draft, sampling = tiny_llama(0, vocab=8), tiny_llama(1, vocab=8), SamplingConfig(0.7, 5)
    rows = [
        {"example_id": f"e{n}", "sample": 0, "prompt_ids": [2, 3], "completion_ids": text}
        for n, text in enumerate(([4, 5, 6, 2, 7], [3, 3]))
    ]
    asked: dict[str, Any] = {"sampling": sampling, "siblings": siblings, "most": 4, "seed": 0}
    along = acceptance_along(rows, target=target, draft=draft, **asked)
    assert along.lengths.tolist() == [5, 2]
    for number, row in enumerate(rows):
        ids, text = torch.tensor([row["prompt_ids"] + row["completion_ids"]]), row["completion_ids"]
        with torch.inference_mode():
            p, q = (probabilities(m(ids).logits[0, 1:-1], sampling) for m in (target, draft))
        expected = accepted(p, q, torch.tensor(text), None, 4)
        for width in (1, 2, 4) if siblings == "iid" else (1,):
            found = along.of[width][number, : len(text)]
            assert found.tolist() == pytest.approx(expected[:, width - 1].tolist(), abs=1e-6)


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 1), (4, 2)])
def test_at_temperature_0_it_takes_exactly_as_many_rounds(widths: tuple[int, ...]) -> None:
    """Candidates are the draft's likeliest tokens, so nothing is random."""
    family = "llama, grouped queries"
    target, draft = tiny(family, 2), nearby(family)
    config = DecodeConfig("rrs_wor", drafter="tree", widths=widths, temperature=0.0)
    decoder, rows, taken = SpeculativeDecoder.from_config(target, draft, config), [], []
    for number in range(6):
        ids = [2 + number, 5]
        made = decoder.generate(torch.tensor(ids), max_new_tokens=24, generator=generator_for(0))
        text = {"prompt_ids": ids, "completion_ids": made.tokens.tolist()}
        rows.append({"example_id": f"e{number}", "sample": 0, **text})
        taken.append(len(made.rounds))
    asked: dict[str, Any] = {"sampling": config.sampling, "siblings": "distinct", "most": 4}
    along = acceptance_along(rows, target=target, draft=draft, **asked, seed=0)
    assert along.rounds(widths).tolist() == taken
    assert len(rows) < sum(taken) < along.lengths.sum()


def test_k_configurations_are_those_that_widen_nowhere() -> None:
    found = list(k_configurations(8, depth=3))
    every = {
        widths
        for depth in (1, 2, 3)
        for widths in itertools.product(WIDTHS, repeat=depth)
        if list(widths) == sorted(widths, reverse=True) and np.prod(widths) <= 8
    }
    assert set(found) == every
    assert len(found) == len(every)
    assert max(map(len, k_configurations(32))) == DEEPEST


def test_a_search_says_what_each_tree_emits_and_gains() -> None:
    chances = np.random.default_rng(0).uniform(0.3, 0.7, (12, 20))
    of = {k: chances ** (1 / k) for k in WIDTHS}  # rises with k
    along = Acceptance([f"e{n}" for n in range(12)], np.full(12, 20), of)
    found = search(along, 32, 0.1)
    for each in found:
        widths = tuple(map(int, each["widths"].split("x")))
        tokens = each["block_efficiency"]
        assert tokens["value"] == pytest.approx(240 / along.rounds(widths).sum())
        assert tokens["low"] <= tokens["value"] <= tokens["high"]
        assert each["speedup"] == pytest.approx(tokens["value"] / (1 + 0.1 * len(widths)))
        assert (each["paths"], each["nodes"]) == (np.prod(widths), np.cumprod(widths).sum())
    assert [each["nodes"] for each in found if each["widths"] == "2x2x1"] == [2 + 4 + 4]
