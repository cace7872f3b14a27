"""Selection, then speculative sampling: exact distributions, the truncation's bound, optimality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers import VERIFIERS, Verifier
from eval.verifiers.optimum import optimal_acceptance, optimal_acceptance_independent
from eval.verifiers.selection import luce as luce_module
from eval.verifiers.selection import solvers
from eval.verifiers.selection.linear_program import solve_linear_program, solve_max_flow
from eval.verifiers.selection.luce import fit_pair, fit_race, race_distribution
from eval.verifiers.selection.pairs import PairRule, pair_masses
from eval.verifiers.selection.solvers import (
    Selection,
    best_rule,
    selector,
    truncated,
    truncated_nosort,
)
from tests.oracles import (
    constant_model,
    expected_accepted,
    independent_siblings,
    joint_distribution,
    markov_model,
    output_distribution,
    path_drafts,
    random_distribution,
    random_model,
    total_variation,
)

Array = NDArray[np.float64]
SOLVERS = ("lp", "truncated", "truncated_nosort", "luce")
P3, Q3, R3 = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.6, 0.2, 0.2]], dtype=torch.float64)


def random_distributions(seed: int, count: int, size: int = 4, alike: bool = False) -> list[Tensor]:
    """p and the drafts' distributions (one for all if `alike`); every third seed has zeros."""
    generator = torch.Generator().manual_seed(seed)
    zeros = 0.35 if seed % 3 == 1 else 0.0
    p, *qs = (random_distribution(size, generator, zeros) for _ in range(count + 1))
    return [p, *([qs[0]] * count if alike else qs)]


def acceptance(verifier: Verifier, p: Tensor, qs: Sequence[Tensor]) -> float:
    """Exact acceptance at one position, after checking that the output distribution is p."""
    drafts = list(independent_siblings([constant_model(q.tolist(), 1) for q in qs]))
    model = constant_model(p.tolist(), 1)
    emitted = output_distribution(verifier, iter(drafts), model, 2, model)
    assert total_variation(emitted, joint_distribution(model, (), 2)) <= 1e-12
    return expected_accepted(verifier, iter(drafts), model)


def enumerated_distribution(selection: Selection, qs: Sequence[Array]) -> Array:
    """Distribution of the selected token, draft by draft."""
    distribution = np.zeros_like(qs[0])
    for tokens in product(*(np.flatnonzero(q).tolist() for q in qs)):
        mass = math.prod(float(q[x]) for q, x in zip(qs, tokens, strict=True))
        weights = np.array(selection.weights(list(tokens)))
        np.add.at(distribution, list(tokens), mass * weights / weights.sum())
    return distribution


def tournament_of(rule: PairRule) -> Selection:
    def weights(tokens: list[int]) -> list[float]:
        keep = rule.prefer(*tokens)
        return [keep, 1 - keep]

    return Selection(np.zeros(0), weights)


# --- the distribution of the selected token ---


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("k", "alike"), [(1, True), (2, True), (2, False), (3, True), (3, False)])
def test_the_distribution_of_the_selected_token_is_exact(solver: Any, k: int, alike: bool) -> None:
    for seed in range(6):
        p, *qs = (
            distribution.numpy() for distribution in random_distributions(seed, k, alike=alike)
        )
        selection = selector(solver, 2)(p, qs)
        np.testing.assert_allclose(
            selection.distribution, enumerated_distribution(selection, qs), atol=1e-13
        )
        np.testing.assert_allclose(selection.distribution.sum(), 1.0, atol=1e-13)


def test_every_rule_has_its_exact_distribution_over_groups_and_ranks() -> None:
    p, q1, q2 = (distribution.numpy() for distribution in random_distributions(0, 2, size=90))
    for second in (q1, q2):
        rules = [
            *truncated(p, q1, second, 5),
            *truncated_nosort(p, q1, second, 5),
            fit_pair(p, q1, second),
        ]
        for rule in rules:
            enumerated = enumerated_distribution(tournament_of(rule), [q1, second])
            np.testing.assert_allclose(rule.distribution(q1, second), enumerated, atol=1e-14)


