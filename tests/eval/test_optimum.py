"""The best acceptance of any rule, against a linear program over all rules and closed forms."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from eval.verifiers.optimum import optimal_acceptance, optimal_acceptance_independent
from tests.support.oracles import random_distribution, sibling_groups, support

P3, Q3, HOT, COLD, RARE = torch.tensor(
    [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.7, 0.295, 0.005]],
    dtype=torch.float64,
)
EDGES = [(HOT, Q3), (Q3, Q3), (HOT, COLD), (P3, HOT), (P3, RARE)]


def distributions(seed: int, count: int, sizes: Sequence[int] = (2, 3, 4, 5)) -> list[Tensor]:
    """Random distributions over one vocabulary; every third seed has zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = sizes[seed % len(sizes)]
    zeros = 0.35 if seed % 3 == 1 else 0.0
    return [random_distribution(size, generator, zeros) for _ in range(count)]


def program(p: Tensor, groups: list[tuple[float, tuple[int, ...]]]) -> float:
    """Best acceptance of any joint distribution of (drafts, emitted token): a linear program."""
    size, count = len(p), len(groups)
    margins = np.zeros((count + size, count * size))
    gain = np.zeros(count * size)
    for row, (_, tokens) in enumerate(groups):
        margins[row, row * size : (row + 1) * size] = 1.0
        gain[[row * size + token for token in set(tokens)]] = 1.0
        for token in range(size):
            margins[count + token, row * size + token] = 1.0
    right = np.concatenate([[weight for weight, _ in groups], p.numpy()])
    solved = linprog(-gain, A_eq=margins, b_eq=right, bounds=(0, None), method="highs")
    assert solved.status == 0
    return -float(solved.fun)


def independent_groups(qs: list[Tensor]) -> list[tuple[float, tuple[int, ...]]]:
    return [
        (math.prod(mass for mass, _ in draws), tuple(token for _, token in draws))
        for draws in product(*(support(q) for q in qs))
    ]


@pytest.mark.parametrize("how", ["iid", "distinct"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_optimum_is_the_linear_program_over_all_rules(
    how: Literal["iid", "distinct"], k: int
) -> None:
    for p, q in [*(distributions(seed, 2, sizes=(2, 3, 4)) for seed in range(9)), *EDGES]:
        expected = program(p, sibling_groups(q, k, how))
        assert optimal_acceptance(p, q, k, how) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_optimum_of_different_distributions_is_the_linear_program_over_all_rules(k: int) -> None:
    edges = [(p, *[q] * k) for p, q in EDGES]
    for p, *qs in [*(distributions(seed, k + 1, sizes=(2, 3)) for seed in range(9)), *edges]:
        expected = program(p, independent_groups(qs))
        assert optimal_acceptance_independent(p, qs) == pytest.approx(expected, abs=1e-9)


def test_equal_distributions_agree_between_both_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (3, 200, 5000):
        p, q = random_distribution(size, generator), random_distribution(size, generator)
        for k in (2, 3):
            independent = optimal_acceptance_independent(p, [q] * k)
            assert independent == pytest.approx(optimal_acceptance(p, q, k), abs=1e-10)


def test_distinct_drafts_with_tiny_probabilities_are_still_all_drawn() -> None:
    tiny = torch.tensor([1.0, 1e-300], dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert optimal_acceptance(half, tiny, 2, how="distinct") == pytest.approx(1.0, abs=1e-12)
    subnormal = torch.tensor([1.87e-320, 1.0], dtype=torch.float64)
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert optimal_acceptance(first, subnormal, 3, how="distinct") == pytest.approx(1.0, abs=1e-12)
