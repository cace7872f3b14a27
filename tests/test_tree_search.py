"""The search for the best draft tree: its trace, its dynamic programme, its times, its report."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from eval.analysis import tree_search
from eval.analysis.static_trees import (
    Reals,
    Tree,
    best_trees,
    child_counts,
    depth_of,
    inner_nodes_of,
    k_configuration,
    monotone_configurations,
    nodes_of,
    positional_acceptance,
    positional_tokens,
    round_starts,
    survival,
)
from eval.analysis.tree_results import FOUND, TreeSearch, tree_parts
from eval.analysis.tree_search import TRACE, Pair, search_trees
from eval.analysis.tree_times import CHAINS, TREES, fit_rounds
from eval.analysis.tree_trace import (
    Excess,
    TreeTrace,
    Widths,
    distinct_ranks,
    iid_ranks,
    make_trace,
    read_trace,
    traversal_survival,
    write_trace,
)
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.drafts import How
from eval.measuring.methods import MethodConfig
from eval.measuring.results import Results
from eval.reporting.report import Context, write_report
from eval.reporting.trees import agreement_rows, headline
from eval.verifiers import VERIFIERS
from recipes.best_tree import why_not_searched
from recipes.config import PipelineConfig, parse
from recipes.run import KEYS
from specdata.probability import SamplingConfig
from specdata.seeds import generator_for
from specdata.storage.dataset import fill_dataset
from specdata.storage.files import write_json
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS
from tests.oracles import (
    TabularModel,
    chain_drafts,
    continuations,
    node_prefixes,
    random_model,
    target_rows,
    tree_drafts,
)
from tests.synthetic_results import synthetic_results
from tests.tiny import tiny_llama

MADE_OF = {"target": "t", "draft": "d", "rollouts": "r"}


# --- the trace: what is expected of a round, given the target's text --------------------------


def excess_along(p: TabularModel, q: TabularModel, texts: list[tuple[int, ...]]) -> Excess:
    """At every position of every text, in one line."""
    places = [(text[:at], text[at]) for text in texts for at in range(len(text))]
    return Excess.of(
        torch.stack([p[prefix] for prefix, _ in places]),
        torch.stack([q[prefix] for prefix, _ in places]),
        torch.tensor([token for _, token in places]),
    )


def grid(positions: int, ranks: int, points: int) -> torch.Tensor:
    """Uniforms that draw every sequence of rejected candidates as often as it is likely."""
    middles = [(at + 0.5) / points for at in range(points)]
    rows = [(*each, 0.5) for each in itertools.product(middles, repeat=ranks - 1)]
    return torch.tensor(rows, dtype=torch.float64).expand(positions, -1, -1)


def accepted_prefixes(
    name: str, p: TabularModel, q: TabularModel, widths: Widths, how: How
) -> dict[tuple[int, ...], float]:
    """P(a round accepts these tokens, and perhaps more), by enumeration of drafts and outcomes."""
    verifier, found = VERIFIERS[name].make(), dict[tuple[int, ...], float]()
    drafts = (
        chain_drafts(q, len(widths)) if name in ("token", "block") else tree_drafts(q, widths, how)
    )
    for weight, draft in drafts:
        stop = verifier(draft, target_rows(draft, p)).stop.tolist()
        for prefix, chance in zip(node_prefixes(draft), stop, strict=True):
            for depth in range(1, len(prefix) + 1):
                found[prefix[:depth]] = found.get(prefix[:depth], 0.0) + weight * chance
    return found


def survival_along(
    name: str, p: TabularModel, q: TabularModel, widths: Widths, texts: list[tuple[int, ...]]
) -> Reals:
    """(D, texts) what the trace says of the same rounds, at the beginning of each text."""
    depth, along = len(widths), excess_along(p, q, texts)
    rows = torch.arange(len(texts)).repeat_interleave(depth)
    if name == "traversal":
        found = traversal_survival(along, rows, widths, len(rows))
        return found[::depth].T.numpy()
    shape, ratio = (len(texts), depth), along.q_over_p.numpy().reshape(len(texts), depth)
    if name in ("token", "block"):
        nothing = np.zeros((*shape, 1))
        lengths = np.full(len(texts), depth)
        trace = TreeTrace((), (), lengths, ratio, nothing, nothing, {})
        return trace.chain(depth, block=name == "block")[:, :, 0]
    ranks = (
        iid_ranks(along, max(widths))
        if name == "rrs"
        else distinct_ranks(along, grid(len(rows), max(widths), 24 if max(widths) > 2 else 300))
    )
    return survival(k_configuration(widths), ranks.numpy().reshape(*shape, -1))[:, :, 0]


@pytest.mark.parametrize(
    ("name", "widths", "how", "tolerance"),
    [
        ("token", (1, 1, 1), "iid", 1e-9),
        ("block", (1, 1, 1), "iid", 1e-9),
        ("rrs", (2, 2), "iid", 1e-9),
        ("rrs", (3, 1), "iid", 1e-9),
        ("traversal", (2, 2), "iid", 1e-9),
        ("traversal", (3, 1), "iid", 1e-9),
        ("traversal", (1, 2, 1), "iid", 1e-9),
        # Drawn by a grid of uniforms, so a little of each sequence's chance is rounded.
        ("rrs_wor", (2, 2), "distinct", 5e-3),
        ("rrs_wor", (3, 1), "distinct", 4e-2),
    ],
)
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_the_chance_that_a_round_accepts_a_text_is_that_of_its_verifier_given_the_text(
    name: str, widths: Widths, how: How, tolerance: float, zeros: float
) -> None:
    for seed in range(2):
        p, q = (random_model(3, len(widths), 2 * seed + own, zeros) for own in (0, 1))
        texts = continuations(p, len(widths))
        accepted = accepted_prefixes(name, p, q, widths, how)
        survived = survival_along(name, p, q, widths, [text for _, text in texts])
        for number, (_, text) in enumerate(texts):
            for depth in range(1, len(widths) + 1):
                mass = 1.0
                for at in range(depth):
                    mass *= float(p[text[:at]][text[at]])
                expected = accepted.get(text[:depth], 0.0)
                got = mass * survived[depth - 1, number]
                assert got == pytest.approx(expected, abs=tolerance), (seed, text[:depth])


def test_candidates_that_the_draft_cannot_draw_are_not_accepted() -> None:
    """Where q has two tokens there is no third candidate without replacement."""
    p = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    for token, most in ((0, 1.0), (2, 0.0)):
        along = Excess.of(p, q, torch.tensor([token]))
        ranks = distinct_ranks(along, torch.rand(1, 50, 5, dtype=torch.float64))
        assert ranks.sum() == pytest.approx(most)
        assert ranks[0, 2:].abs().max() < 1e-12
        assert torch.isfinite(iid_ranks(along)).all()


def test_the_rounds_of_a_text_follow_from_left_to_right() -> None:
    lengths = np.array([5, 3])
    inside = np.arange(5) < lengths[:, None]
    always = survival(k_configuration([1, 1]), np.ones((2, 5, 1)) * inside[..., None])
    # Three tokens a round, the bonus token among them.
    assert round_starts(always, lengths).tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 0]]
    never = survival(k_configuration([1, 1]), np.zeros((2, 5, 1)))
    assert round_starts(never, lengths).sum(axis=1).tolist() == [5, 3]
    half = survival(k_configuration([1]), np.full((1, 3, 1), 0.5))
    assert round_starts(half, np.array([3])).tolist() == [[1.0, 0.5, 0.75]]


@pytest.mark.parametrize(
    "settings",
    [
        {"verifier": "token", "length": 3},
        {"verifier": "rrs_wor", "drafter": "tree", "widths": (3, 2), "siblings": "distinct"},
        {"verifier": "traversal", "drafter": "tree", "widths": (2, 2, 1), "siblings": "iid"},
    ],
    ids=lambda settings: settings["verifier"],
)
def test_the_decoder_takes_as_many_rounds_as_the_trace_expects_of_its_text(
    settings: dict[str, object],
) -> None:
    """Given the text that was emitted the rounds are still random; on average they agree."""
    target, draft = tiny_llama(0, vocab=8), tiny_llama(1, vocab=8)
    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig(**settings))  # type: ignore[arg-type]
    rows, taken = [], []
    for number in range(40):
        ids = [2 + number % 6, 3]
        made = decoder.generate(
            torch.tensor(ids), max_new_tokens=16, generator=generator_for(0, number)
        )
        rows.append(row(number, ids, made.tokens.tolist()))
        taken.append(len(made.rounds))
    widths = settings.get("widths", ())
    trace = make_trace(
        datasets.Dataset.from_list(rows),
        target=target,
        draft=draft,
        sampling=SamplingConfig(),
        seed=0,
        traversal=[widths] if settings["verifier"] == "traversal" else [],  # type: ignore[list-item]
    )
    survived = {
        "token": lambda: trace.chain(3, block=False),
        "rrs_wor": lambda: survival(k_configuration((3, 2)), trace.distinct),
        "traversal": lambda: trace.traversal[2, 2, 1],
    }[str(settings["verifier"])]()
    expected = round_starts(survived, trace.lengths).sum(axis=1)
    difference = np.array(taken) - expected
    assert abs(difference.mean()) < 4 * difference.std() / len(rows) ** 0.5
    assert expected.sum() == pytest.approx(sum(taken), rel=0.1)


def row(number: int, prompt: list[int], completion: list[int]) -> dict[str, object]:
    made = {"example_id": f"e{number}", "dataset": f"d{number % 2}", "sample": 0, "turn": 0}
    made |= {"split": "dev", "finish": "length"}
    return made | {"prompt_ids": prompt, "completion_ids": completion}


def test_a_trace_is_read_again_by_those_who_made_it_of_the_same(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    ranks = [chance.random((2, 5, 4)).astype(np.float32).astype(np.float64) for _ in range(3)]
    trace = TreeTrace(
        ("a", "b"), ("x", "y"), np.array([5, 3]), ranks[0][..., 0], *ranks[1:], {(2, 1): ranks[0]}
    )
    path = tmp_path / "trace.safetensors"
    assert read_trace(path, MADE_OF) is None
    write_trace(path, trace, MADE_OF)
    known = read_trace(path, MADE_OF)
    assert known is not None
    assert (known.names, known.prompts) == (trace.names, trace.prompts)
    for name in ("lengths", "ratio", "iid", "distinct"):
        assert (getattr(known, name) == getattr(trace, name)).all()
    assert (known.traversal[2, 1] == ranks[0]).all()
    assert read_trace(path, {**MADE_OF, "draft": "another"}) is None
    path.write_bytes(b"damaged")
    assert read_trace(path, MADE_OF) is None


def test_a_large_vocabulary_is_looked_at_in_fewer_rollouts_of_every_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = datasets.Dataset.from_list([row(n, [2], [2, 3, 4, 5]) for n in range(12)])
    monkeypatch.setattr("eval.analysis.tree_trace.VALUES", 100 * 24)
    model = tiny_llama(0, vocab=100)
    trace = make_trace(rows, target=model, draft=model, sampling=SamplingConfig(), seed=0)
    assert trace.prompts == ("e0", "e1", "e2", "e3", "e4", "e5")
    assert trace.ratio == pytest.approx(np.ones((6, 4)))  # it is its own draft


# --- trees ------------------------------------------------------------------------------------


def every_tree(nodes: int) -> Iterator[Tree]:
    """All ordered trees with so many nodes below the root."""

    @cache
    def forests(n: int) -> tuple[Tree, ...]:
        if n == 0:
            return ((),)
        return tuple(
            (first, *rest)
            for size in range(n)
            for first in forests(size)
            for rest in forests(n - 1 - size)
        )

    yield from forests(nodes)


def test_trees_are_counted_as_they_are() -> None:
    tree = k_configuration((4, 2, 1))
    assert (nodes_of(tree), depth_of(tree), inner_nodes_of(tree)) == (20, 3, 13)
    assert child_counts(tree) == [[4], [2] * 4, [1] * 8]
    assert tree_search._tree_of(child_counts(tree)) == tree
    uneven: Tree = (((), ((),)), ())
    assert child_counts(uneven) == [[2], [2, 0], [0, 1]]
    assert tree_search._tree_of(child_counts(uneven)) == uneven
    assert tree_parts(uneven) == (1.0, 3.0, 3.0, 5.0)


def test_the_survival_of_a_tree_is_the_sum_over_its_nodes() -> None:
    ranks = np.random.default_rng(0).random((2, 6, 3)) / 3
    tree: Tree = ((((), ()), ()), (), ((),))
    survived = survival(tree, ranks)
    by_hand = np.zeros((3, 2))

    def add(node: Tree, depth: int, weight: Reals) -> None:
        for rank, child in enumerate(node):
            here = weight * ranks[:, 1 + depth, rank]
            by_hand[depth] += here
            add(child, depth + 1, here)

    add(tree, 0, np.ones(2))
    assert survived[:, :, 1] == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="knows 3 ranks, and a node has 4"):
        survival(k_configuration((4,)), ranks)


def test_k_configurations_are_those_that_widen_nowhere() -> None:
    found = set(monotone_configurations(8, depth=3))
    every = {
        widths
        for depth in (1, 2, 3)
        for widths in itertools.product(range(1, 9), repeat=depth)
        if list(widths) == sorted(widths, reverse=True) and np.prod(widths) <= 8
    }
    assert found == every
    assert (4, 2, 2, 1, 1) in set(monotone_configurations(16))
    assert (4, 2, 2, 2) not in set(monotone_configurations(16))


@pytest.fixture(scope="module")
def acceptance() -> Reals:
    """(4, 6) of ranks, falling, at four depths."""
    falling = np.sort(np.random.default_rng(1).random((4, 6)))[:, ::-1]
    return np.ascontiguousarray(0.9 * falling / falling.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_dynamic_programme_finds_the_best_of_all_trees(acceptance: Reals, depth: int) -> None:
    known = acceptance[:depth]
    found = best_trees(known, 6)
    for nodes in range(7):
        values = [
            positional_tokens(tree, known) for tree in every_tree(nodes) if depth_of(tree) <= depth
        ]
        best = found[nodes]
        assert best.tokens == pytest.approx(max(values))
        assert positional_tokens(best.tree, known) == pytest.approx(best.tokens)
        assert nodes_of(best.tree) <= nodes
        assert depth_of(best.tree) <= depth


def test_more_nodes_and_levels_are_never_worse_and_no_k_configuration_is_better() -> None:
    chance = np.random.default_rng(2)
    falling = np.sort(chance.random((8, 32)) ** 6, axis=1)[:, ::-1]
    acceptance = 0.95 * falling / falling.sum(axis=1, keepdims=True)
    found = best_trees(acceptance, 32)
    values = [best.tokens for best in found]
    assert values[0] == 1.0
    assert values == sorted(values)
    for depth in range(1, 8):
        shallow = best_trees(acceptance[:depth], 32)
        assert all(one.tokens <= other.tokens for one, other in zip(shallow, found, strict=True))
    compared = 0
    for widths in monotone_configurations(32):
        tree = k_configuration(widths)
        if nodes_of(tree) <= 32:
            assert found[nodes_of(tree)].tokens >= positional_tokens(tree, acceptance) - 1e-12
            compared += 1
    assert compared > 50
    with pytest.raises(ValueError, match="negative"):
        best_trees(-acceptance, 4)


def test_acceptance_by_depth_is_that_of_texts_whose_earlier_tokens_were_accepted() -> None:
    """Of two texts one is accepted always and one never: deeper, only the first is left."""
    ranks = np.zeros((2, 4, 2))
    ranks[0, :, 0] = 1.0
    lengths, starts = np.array([4, 4]), np.zeros((2, 4))
    starts[:, 0] = 1.0
    made = positional_acceptance(ranks, lengths, starts, depth=3)
    assert made[:, 0].tolist() == [0.5, 1.0, 1.0]
    assert made[:, 1].tolist() == [0.0, 0.0, 0.0]


# --- times ------------------------------------------------------------------------------------


def test_times_of_rounds_are_found_again_and_none_is_negative() -> None:
    chains = {length: 0.010 + 0.001 * length for length in CHAINS}
    parts = np.array([tree_parts(k_configuration(widths)) for widths in TREES])
    seconds = parts @ np.array([0.011, 0.002, 0.0003, 0.0001])
    trees = dict(zip(TREES, seconds.tolist(), strict=True))
    found = fit_rounds(chains, trees)
    assert found.chain(7) == pytest.approx(0.017)
    assert found.tree(k_configuration((3, 2))) == pytest.approx(0.011 + 0.004 + 0.0012 + 0.0009)
    assert found.largest_error < 1e-6
    shrinking = fit_rounds({1: 0.02, 4: 0.015, 10: 0.01}, trees)
    assert shrinking.chain_token == 0.0
    with pytest.raises(ValueError, match="1 shapes were timed, and 2 times"):
        fit_rounds({1: 0.01, 4: float("nan"), 10: float("nan")}, trees)


# --- the whole search -------------------------------------------------------------------------

METHODS = [
    MethodConfig.model_validate(given)
    for given in (
        {"name": "plain", "decoder": "plain"},
        {"name": "K=4", "length": 4},
        {"name": "block", "verifier": "block", "length": 4},
        {"name": "confident", "stop": "confidence"},
        {"name": "walk", "verifier": "rrs_wor", "drafter": "tree", "widths": [3, 2]},
        {"name": "climb", "verifier": "traversal", "drafter": "tree", "widths": [2, 2]},
        {"name": "other", "verifier": "kseq", "drafter": "tree", "widths": [2, 2]},
    )
]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[TreeSearch, Path]:
    folder = tmp_path_factory.mktemp("search")
    target, draft = tiny_llama(0, vocab=8), tiny_llama(3, vocab=8)
    for model in (target, draft):  # texts as long as is asked for
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
    plain = SpeculativeDecoder.from_config(target, None, DecodeConfig())
    rows = []
    for number in range(6):
        ids = [2 + number, 3]
        made = plain.generate(
            torch.tensor(ids), max_new_tokens=20, generator=generator_for(1, number)
        )
        rows.append(row(number, ids, made.tokens.tolist()))
    found = search_trees(
        datasets.Dataset.from_list(rows),
        Pair(target, draft, SamplingConfig(), "eager", 20, 0),
        folder,
        methods=METHODS,
        made_of=MADE_OF,
    )
    found.write(folder / FOUND)
    return found, folder


def test_a_search_compares_chains_and_trees_and_times_the_short_list(
    searched: tuple[TreeSearch, Path],
) -> None:
    found, folder = searched
    assert (found.rollouts, found.positions) == (6, 120)
    assert {each.family for each in found.candidates} == set(found.frontier)
    assert found.searched == sum(widths[0] > 1 for widths in monotone_configurations(32))
    timed = found.clocked()
    assert len(timed) == 5
    assert {each.verifier for each in timed if each.family != "chain"} == {"rrs_wor", "traversal"}
    assert sum(each.clocked.speed is None for each in timed if each.clocked) == 1
    paths = [each.paths for each in found.candidates if each.family == "k-configuration"]
    assert max(paths) <= 32
    assert any(count > 16 for count in paths)
    # One candidate of either kind is the same; more are better without replacement.
    accepted = found.accepted
    assert accepted["iid"][0] == pytest.approx(accepted["distinct"][0], rel=1e-5)
    assert accepted["distinct"][3] > accepted["iid"][3]
    assert all(np.diff(values).min() > -1e-9 for values in accepted.values())
    assert TreeSearch.read(folder / FOUND, MADE_OF) == found
    assert TreeSearch.read(folder / FOUND, {**MADE_OF, "target": "another"}) is None


def test_methods_that_a_trace_covers_are_predicted_and_others_are_not(
    searched: tuple[TreeSearch, Path],
) -> None:
    found, _ = searched
    predicted = {(each.dataset, each.method) for each in found.predictions}
    covered = ("K=4", "block", "walk", "climb")
    assert predicted == {(name, method) for name in ("d0", "d1") for method in covered}
    here = [each for each in found.predictions if each.dataset == "d0"]
    by_method = {each.method: each.tokens.value for each in here}
    assert by_method["block"] >= by_method["K=4"]
    assert all(each.tokens.low <= each.tokens.value <= each.tokens.high for each in here)


def test_a_trace_that_is_kept_is_not_made_again(
    searched: tuple[TreeSearch, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = searched
    rows = datasets.Dataset.from_list([row(0, [2, 3], [2] * 20)])
    # Another model would give another trace; what is kept is taken without looking at it.
    pair = Pair(tiny_llama(0, vocab=8), tiny_llama(9, vocab=8), SamplingConfig(), "eager", 20, 0)
    kept = tree_search._trace(rows, pair, folder / TRACE, METHODS, MADE_OF)
    assert len(kept.lengths) == 6
    deeper = MethodConfig.model_validate(
        {"name": "b", "verifier": "traversal", "drafter": "tree", "widths": [2, 1, 1]}
    )
    copy = folder / "copy.safetensors"
    copy.write_bytes((folder / TRACE).read_bytes())
    made = tree_search._trace(rows, pair, copy, [deeper], MADE_OF)  # it was not followed on that
    assert len(made.lengths) == 1


def test_the_report_has_the_search_beside_the_chain(
    searched: tuple[TreeSearch, Path], tmp_path: Path
) -> None:
    found, _ = searched
    results = two_methods()
    page = write_report(results, tmp_path, Context(trees=found)).read_text(encoding="utf-8")
    assert headline(found) in page
    assert (tmp_path / "trees.png").is_file()
    for each in found.candidates:
        assert each.name in page
    (both,) = [each for each in agreement_rows(found, results) if each.method == "K=4"]
    assert both.dataset == "d0"
    assert both.cells[1] in page
    for speed, word in ((1.5, "A tree pays"), (0.5, "No tree pays"), (1.0, "not told apart")):
        assert word in headline(with_speed(found, speed))


def two_methods() -> Results:
    """Results of plain decoding and of one chain, which take no time to draw."""
    results = synthetic_results(datasets=("d0",))
    plain, other = results.runs[:2]
    runs = [plain, other.model_copy(update={"method": "K=4"})]
    return results.model_copy(update={"runs": runs})


def with_speed(found: TreeSearch, speed: float) -> TreeSearch:
    """The same search, had every timed tree been so much faster than the chain."""
    changed = []
    for each in found.candidates:
        clocked = each.clocked
        if clocked and clocked.speed:
            interval = replace(clocked.speed, value=speed, low=speed - 0.1, high=speed + 0.1)
            clocked = clocked.model_copy(update={"speed": interval})
        changed.append(each.model_copy(update={"clocked": clocked}))
    return found.model_copy(update={"candidates": changed})


def evaluated(folder: Path, *flags: str, tree: bool = True) -> PipelineConfig:
    methods = "[{name: plain, decoder: plain}, {name: a}"
    methods += ", {name: t, drafter: tree, widths: [2], verifier: rrs}]" if tree else "]"
    return parse([f"--output={folder}", "--eval.methods", methods, *flags], "").config


def test_a_run_that_cannot_search_says_why(tmp_path: Path) -> None:
    assert "no method of this evaluation draws one" in why_not_searched(
        evaluated(tmp_path, tree=False)
    )
    greedy = evaluated(tmp_path, "--sampling.temperature=0")
    assert "temperature 0" in why_not_searched(greedy)
    together = evaluated(tmp_path, "--eval.batch=4", "--eval.engine=eager")
    assert "nothing is timed" in why_not_searched(together)
    assert "this run has none" in why_not_searched(evaluated(tmp_path))
    rollouts = tmp_path / "rollouts"
    write_json(rollouts / "run.json", {key: {} for key in KEYS} | {"finished": True})
    assert "holds no dataset" in why_not_searched(evaluated(tmp_path))
    stored = Settings({"sampling": {"temperature": 0.5}})
    rows = [lambda: [row(0, [2], [3])]]
    fill_dataset(rollouts, ROLLOUTS, stored, rows, lambda done: None)
    warmer = evaluated(tmp_path, "--sampling.temperature=0.5")
    assert "sampled otherwise" in why_not_searched(evaluated(tmp_path))
    assert why_not_searched(warmer) == ""
    sets = "--rollouts.sets=[{name: instruct, split: train, count: 1}]"
    assert "no set of split dev" in why_not_searched(
        evaluated(tmp_path, sets, "--sampling.temperature=0.5", "--head", "null")
    )
    page = write_report(two_methods(), tmp_path / "page", Context(no_trees="Because <of> it."))
    assert "Because &lt;of&gt; it." in page.read_text(encoding="utf-8")
