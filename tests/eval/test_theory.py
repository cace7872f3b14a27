"""Theorems against enumeration of the algorithms, linear programs and golden numbers."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from benchmarks.papers import theory
from eval.verifiers import VERIFIERS
from eval.verifiers.biased import opt_loss, uno_loss
from eval.verifiers.rule import Verifier
from tests.support.oracles import (
    Prefix,
    TabularModel,
    WeightedDrafts,
    chain_drafts,
    conditioned,
    constant_model,
    expected_accepted,
    markov_model,
    path_drafts,
    random_distributions,
    random_model,
    rounds_distribution,
)

P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


def counted_rejections(
    verifier: Verifier, p: TabularModel, q: TabularModel, horizon: int, paths: int
) -> float:
    """E[N_rej] by running the algorithm itself, which drafts to the horizon.

    Every round but the last, which emits the token behind the horizon, ends with a rejection.
    """

    def draft(sequence: Prefix, _: Verifier) -> WeightedDrafts:
        rest = max(1, horizon - len(sequence))
        models = [conditioned(q, sequence, rest)] * paths
        return chain_drafts(models[0], rest) if paths == 1 else path_drafts(models, rest)

    return rounds_distribution(verifier, p, horizon + 1, draft)[1] - 1


# --- rejections ---


@pytest.mark.parametrize(("paths", "zeros"), [(1, 0.0), (1, 0.4), (2, 0.0), (2, 0.4), (3, 0.0)])
def test_theorems_1_and_3_count_the_rejections_of_token_and_batch_verification(
    paths: int, zeros: float
) -> None:
    p, q = random_model(2, 4, 3, zeros), random_model(2, 4, 4, zeros)
    counted = counted_rejections(
        VERIFIERS["token" if paths == 1 else "batch"].make(), p, q, 3, paths
    )
    exact = theory.expected_rejections(p.__getitem__, q.__getitem__, 3, paths)
    assert float(exact.sum()) == pytest.approx(counted, abs=1e-12)


@pytest.mark.parametrize("q", [Q, (0.0, 0.4, 0.6), (0.9, 0.1, 0.0), (1.0, 0.0, 0.0)])
def test_limit_of_many_responses(q: Prefix) -> None:
    """It is reached from above, and is not zero: later positions still reject."""
    models = constant_model(P, 3).__getitem__, constant_model(q, 3).__getitem__
    limit = theory.expected_rejections(*models, 3, None)
    few, many = (theory.expected_rejections(*models, 3, responses) for responses in (4, 300))
    assert float((limit - many).abs().max()) < 1e-9
    assert float((few - limit).sum()) >= -1e-12
    assert float(limit.sum()) > 0.1


def test_merging_contexts_of_a_markov_chain_changes_nothing() -> None:
    rows = [[0.7, 0.3], [0.2, 0.8]], [[0.4, 0.6], [0.5, 0.5]]
    p, q = markov_model((0.5, 0.5), rows[0], 7), markov_model((0.8, 0.2), rows[1], 7)
    for memory in (1, 2):
        for responses in (1, 3):
            whole = theory.expected_rejections(p.__getitem__, q.__getitem__, 6, responses)
            merged = theory.expected_rejections(p.__getitem__, q.__getitem__, 6, responses, memory)
            assert float((whole - merged).abs().max()) < 1e-12


# --- accepted tokens ---

FORMULAS = {
    "token": theory.token_accepted,
    "block": theory.block_accepted,
    "greedy_block": theory.greedy_block_accepted,
}


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("name", FORMULAS)
def test_accepted_length_is_the_formula(name: str, zeros: float) -> None:
    for seed, vocabulary, length in [(1, 2, 4), (2, 3, 3), (3, 4, 2), (4, 5, 1)]:
        p = random_model(vocabulary, length, 10 * seed, zeros)
        q = random_model(vocabulary, length, 10 * seed + 1, zeros)
        counted = expected_accepted(VERIFIERS[name].make(), chain_drafts(q, length), p)
        exact = FORMULAS[name](p.__getitem__, q.__getitem__, length)
        assert float(exact[-1]) == pytest.approx(counted, abs=1e-12)


# --- rejection against bias ---


@pytest.mark.parametrize("seed", range(4))
def test_theorem_5_is_the_linear_program(seed: int) -> None:
    """The least bias at a given R, over acceptances and residuals at once: the straight line."""
    p, q = random_distributions(seed + 20, 4, 0.2)
    total = 1.0 - float(torch.minimum(p, q).sum())
    for rejected in (0.0, 0.3 * total, 0.8 * total, total, min(1.0, total + 0.1)):
        # Variables: kept mass k <= q (sum 1 - R), replaced mass c >= 0 (sum R), positive parts s.
        program = linprog(
            [0.0] * 8 + [1.0] * 4,
            A_ub=np.hstack([np.eye(4), np.eye(4), -np.eye(4)]),
            b_ub=p.numpy(),
            A_eq=[[1.0] * 4 + [0.0] * 8, [0.0] * 4 + [1.0] * 4 + [0.0] * 4],
            b_eq=[1.0 - rejected, rejected],
            bounds=[(0, mass) for mass in q.tolist()] + [(0, None)] * 8,
        )
        assert theory.least_bias_at(p, q, rejected) == pytest.approx(program.fun, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_opt_lies_on_the_line_and_uno_above_it(seed: int, epsilon: float) -> None:
    p, q = random_distributions(seed + 40, 4, 0.3)
    rejected = theory.rejection(q, theory.over_acceptance(p, q, epsilon))
    line = theory.least_bias_at(p, q, rejected)
    assert opt_loss(p, q, epsilon) == pytest.approx(line, abs=1e-12)
    assert uno_loss(p, q, epsilon) >= line - 1e-12


# --- optimal stopping ---
