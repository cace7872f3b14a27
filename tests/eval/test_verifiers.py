"""Properties of every verifier: each entry of VERIFIERS over each form of draft it takes.

A new verifier needs no new test here: its entry in VERIFIERS adds it to every test below.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.verifiers import VERIFIERS
from eval.verifiers.rule import GeneratorRng, Verifier
from tests.support.chi_square import p_value, power_of_shift
from tests.support.oracles import (
    CASES,
    Case,
    TabularModel,
    joint_distribution,
    node_prefixes,
    output_distribution,
    random_distribution,
    random_model,
    target_rows,
    total_variation,
)


def every_verifier() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, spec in VERIFIERS.items():
        for parameters in spec.examples or spec.grid:
            yield name, parameters


def label(name: str, parameters: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in parameters.items())])


def over_cases(lossless: bool | None = None) -> list[Any]:
    """A pytest parameter (verifier, case) for every form that every verifier takes."""
    parameters_of_tests = []
    for name, parameters in every_verifier():
        if lossless is not None and VERIFIERS[name].lossless is not lossless:
            continue
        verifier = VERIFIERS[name].make(**parameters)
        for title, case in CASES.items():
            if case.kind in verifier.takes:
                title_of = f"{label(name, parameters)}: {title}"
                parameters_of_tests.append(pytest.param(verifier, case, id=title_of))
    return parameters_of_tests


def over_kinds() -> list[Any]:
    """The same with a single case for every kind of draft."""
    by_kind = {(str(case.id).split(":")[0], case.values[1].kind): case for case in over_cases()}
    return list(by_kind.values())


EVERY_VERIFIER = [
    pytest.param(VERIFIERS[n].make(**kw), id=label(n, kw)) for n, kw in every_verifier()
]
# Rules for one position read the nodes on their way only, and `batch` does too; the other rules for
# a whole draft read a whole path or subtree.
READS_WHOLE_PATHS = {name for name, spec in VERIFIERS.items() if spec.whole_draft} - {"batch"}


def first_drafts(
    case: Case, seed: int, zeros: float = 0.0
) -> tuple[DraftTree, Tensor, TabularModel]:
    """One draft of a case that has the kind itself, the target's rows for it, and the target."""
    p, _, drafts = case.enumerated(seed, zeros)
    _, tree = max(drafts, key=lambda pair: (pair[1].kind == case.kind, pair[0]))
    return tree, target_rows(tree, p), p


# --- the distributions ---


@pytest.mark.parametrize(("seed", "zeros"), [(1, 0.0), (2, 0.35)])
@pytest.mark.parametrize(("verifier", "case"), over_cases(lossless=True))
def test_output_distribution_is_the_target_distribution(
    verifier: Verifier, case: Case, seed: int, zeros: float
) -> None:
    p, q, drafts = case.enumerated(seed, zeros)
    assert math.fsum(weight for weight, _ in drafts) == pytest.approx(1.0, abs=1e-12)
    emitted = output_distribution(verifier, iter(drafts), p, case.depth + 1, q)
    assert total_variation(emitted, joint_distribution(p, (), case.depth + 1)) <= 1e-12


@pytest.mark.parametrize("verifier", EVERY_VERIFIER)
def test_refuses_every_form_it_has_no_proof_for(verifier: Verifier) -> None:
    kinds = set()
    for case in CASES.values():
        if case.kind in verifier.takes:
            continue
        tree, target, _ = first_drafts(case, 4)
        assert tree.kind == case.kind
        kinds.add(case.kind)
        with pytest.raises(ValueError, match=r"is proved for .*; got ") as refused:
            verifier(tree, target)
        assert all(taken in str(refused.value) for taken in verifier.takes)
        with pytest.raises(ValueError, match=r"is proved for .*; got "):
            verifier.draw(tree, target, torch.Generator())
    assert kinds | set(verifier.takes) == {case.kind for case in CASES.values()}


# --- sampling ---


