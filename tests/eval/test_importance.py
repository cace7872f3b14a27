"""Selection, then speculative sampling: exact distributions, the truncation's bound, optimality."""

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
from eval.verifiers import VERIFIERS
from eval.verifiers.optimum import optimal_acceptance, optimal_acceptance_independent
from eval.verifiers.rule import Verifier
from eval.verifiers.selection import luce as luce_module
from eval.verifiers.selection import solvers
from eval.verifiers.selection.luce import fit_pair, fit_race
from eval.verifiers.selection.pairs import PairRule, Selection, pair_masses
from eval.verifiers.selection.solvers import (
    selector,
    solve_linear_program,
    solve_max_flow,
    truncated,
    truncated_nosort,
)
from tests.support.oracles import (
    constant_model,
    expected_accepted,
    independent_siblings,
    joint_distribution,
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


def assert_exact(selection: Selection, qs: Sequence[Array]) -> None:
    """The distribution of the selected token is that of an enumeration, draft by draft."""
    distribution = np.zeros_like(qs[0])
    for tokens in product(*(np.flatnonzero(q).tolist() for q in qs)):
        mass = math.prod(float(q[x]) for q, x in zip(qs, tokens, strict=True))
        weights = np.array(selection.weights(list(tokens)))
        np.add.at(distribution, list(tokens), mass * weights / weights.sum())
    np.testing.assert_allclose(selection.distribution, distribution, atol=1e-13)


def tournament(rule: PairRule, first: Array, second: Array) -> Selection:
    def weights(tokens: list[int]) -> list[float]:
        keep = rule.prefer(*tokens)
        return [keep, 1 - keep]

    return Selection(rule.distribution(first, second), weights)


# --- the distribution of the selected token ---


def test_every_rule_has_its_exact_distribution_over_groups_and_ranks() -> None:
    p, q1, q2 = (distribution.numpy() for distribution in random_distributions(0, 2, size=90))
    for second in (q1, q2):
        rules = [
            *truncated(p, q1, second, 5),
            *truncated_nosort(p, q1, second, 5),
            fit_pair(p, q1, second),
        ]
        for rule in rules:
            assert_exact(tournament(rule, q1, second), [q1, second])


def test_luce_selection_of_many_drafts_is_exact_with_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(luce_module, "HEAD", 2)
    for seed in range(3):
        p, q, *_ = (distribution.numpy() for distribution in random_distributions(seed, 1, size=7))
        assert luce_module._groups(p, q)[1] > len(p)  # grouped indeed
        assert_exact(fit_race(p, q, 3), [q] * 3)


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
        assert_exact(selector(solver, 2)(p / p.sum(), [q] * k), [q] * k)


# --- losslessness and acceptance ---


@pytest.mark.parametrize("alike", [True, False])
def test_the_linear_program_reaches_the_optimum_of_two_drafts(alike: bool) -> None:
    verifier = VERIFIERS["importance"].make(solver="lp")
    for seed in range(15):
        p, *qs = random_distributions(seed, 2, size=3 + seed % 3, alike=alike)
        best = optimal_acceptance_independent(p, qs)
        assert acceptance(verifier, p, qs) == pytest.approx(best, abs=1e-11)
        distribution = selector("lp", 5)(p.numpy(), [q.numpy() for q in qs]).distribution
        assert np.minimum(p.numpy(), distribution).sum() == pytest.approx(best, abs=1e-11)


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


def test_softer_truncation_shares_all_other_pairs_in_proportion_to_p_over_q() -> None:
    for seed in range(0, 9, 3):
        p, q = (each.numpy() for each in random_distributions(seed, 1, size=7))
        _, soft = truncated(p, q, q, 2)
        *others, a, b = np.argsort(p - q * q).tolist()
        for i, j in [*product(others, [a, b]), (others[0], others[1])]:
            share = p[i] / q[i] / (p[i] / q[i] + p[j] / q[j])
            assert soft.prefer(i, j) == pytest.approx(share)


@pytest.mark.parametrize(("size", "k", "gap"), [(5, 2, 0.01), (40, 2, 0.01), (40, 4, 0.02)])
def test_luce_selection_is_near_the_optimum(size: int, k: int, gap: float) -> None:
    for seed in range(6):
        p, q = random_distributions(3 * seed, 1, size=size)
        distribution = selector("luce", 5)(p.numpy(), [q.numpy()] * k).distribution
        accepted = np.minimum(p.numpy(), distribution).sum()
        best = optimal_acceptance(p, q, k)
        assert best - gap <= accepted <= best + 1e-12


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


# --- several places ---


def test_multipath_block_of_one_path_is_block_verification() -> None:
    p, q = random_model(3, 3, 1), random_model(3, 3, 2)
    for _, paths in path_drafts([q], 3):
        chain = DraftTree.chain(paths.tokens, paths.distributions[paths.distribution_index])
        target = torch.stack([p[tuple(paths.token_list[:depth])] for depth in range(4)])
        expected = VERIFIERS["block"].make()(chain, target)
        verdict = VERIFIERS["multipath_block"].make()(paths, target)
        torch.testing.assert_close(verdict.stop, expected.stop)
        torch.testing.assert_close(verdict.bonus, expected.bonus)