def test_luce_selection_of_many_drafts_is_exact_with_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(luce_module, "HEAD", 2)
    for seed in range(3):
        p, q, *_ = (distribution.numpy() for distribution in random_distributions(seed, 1, size=7))
        race = fit_race(p, q, 3)
        assert race.theta.shape[0] > len(p)  # grouped indeed
        enumerated = enumerated_distribution(Selection(race.distribution, race.weights), [q] * 3)
        np.testing.assert_allclose(race.distribution, enumerated, atol=1e-13)


@pytest.mark.parametrize("solver", ["truncated", "truncated_nosort"])
@pytest.mark.parametrize("k", [2, 3])
def test_selection_over_a_reduced_vocabulary_is_exact(
    monkeypatch: pytest.MonkeyPatch, solver: Any, k: int
) -> None:
    monkeypatch.setattr(solvers, "SINGLE", 3)
    for seed in range(3):
        p, q, *_ = (
            distribution.numpy() for distribution in random_distributions(3 * seed, 1, size=90)
        )
        kept = np.arange(90) % 9 == 0
        q = np.where(kept, q, 0.0) / q[kept].sum()
        p = 0.5 * p + 0.5 * np.where(kept, q * (1 + 0.2 * np.arange(90) % 3), 0.0)
        selection = selector(solver, 2)(p / p.sum(), [q] * k)
        np.testing.assert_allclose(
            selection.distribution, enumerated_distribution(selection, [q] * k), atol=1e-13
        )


def test_reducing_a_large_vocabulary_costs_less_than_half_a_percent_of_acceptance() -> None:
    """Against a tournament over all 5000 tokens."""
    p, q = (distribution.numpy() for distribution in random_distributions(0, 1, size=5000))
    for k in (2, 3):
        reduced = selector("truncated", 5)(p, [q] * k).distribution
        in_full = selector("truncated", 5)(p, [q.copy() for _ in range(k)]).distribution
        gain = np.minimum(p, reduced).sum() - np.minimum(p, in_full).sum()
        assert gain >= -0.005


def test_distribution_of_luce_selection_of_worked_examples() -> None:
    theta = np.log(P3.numpy() / Q3.numpy())
    expected = {
        2: ([0.29812808, 0.33857143, 0.36330049], 0.79812808),
        3: ([0.35257653, 0.34065385, 0.30676962], 0.85257653),
    }
    for k, (distribution, accepted) in expected.items():
        b = race_distribution(theta - theta.max(), Q3.numpy(), k, 0.2)
        np.testing.assert_allclose(b, distribution, atol=1e-8)
        assert np.minimum(P3.numpy(), b).sum() == pytest.approx(accepted, abs=1e-8)