def test_the_decoders_random_numbers_follow_the_weights() -> None:
    """Of what samples for every rule: fails by chance once in ten thousand."""
    rng, draws, weights = (
        GeneratorRng(torch.Generator().manual_seed(2)),
        2_000,
        (1.5, 0.0, 2.0, 0.5),
    )
    counts = Counter(rng.categorical(weights) for _ in range(draws))
    exact = {index: weight / sum(weights) for index, weight in enumerate(weights)}
    assert power_of_shift(exact, 0.1, draws, 1e-4) > 0.99
    assert p_value(counts, exact) > 1e-4
    accepted = Counter(int(rng.bernoulli(0.3)) for _ in range(draws))
    assert p_value(accepted, {1: 0.3, 0: 0.7}) > 1e-4


@pytest.mark.parametrize(
    ("verifier", "case"), [c for c in over_kinds() if c.values[0].name not in READS_WHOLE_PATHS]
)
def test_sampling_reads_only_the_nodes_on_its_way(verifier: Verifier, case: Case) -> None:
    tree, target, _ = first_drafts(case, 6)
    prefixes = node_prefixes(tree)
    for seed in range(8):
        drawn = verifier.draw(tree, target, torch.Generator().manual_seed(seed))
        end = prefixes[drawn.nodes[-1]] if drawn.nodes else ()
        hidden = target.clone()
        for node, prefix in enumerate(prefixes):
            if prefix != end[: len(prefix)]:
                hidden[node] = float("nan")
        again = verifier.draw(tree, hidden, torch.Generator().manual_seed(seed))
        assert (again.nodes, again.token) == (drawn.nodes, drawn.token)


# --- edges ---


MakeDistribution = Callable[[int, torch.Generator], Tensor]


def one_hot(vocabulary: int, generator: torch.Generator) -> Tensor:
    distribution = torch.zeros(vocabulary, dtype=torch.float64)
    distribution[int(torch.randint(vocabulary, (), generator=generator))] = 1.0
    return distribution


def within(keep: slice) -> MakeDistribution:
    def distribution(vocabulary: int, generator: torch.Generator) -> Tensor:
        whole = torch.zeros(vocabulary, dtype=torch.float64)
        whole[keep] = random_distribution(len(range(vocabulary)[keep]), generator)
        return whole

    return distribution


def subnormal(vocabulary: int, generator: torch.Generator) -> Tensor:
    distribution = random_distribution(vocabulary, generator)
    distribution[0] = 0.0
    distribution = distribution / distribution.sum()
    distribution[0] = 5e-324
    return distribution


# The distribution of the target and of the draft at every position; "equal" has both the same.
EDGES: Mapping[str, tuple[MakeDistribution, MakeDistribution]] = {
    "one-hot target": (one_hot, random_distribution),
    "one-hot both": (one_hot, one_hot),
    "equal": (random_distribution, random_distribution),
    "disjoint": (within(slice(0, 1)), within(slice(1, None))),
    "one token in common": (within(slice(0, 2)), within(slice(1, None))),
    "subnormal draft": (random_distribution, subnormal),
    "subnormal target": (subnormal, random_distribution),
}


def edge_models(case: Case, edge: str) -> tuple[TabularModel, list[TabularModel]]:
    """The target and the drafts of a named edge."""
    generator = torch.Generator().manual_seed(8)
    target_distribution, draft_distribution = EDGES[edge]
    prefixes = list(random_model(case.vocabulary, case.depth, 0))
    p = {prefix: target_distribution(case.vocabulary, generator) for prefix in prefixes}
    if edge == "equal":
        return p, [p] * case.draft_models
    return p, [
        {prefix: draft_distribution(case.vocabulary, generator) for prefix in prefixes}
        for _ in range(case.draft_models)
    ]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(
    "verifier",
    [
        pytest.param(v.values[0], id=v.id)
        for v in EVERY_VERIFIER
        if VERIFIERS[v.values[0].name].lossless
    ],
)
def test_edges_are_finite_and_lossless(verifier: Verifier, edge: str) -> None:
    for kind in verifier.takes:
        case = next(case for case in CASES.values() if case.kind == kind and case.depth <= 2)
        p, qs = edge_models(case, edge)
        drafts = list(case.drafts(qs))
        emitted = output_distribution(verifier, iter(drafts), p, case.depth + 1, qs[0])
        # Not a number is not close either.
        assert total_variation(emitted, joint_distribution(p, (), case.depth + 1)) <= 1e-12
        if edge == "disjoint":
            assert all(float(verifier(t, target_rows(t, p)).stop[0]) == 1 for _, t in drafts)


