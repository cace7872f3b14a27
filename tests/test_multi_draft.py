"""Verifiers of several candidates: exact output distribution and acceptance, edge cases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.drafts import DraftTree, How
from eval.verifiers import VERIFIERS
from eval.verifiers.kseq import discount
from eval.verifiers.optimum import optimal_acceptance
from recipes.papers.acceptance import RULES, two_drafts

P3, Q3 = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
P4, Q4 = torch.tensor([[0.45, 0.25, 0.2, 0.1], [0.35, 0.1, 0.15, 0.4]], dtype=torch.float64)


def siblings(q: Tensor, k: int, how: How) -> Iterator[tuple[float, DraftTree]]:
    """Every draft of k siblings with its probability; q is (V,), or (k, V) for one each."""
    chosen = q.argsort(descending=True, stable=True)[: k - 1].tolist() if how == "greedy" else []
    for tokens in product(range(q.shape[-1]), repeat=k):
        weight, rest = 1.0, q.clone()
        for index, x in enumerate(tokens):
            if index < len(chosen):
                weight *= float(x == chosen[index])
            else:
                distribution = rest[index] if q.ndim == 2 else rest / rest.sum()
                weight *= float(distribution[x]) if distribution[x] > 0 else 0.0
            if how != "iid":
                rest[x] = 0.0
            if weight == 0.0:
                break
        if weight > 0:
            yield weight, DraftTree.siblings(torch.tensor(tokens), q, how)


def judge(
    name: str, p: Tensor, q: Tensor, k: int, how: How = "iid", **parameters: Any
) -> tuple[Tensor, float]:
    """Exact output distribution (V,) and acceptance at one position, over every draft."""
    verifier = VERIFIERS[name].make(**parameters)
    distribution, acceptance, total = torch.zeros_like(p), 0.0, 0.0
    for weight, tree in siblings(q, k, how):
        verdict = verifier(tree, p.expand(k + 1, -1))
        assert float(verdict.stop.sum()) == pytest.approx(1.0, abs=1e-12)
        assert bool(torch.isfinite(verdict.bonus).all())
        distribution += weight * verdict.stop[0] * verdict.bonus[0]
        distribution.index_add_(0, tree.tokens, weight * verdict.stop[1:])
        acceptance += weight * float(verdict.stop[1:].sum())
        total += weight
    assert total == pytest.approx(1.0, abs=1e-12)
    return distribution, acceptance


def random_distributions(seed: int, size: int, rows: int = 2, zeros: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    distributions = torch.rand(rows, size, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        kept = torch.rand(rows, size, generator=generator) > 0.35
        distributions = distributions * (kept | (torch.arange(size) == seed % size))
    return list(distributions / distributions.sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("name", ["naive", "rrs", "kseq"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_is_the_formula_of_the_paper(name: str, k: int) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 3, zeros=seed % 2 == 1)
        _, acceptance = judge(name, p, q, k)
        assert acceptance == pytest.approx(RULES[name](p, q, k), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_without_replacement_averages_over_the_rejected(k: int) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 4, zeros=seed % 2 == 1)
        if k > int((q > 0).sum()):
            continue
        _, acceptance = judge("rrs_wor", p, q, k, "distinct")
        assert acceptance == pytest.approx(RULES["rrs_wor"](p, q, k), abs=0.02 if k > 1 else 1e-12)


@pytest.mark.parametrize("alphabet", [None, 2])
def test_acceptance_of_a_selection_is_its_overlap_and_the_drafted_residual(
    alphabet: int | None,
) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 3)
        _, acceptance = judge("importance", p, q, 2, solver="lp", alphabet=alphabet)
        found = RULES["importance"](p, q, 2, solver="lp", alphabet=alphabet)
        best = optimal_acceptance(p, q, 2)
        assert found <= acceptance + 1e-12 <= best + 2e-12
        if alphabet is None:
            assert found == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize(
    ("q", "first"), [([1 / 3] * 3, [1 / 3]), ([1 / 3] * 3, [1 / 6]), ([0.5, 0.5], [])]
)
def test_two_drafts_of_the_papers_examples_reach_theorem_3(
    q: list[float], first: list[float]
) -> None:
    found: dict[float, dict[str, float]] = {}
    for row in two_drafts(q, [first], 9):
        found.setdefault(row["x"], {})[row["scheme"]] = row["acceptance"]
    for x, acceptance in found.items():
        p = [*first, x, 1 - sum(first) - x]
        # min over S of P(S) + Q(S^c)^2 + 2 Q(S) Q(S^c) = P(S) + 1 - Q(S)^2.
        theorem = min(
            float(np.dot(p, chosen) + 1 - np.dot(q, chosen) ** 2)
            for chosen in product([0, 1], repeat=len(q))
        )
        best = acceptance["optimal"]
        assert best == pytest.approx(theorem, abs=1e-12)
        assert acceptance["SpecInfer"] <= acceptance["SpecTr"] + 1e-12 <= best + 2e-12
        if (
            not first
        ):  # Example 1: two fair drafts always suffice for p in [1/4, 3/4], and only there
            assert (best > 1 - 1e-12) == (0.25 <= x <= 0.75)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_draft_accepts_the_chosen_mass_and_the_overlap_of_the_rest(k: int) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 4, zeros=seed % 2 == 1)
        if k > int((q > 0).sum()):
            continue
        chosen = q.argsort(descending=True, stable=True)[: k - 1]
        rest = q.index_fill(0, chosen, 0.0)
        expected = float(p[chosen].sum() + torch.minimum(p, rest / rest.sum()).sum())
        overlap_of_chosen = float(torch.minimum(p, rest / rest.sum())[chosen].sum())
        _, acceptance = judge("greedy_draft", p, q, k, "greedy")
        assert acceptance == pytest.approx(expected - overlap_of_chosen, abs=1e-12)


# By hand, as the formula above is an average: (p, q, K, acceptance)
GOLDEN = [
    (P3, Q3, 2, 0.82),
    (P3, Q3, 3, 1.0),
    (P4, Q4, 2, 0.9),
    (P4, Q4, 3, 0.93555556),
]


@pytest.mark.parametrize(("p", "q", "k", "expected"), GOLDEN)
def test_acceptance_without_replacement_of_worked_examples(
    p: Tensor, q: Tensor, k: int, expected: float
) -> None:
    assert judge("rrs_wor", p, q, k, "distinct")[1] == pytest.approx(expected, abs=1e-7)


def test_discount_is_the_root_seen_from_the_valid_side() -> None:
    for seed in range(200):
        k = 2 + seed % 7
        p, q = random_distributions(seed, 2 + seed % 50, zeros=seed % 3 == 1)
        rho = discount(p, q, k)
        low, high = 1.0, float(k)
        for _ in range(60):  # plain bisection on the definition
            middle = (low + high) / 2
            beta = float(torch.minimum(q, p / middle).sum())
            invalid = 1 - (1 - beta) ** k > middle * beta
            low, high = (middle, high) if invalid else (low, middle)
        beta, best = (float(torch.minimum(q, p / value).sum()) for value in (rho, high))
        assert rho * beta == pytest.approx(high * best, abs=1e-13)
        assert 1 - (1 - beta) ** k <= rho * beta + 1e-15


def test_greedy_draft_without_anything_left_to_draw_takes_what_p_gives() -> None:
    q = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    nothing = torch.zeros(2, dtype=torch.long)
    tree = DraftTree(torch.tensor([0, 2]), nothing, q[None], nothing, "siblings", "greedy")
    verdict = VERIFIERS["greedy_draft"].make()(tree, P3.expand(3, -1))
    expected = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    torch.testing.assert_close(verdict.stop, expected)
