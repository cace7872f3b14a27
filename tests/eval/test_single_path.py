"""Verifiers of one path: formulas, several rounds, adaptive length."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from benchmarks.papers import theory
from eval.drafts import DraftTree
from eval.verifiers import VERIFIERS
from eval.verifiers.persistent_residual import PersistentResidual
from eval.verifiers.rule import Verifier
from specdata.probability import residual
from tests.support.oracles import (
    Prefix,
    TabularModel,
    WeightedDrafts,
    chain_drafts,
    conditioned,
    constant_model,
    joint_distribution,
    markov_model,
    output_distribution,
    random_model,
    rounds_distribution,
    total_variation,
)

TOY = constant_model((1 / 3, 2 / 3), 9), constant_model((2 / 3, 1 / 3), 9)
MARKOV = (
    markov_model((0.5, 0.5), [[0.7, 0.3], [0.2, 0.8]], 9),
    markov_model((0.8, 0.2), [[0.4, 0.6], [0.5, 0.5]], 9),
)


def made(name: str) -> Verifier:
    return VERIFIERS[name].make()


def fixed_chains(q: TabularModel, length: int) -> Callable[[Prefix, Verifier], WeightedDrafts]:
    """A drafter of chains of one length, which passes `tail` only where it is asked for."""

    def draft(sequence: Prefix, verifier: Verifier) -> WeightedDrafts:
        tail = verifier.needs_tail(length)
        return chain_drafts(conditioned(q, sequence, length), length, tail=tail)

    return draft


# --- one block ---


# --- biased ---


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("name", ["biased_uno", "biased_opt"])
def test_biased_verifiers_have_exactly_the_declared_distribution(name: str, epsilon: float) -> None:
    """Accepted tokens weigh q b; the one after a rejection R P; what follows is the target's."""
    length = 2
    p, q = random_model(3, 3, 7, 0.3), random_model(3, 3, 8, 0.3)
    expected = torch.zeros((3,) * (length + 1), dtype=torch.float64)
    for sequence in itertools.product(range(3), repeat=length + 1):
        for accepted in range(length + 1):
            weight = 1.0
            for depth, token in enumerate(sequence):
                here, draft = p[sequence[:depth]], q[sequence[:depth]]
                accept = theory.over_acceptance(here, draft, epsilon)
                if depth < accepted:
                    weight *= float(draft[token] * accept[token])
                elif depth == accepted < length:
                    best = residual(here, draft * accept)
                    distribution = best if name == "biased_opt" else here
                    weight *= theory.rejection(draft, accept) * float(distribution[token])
                else:
                    weight *= float(here[token])
            expected[sequence] += weight
    verifier = VERIFIERS[name].make(epsilon=epsilon)
    emitted = output_distribution(verifier, chain_drafts(q, length), p, length + 1, q)
    assert total_variation(emitted, expected) <= 1e-12
    if name == "biased_opt" and epsilon == 0.0:
        assert total_variation(emitted, joint_distribution(p, (), length + 1)) <= 1e-12
    if epsilon > 0.0:
        assert total_variation(emitted, joint_distribution(p, (), length + 1)) > 1e-3


# --- several rounds ---


@pytest.mark.parametrize("zeros", [0.0, 0.35])
@pytest.mark.parametrize(("vocabulary", "length", "emitted"), [(2, 2, 5), (2, 3, 5), (3, 2, 4)])
def test_greedy_block_over_several_rounds_keeps_the_joint_distribution(
    vocabulary: int, length: int, emitted: int, zeros: float
) -> None:
    for seed in range(3):
        p = random_model(vocabulary, emitted + length, 20 + 2 * seed, zeros)
        q = random_model(vocabulary, emitted + length, 21 + 2 * seed, zeros)
        joint, _ = rounds_distribution(made("greedy_block"), p, emitted, fixed_chains(q, length))
        assert total_variation(joint, joint_distribution(p, (), emitted)) <= 1e-12


def test_a_residual_carried_past_the_draft_needs_the_distribution_after_it() -> None:
    q = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    held = dataclasses.replace(made("greedy_block"), residuals=(PersistentResidual(1.5, 3),))
    target = torch.tensor([[0.5, 0.5]] * 3)
    assert held.needs_tail(2)
    with pytest.raises(
        ValueError, match=r"next 3 tokens, but the draft's distribution after its 2 tokens"
    ):
        held(DraftTree.chain(torch.tensor([0, 1]), q), target)
    with pytest.raises(ValueError, match="tail"):
        held.draw(DraftTree.chain(torch.tensor([0, 1]), q), target, torch.Generator())
    verdict = held(DraftTree.chain(torch.tensor([0, 1]), q, tail=q[0]), target)
    assert float(verdict.stop.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("models", "length", "goldens"),
    [
        (TOY, 2, (3.160494, 2.995885, 3.057613)),
        (TOY, 3, (2.930041, 2.748971, 2.897119)),
        (MARKOV, 3, (2.81213, 2.67650, 2.77022)),
    ],
)
def test_rounds_to_emit_six_tokens(
    models: tuple[TabularModel, TabularModel], length: int, goldens: tuple[float, ...]
) -> None:
    p, q = models
    for name, golden in zip(("token", "block", "greedy_block"), goldens, strict=True):
        joint, rounds = rounds_distribution(made(name), p, 6, fixed_chains(q, length))
        assert rounds == pytest.approx(golden, abs=1e-5)
        assert total_variation(joint, joint_distribution(p, (), 6)) <= 1e-12


# --- adaptive length ---


@pytest.mark.parametrize(("planned", "lossless"), [(3, True), (None, False)])
def test_an_end_token_cuts_a_draft_short_but_not_the_persistent_residual(
    planned: int | None, lossless: bool
) -> None:
    """Token 0 ends the sequence and so the draft; `planned` keeps the residual's full length."""
    end = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    p, q = (
        {
            sequence: end if 0 in sequence else distribution
            for sequence, distribution in random_model(3, 7, seed).items()
        }
        for seed in (5, 6)
    )

    def draft(sequence: Prefix, verifier: Verifier) -> WeightedDrafts:
        here = conditioned(q, sequence, 3)
        for weight, tree in chain_drafts(here, 3, lambda drafted: drafted[-1] == 0, tail=True):
            yield weight, dataclasses.replace(tree, planned=planned)

    joint, _ = rounds_distribution(made("greedy_block"), p, 4, draft)
    bias = total_variation(joint, joint_distribution(p, (), 4))
    assert bias <= 1e-12 if lossless else bias > 1e-3