# --- precision ---


def wide_draft(kind: str, distributions: Tensor, generator: torch.Generator) -> DraftTree:
    """A draft with two candidates a position, from distributions (3, V).

    Greedy and distinct candidates are in rank order.
    """
    first, second, other = distributions
    how = kind.rsplit(" ", 1)[-1]
    pair = torch.multinomial(
        first, 2, replacement=how in ("iid", "independent", "chain"), generator=generator
    )
    if how == "greedy":
        pair = torch.stack([first.argmax(), pair[pair != first.argmax()][0]])
    after = torch.multinomial(second, 2, replacement=True, generator=generator)
    if kind == "chain":
        return DraftTree.chain(torch.stack([pair[0], after[0]]), distributions[:2])
    if kind.startswith("paths"):
        last = other if how == "independent" else first
        q = torch.stack([distributions[:2], torch.stack([last, second])])
        return DraftTree.paths(torch.stack([pair, after], dim=1), q)
    if kind == "siblings, independent":
        return DraftTree.siblings(pair, torch.stack([first, other]))
    if kind.startswith("siblings"):
        return DraftTree.siblings(pair, first, how)
    return DraftTree.tree(
        (2, 1), torch.cat([pair, after]), torch.stack([first, second, second]), how
    )


@pytest.mark.parametrize("verifier", EVERY_VERIFIER)
def test_float32_agrees_with_float64(verifier: Verifier, request: Any) -> None:
    """Probabilities of stopping, and of what is emitted where it stops, to 2e-5."""
    vocabulary = 60 if "solver=lp" in request.node.name else 3000
    generator = torch.Generator().manual_seed(vocabulary)
    # One distribution a depth is enough: node i's target is that of its depth.
    logits = 3 * torch.randn(3, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, vocabulary, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1), (logits + 0.5 * noise).softmax(-1)
    for kind in verifier.takes:
        tree = wide_draft(kind, q, generator)
        assert tree.kind == kind
        rows = torch.tensor([len(prefix) for prefix in node_prefixes(tree)])
        wide = verifier(tree, p[rows])
        narrow = verifier(
            dataclasses.replace(tree, distributions=tree.distributions.float()), p[rows].float()
        )
        assert narrow.stop.dtype == narrow.bonus.dtype == torch.float32
        assert float((wide.stop - narrow.stop.double()).abs().max()) < 2e-5
        gap = (wide.bonus - narrow.bonus.double()).abs().sum(-1) * wide.stop
        assert float(gap.max()) < 4e-5


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("biased_opt", {}),
        ("biased_uno", {"epsilon": None}),
        ("biased_uno", {"epsilon": "0.1"}),
        ("importance", {"s": 2.5}),
        ("importance", {"alphabet": float("nan")}),
        ("importance", {"solver": "simplex"}),
        ("block", {"epsilon": 0.1}),
    ],
)
def test_unusable_parameters_are_value_errors(name: str, parameters: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own text)
        VERIFIERS[name].make(**parameters)


@pytest.mark.parametrize(
    "row", [[float("nan"), 0.5], [0.5, 0.2], [1.5, -0.5]], ids=["nan", "sum", "negative"]
)
def test_a_target_that_is_no_distribution_is_refused(row: list[float]) -> None:
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    target = torch.tensor([row, row], dtype=torch.float64)
    with pytest.raises(ValueError, match="target must hold distributions"):
        VERIFIERS["token"].make()(DraftTree.chain(torch.tensor([0]), q), target)
    with pytest.raises(ValueError, match="float32 or wider"):
        VERIFIERS["token"].make()(DraftTree.chain(torch.tensor([0]), q), target.half())
    with pytest.raises(ValueError, match=r"target must be \(N\+1, V\)"):
        VERIFIERS["token"].make()(DraftTree.chain(torch.tensor([0]), q), target[:-1])


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_has_the_name_and_the_paper_of_its_entry(name: str) -> None:
    spec = VERIFIERS[name]
    verifier = spec.make(**(spec.examples or spec.grid)[0])
    assert verifier.name == name
    assert verifier.branching is any(kind != "chain" for kind in verifier.takes)
    assert re.search(r"arXiv:\d{4}\.\d{5}|ICLR", verifier.paper)