# --- losslessness and acceptance ---


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("alphabet", [None, 2])
@pytest.mark.parametrize(("k", "alike"), [(1, True), (2, True), (2, False), (3, True), (3, False)])
def test_output_distribution_is_the_target_distribution(
    solver: str, alphabet: int | None, k: int, alike: bool
) -> None:
    verifier = VERIFIERS["importance"].make(solver=solver, s=2, alphabet=alphabet)
    for seed in range(4):
        p, *qs = random_distributions(seed, k, size=3, alike=alike)
        accepted = acceptance(verifier, p, qs)
        assert accepted <= optimal_acceptance_independent(p, qs) + 1e-12
        single = max(float(torch.minimum(p, q).sum()) for q in qs)
        if k == 1:
            assert accepted == pytest.approx(single, abs=1e-12)
        elif alphabet is None and solver != "luce":
            assert accepted >= single - 1e-12


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("alike", [True, False])
def test_acceptance_is_the_overlap_with_b_and_the_residual_on_drafted_tokens(
    solver: Any, alike: bool
) -> None:
    verifier = VERIFIERS["importance"].make(solver=solver, s=1)
    for seed in range(8):
        p, *qs = random_distributions(seed, 2, size=4, alike=alike)
        arrays = [q.numpy() for q in qs]
        distributions = [arrays[0]] * 2 if alike else arrays
        selection = selector(solver, 1)(p.numpy(), distributions)
        b = torch.from_numpy(selection.distribution)
        residual = (p - b).clamp(min=0)
        residual = residual / residual.sum() if residual.sum() > 1e-12 else p
        hit = 0.0
        for tokens in product(range(4), repeat=2):
            mass = float(qs[0][tokens[0]] * qs[1][tokens[1]])
            weights = selection.weights(list(tokens))
            for x, weight in zip(tokens, weights, strict=True):
                rejected = 1 - min(1.0, float(p[x] / b[x])) if b[x] > 0 else 0.0
                drafted = float(residual[list(set(tokens))].sum())
                hit += mass * weight / sum(weights) * rejected * drafted
        overlap = float(torch.minimum(p, b).sum())
        assert acceptance(verifier, p, qs) == pytest.approx(overlap + hit, abs=1e-12)


@pytest.mark.parametrize("alike", [True, False])
def test_the_linear_program_reaches_the_optimum_of_two_drafts(alike: bool) -> None:
    verifier = VERIFIERS["importance"].make(solver="lp")
    for seed in range(15):
        p, *qs = random_distributions(seed, 2, size=3 + seed % 3, alike=alike)
        best = optimal_acceptance_independent(p, qs)
        assert acceptance(verifier, p, qs) == pytest.approx(best, abs=1e-11)
        distribution = selector("lp", 5)(p.numpy(), [q.numpy() for q in qs]).distribution
        assert np.minimum(p.numpy(), distribution).sum() == pytest.approx(best, abs=1e-11)


def test_worked_examples() -> None:
    make = VERIFIERS["importance"].make
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    skewed = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    assert acceptance(make(solver="lp"), P3, [Q3, Q3]) == pytest.approx(0.86, abs=1e-9)
    assert acceptance(make(solver="truncated", s=1), P3, [Q3, Q3]) == pytest.approx(0.86, abs=1e-9)
    assert acceptance(make(solver="lp"), P3, [Q3, R3]) == pytest.approx(1.0, abs=1e-9)
    for solver in ("lp", "truncated"):
        accepted = acceptance(make(solver=solver, s=1), skewed, [uniform, uniform])
        assert accepted == pytest.approx(0.95555556, abs=1e-8)


def test_fills_of_the_paper_reach_its_worked_examples() -> None:
    """The rules themselves: no choice of the best, no residual that falls on a drafted token."""
    p, q, r = P3.numpy(), Q3.numpy(), R3.numpy()
    skewed, uniform = np.array([0.6, 0.3, 0.1]), np.full(3, 1 / 3)
    for target, first, second, s, hard, even in (
        (p, q, q, 1, 0.86, 0.80),
        (skewed, uniform, uniform, 1, 0.95555556, 0.87777778),
        (p, q, r, 1, 0.82, None),
        (p, q, r, 2, 0.90, None),
    ):
        form = next(truncated(target, first, second, s))
        assert np.minimum(target, form.distribution(first, second)).sum() == pytest.approx(
            hard, abs=1e-8
        )
        if even is not None:
            form = next(truncated_nosort(target, first, second, s))
            accepted = np.minimum(target, form.distribution(first, second)).sum()
            assert accepted == pytest.approx(even, abs=1e-8)


