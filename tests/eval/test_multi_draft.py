"""Verifiers of several candidates: exact output distribution and acceptance, edge cases."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.papers import examples as formulas
from benchmarks.papers.examples import RULES, two_drafts
from eval.drafts import DraftTree, How
from eval.verifiers import VERIFIERS
from eval.verifiers.kseq import discount
from eval.verifiers.optimum import optimal_acceptance
from tests.support.oracles import (
    constant_model,
    expected_accepted,
    random_distributions,
    sibling_drafts,
)

P3 = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
BOUND = 0.03
"""Of the quadrature over rejected candidates, .029 at worst (seed 842): docs/papers/mcsd."""


def acceptance(
    name: str, p: Tensor, q: Tensor, k: int, how: How = "iid", **parameters: Any
) -> float:
    """Exact acceptance at one position, over every draft of k siblings."""
    target, draft = (constant_model(each.tolist(), 1) for each in (p, q))
    verifier = VERIFIERS[name].make(**parameters)
    return expected_accepted(verifier, sibling_drafts(draft, k, how), target)


@pytest.mark.parametrize("name", ["naive", "rrs", "kseq"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_is_the_formula_of_the_paper(name: str, k: int) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 3, 0.35 * (seed % 2 == 1))
        found = acceptance(name, p, q, k)
        assert found == pytest.approx(RULES[name](p, q, k), abs=1e-12)
        if name == "rrs":  # MCSD, appendix C
            assert found >= RULES["naive"](p, q, k) - 1e-12
        if name == "kseq":  # SpecTr's guarantee
            assert found >= (1 - math.exp(-1)) * optimal_acceptance(p, q, k) - 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_without_replacement_averages_over_the_rejected(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by BOUND at most, which falls with the quadrature's points."""
    for points, off in ((formulas.POINTS, BOUND), (4096, BOUND / 32)):
        monkeypatch.setattr(formulas, "POINTS", points)
        for seed in (*range(10), 842):
            p, q = random_distributions(seed, 5, 0.35 * (seed % 2 == 1))
            exact = acceptance("rrs_wor", p, q, k, "distinct")
            found = RULES["rrs_wor"](p, q, k)
            assert found == pytest.approx(exact, abs=off if k > 1 else 1e-12)


@pytest.mark.parametrize("alphabet", [None, 2])
def test_acceptance_of_a_selection_is_its_overlap_and_the_drafted_residual(
    alphabet: int | None,
) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 3)
        accepted = acceptance("importance", p, q, 2, solver="lp", alphabet=alphabet)
        found = RULES["importance"](p, q, 2, solver="lp", alphabet=alphabet)
        best = optimal_acceptance(p, q, 2)
        assert found <= accepted + 1e-12 <= best + 2e-12
        if alphabet is None:
            assert found == pytest.approx(best, abs=1e-9)


def test_two_fair_drafts_reach_theorem_3() -> None:
    found: dict[float, dict[str, float]] = {}
    for row in two_drafts([0.5, 0.5], 9):
        found.setdefault(row["x"], {})[row["scheme"]] = row["acceptance"]
    for x, accepted in found.items():
        # min over S of P(S) + Q(S^c)^2 + 2 Q(S) Q(S^c) = P(S) + 1 - Q(S)^2.
        best = accepted["optimal"]
        assert best == pytest.approx(min(1.0, x + 0.75, 1 - x + 0.75), abs=1e-12)
        assert accepted["SpecInfer"] <= accepted["SpecTr"] + 1e-12 <= best + 2e-12


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_draft_accepts_the_chosen_mass_and_the_overlap_of_the_rest(k: int) -> None:
    for seed in range(10):
        p, q = random_distributions(seed, 4, 0.35 * (seed % 2 == 1))
        if k > int((q > 0).sum()):
            continue
        chosen = q.argsort(descending=True, stable=True)[: k - 1]
        rest = q.index_fill(0, chosen, 0.0)
        expected = float(p[chosen].sum() + torch.minimum(p, rest / rest.sum()).sum())
        assert acceptance("greedy_draft", p, q, k, "greedy") == pytest.approx(expected, abs=1e-12)


def test_the_discount_is_the_smallest_that_is_valid() -> None:
    for seed in range(200):
        k = 2 + seed % 7
        p, q = random_distributions(seed, 2 + seed % 50, 0.35 * (seed % 3 == 1))
        rho = discount(p, q, k)
        betas = ((each, float(torch.minimum(q, p / each).sum())) for each in (rho, rho - 1e-9))
        here, below = (1 - (1 - beta) ** k - each * beta for each, beta in betas)
        assert here <= 1e-15
        assert below > 1e-12 or rho == 1.0


def test_greedy_draft_without_anything_left_to_draw_takes_what_p_gives() -> None:
    q = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    nothing = torch.zeros(2, dtype=torch.long)
    tree = DraftTree(torch.tensor([0, 2]), nothing, q[None], nothing, "siblings", "greedy")
    verdict = VERIFIERS["greedy_draft"].make()(tree, P3.expand(3, -1))
    expected = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
    torch.testing.assert_close(verdict.stop, expected)