@pytest.mark.parametrize("form", [truncated, truncated_nosort])
@pytest.mark.parametrize("alike", [True, False])
def test_truncation_loses_at_most_the_bound_of_the_paper(form: Any, alike: bool) -> None:
    """Equations 12 and 202: the loss is at most sum over the rest of (p - q1 q2)+."""
    for seed in range(20):
        p, *qs = random_distributions(seed, 2, size=4 + seed % 9, alike=alike)
        best = optimal_acceptance_independent(p, qs)
        target, first, second = p.numpy(), qs[0].numpy(), qs[-1].numpy()
        gains = np.sort(target - first * second)[::-1]
        for s in (1, 3, 6):
            hard = next(form(target, first, second, s))
            accepted = np.minimum(target, hard.distribution(first, second)).sum()
            assert accepted <= best + 1e-12
            assert accepted >= best - np.maximum(gains[s:], 0).sum() - 1e-12


def test_a_hard_fill_that_would_be_worse_is_not_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    q = random_distribution(30, generator).numpy()
    hard = next(truncated(q, q, q, 5))
    assert np.minimum(q, hard.distribution(q, q)).sum() < 0.9
    for solver in SOLVERS:
        distribution = selector(solver, 5)(q, [q] * 3).distribution  # type: ignore[arg-type]
        assert np.minimum(q, distribution).sum() == pytest.approx(1.0, abs=1e-9)


def test_more_drafts_never_hurt_the_tournament() -> None:
    for seed in range(8):
        p, *qs = (distribution.numpy() for distribution in random_distributions(seed, 3, size=6))
        for solver in ("lp", "truncated", "truncated_nosort"):
            accepted = [
                np.minimum(p, selector(solver, 2)(p, qs[:k]).distribution).sum()  # type: ignore[arg-type]
                for k in (1, 2, 3)
            ]
            assert accepted[0] <= accepted[1] + 1e-12
            assert accepted[1] <= accepted[2] + 1e-12


@pytest.mark.parametrize(("size", "k", "gap"), [(5, 2, 0.01), (40, 2, 0.01), (40, 4, 0.02)])
def test_luce_selection_is_near_the_optimum(size: int, k: int, gap: float) -> None:
    for seed in range(6):
        p, q = random_distributions(3 * seed, 1, size=size)
        distribution = selector("luce", 5)(p.numpy(), [q.numpy()] * k).distribution
        accepted = np.minimum(p.numpy(), distribution).sum()
        best = optimal_acceptance(p, q, k)
        assert best - gap <= accepted <= best + 1e-12


@pytest.mark.parametrize("k", [2, 4])
def test_luce_selection_is_near_the_optimum_at_large_vocabularies(k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(32_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(32_000, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(0), (logits + noise).softmax(0)
    distribution = selector("luce", 5)(p.numpy(), [q.numpy()] * k).distribution
    assert abs(distribution.sum() - 1) < 1e-12
    assert np.minimum(p.numpy(), distribution).sum() >= optimal_acceptance(p, q, k) - 0.01


def test_augmenting_paths_solve_the_linear_program() -> None:
    for seed in range(25):
        p, q1, q2 = (
            distribution.numpy()
            for distribution in random_distributions(seed, 2, size=3 + seed % 6)
        )
        sure, masses = q1 * q2, pair_masses(q1, q2)
        values = []
        for shares in (solve_max_flow(p, sure, masses), solve_linear_program(p, sure, masses)):
            np.testing.assert_allclose(shares + shares.T, 1.0, atol=1e-12)
            assert shares.min() >= 0
            b = sure + (masses * shares).sum(axis=1)
            assert b.sum() == pytest.approx(1.0, abs=1e-12)
            values.append(np.minimum(p, b).sum())
        assert values[0] == pytest.approx(values[1], abs=1e-8)


def test_the_alphabet_accepts_more_than_the_papers_second_test() -> None:
    """alpha >= P(W) sum_m Bin(m) alpha_m on p given W; .55 against .51 for this pair."""
    verifier = VERIFIERS["importance"].make(solver="lp", alphabet=2)
    assert acceptance(verifier, P3, [Q3, Q3]) >= 0.55 - 1e-12


def test_constant_rules_keep_the_acceptance_of_the_better_of_two_drafts() -> None:
    p = P3.numpy()
    rule, distribution = best_rule(p, R3.numpy(), np.array([0.0, 0.0, 1.0]), iter(()))
    assert rule.first == 1.0
    np.testing.assert_array_equal(distribution, R3.numpy())


# --- several places ---


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("independent", [False, True])
def test_paths_are_lossless_and_block_verification_gains(solver: str, independent: bool) -> None:
    for seed in range(4):
        p = random_model(2, 2, 10 * seed)
        q, other = (random_model(2, 2, 10 * seed + 1 + index) for index in range(2))
        drafts = list(path_drafts([q, other if independent else q], 2))
        accepted = {}
        for name in ("importance", "multipath_block"):
            verifier = VERIFIERS[name].make(solver=solver, s=1)
            emitted = output_distribution(verifier, iter(drafts), p, 3, q)
            assert total_variation(emitted, joint_distribution(p, (), 3)) <= 1e-12
            accepted[name] = expected_accepted(verifier, iter(drafts), p)
        assert accepted["importance"] <= accepted["multipath_block"] + 1e-12


def test_multipath_block_of_one_path_is_block_verification() -> None:
    p, q = random_model(3, 3, 1), random_model(3, 3, 2)
    for _, paths in path_drafts([q], 3):
        chain = DraftTree.chain(paths.tokens, paths.distributions[paths.distribution_index])
        target = torch.stack([p[tuple(paths.token_list[:depth])] for depth in range(4)])
        expected = VERIFIERS["block"].make()(chain, target)
        verdict = VERIFIERS["multipath_block"].make()(paths, target)
        torch.testing.assert_close(verdict.stop, expected.stop)
        torch.testing.assert_close(verdict.bonus, expected.bonus)


@pytest.mark.parametrize("solver", SOLVERS)
def test_multipath_block_of_one_position_is_importance(solver: str) -> None:
    p, q = random_model(3, 1, 1), random_model(3, 1, 2)
    multipath = VERIFIERS["multipath_block"].make(solver=solver)
    selection = VERIFIERS["importance"].make(solver=solver)
    for k in (2, 3):
        drafts = list(path_drafts([q] * k, 1))
        assert expected_accepted(multipath, iter(drafts), p) == pytest.approx(
            expected_accepted(selection, iter(drafts), p), abs=1e-12
        )


def test_multipath_block_of_a_worked_example() -> None:
    p = markov_model((0.5, 0.5), ((0.7, 0.3), (0.2, 0.8)), 2)
    q = markov_model((0.8, 0.2), ((0.4, 0.6), (0.5, 0.5)), 2)
    drafts = list(path_drafts([q, q], 2))
    multipath = VERIFIERS["multipath_block"].make(solver="lp")
    assert expected_accepted(multipath, iter(drafts), p) == pytest.approx(1.622, abs=1e-7)
    selection = VERIFIERS["importance"].make(solver="lp")
    assert expected_accepted(selection, iter(drafts), p) == pytest.approx(1.592, abs=1e-7)


# --- edges ---


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_hot_and_disjoint_distributions(solver: str) -> None:
    verifier = VERIFIERS["importance"].make(solver=solver)
    hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    cold = torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64)
    for k in (1, 2, 3):
        assert acceptance(verifier, hot, [Q3] * k) == pytest.approx(1 - 0.7**k, abs=1e-9)
        assert acceptance(verifier, hot, [cold] * k) == 0.0
        assert acceptance(verifier, hot, [hot] * k) == pytest.approx(1.0, abs=1e-12)


def test_the_full_program_refuses_a_large_vocabulary() -> None:
    q = torch.full((1000,), 1e-3, dtype=torch.float64)
    verifier = VERIFIERS["importance"].make(solver="lp")
    with pytest.raises(ValueError, match="use solver='truncated'"):
        verifier(DraftTree.siblings(torch.tensor([1, 2]), q), q.expand(3, -1))
