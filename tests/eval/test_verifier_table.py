"""The table of all verifiers: what a call is expected to emit is what decoding emits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval.analysis.forms import FORMS
from eval.analysis.round_times import RoundSeconds
from eval.analysis.verifier_table import (
    Enumerated,
    Expected,
    Scored,
    TableInputs,
    drafted,
    expected,
    reduced,
    verifier_rows,
    verifier_table,
)
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.measuring.pooled import ALL_SETS
from eval.measuring.records import PromptRecord
from eval.measuring.results import ENOUGH, Results
from eval.reporting.verifiers import of_all, section, verifier_sentence
from eval.verifiers import VERIFIERS
from recipes.command import run_tool
from specdata.models import end_ids
from specdata.sampling import SamplingConfig, generator_for
from tests.support.oracles import chain_drafts, node_prefixes, random_model, target_rows
from tests.support.states_draft import pair as states_pair
from tests.support.synthetic_results import verifier_row
from tests.support.tiny import END, tiny_llama

CHAIN: dict[str, Any] = {"drafter": "chain", "length": 3}
TREE: dict[str, Any] = {"drafter": "tree", "widths": (2, 2)}

TINY = tiny_llama(1, vocab=6), tiny_llama(4, vocab=6)


def tiny_prompts(texts: int) -> list[torch.Tensor]:
    """Short prompts of the tiny pair."""
    return [torch.tensor([0, 2 + index % 4, 2 + index // 4 % 4]) for index in range(texts)]


def table_at(
    settings: dict[str, Any],
    references: tuple[str, ...],
    names: list[str],
    prompts: list[torch.Tensor],
) -> tuple[dict[str, Expected], dict[str, Enumerated], list[Any]]:
    """Verifiers at every round of texts."""
    ends = end_ids(TINY[0].generation_config)
    verifiers = {
        name: Enumerated(DecodeConfig(verifier=name, **settings), ends)
        for name in {*references, *names}
    }
    starts = drafted(
        *TINY,
        prompts,
        DecodeConfig(verifier=references[0], **settings),
        references=[verifiers[name].verifier for name in references],
        max_new_tokens=16,
    )
    asked = [verifiers[name] for name in references]
    texts = range(len(prompts))
    return (
        {name: expected(verifiers[name], asked, starts, texts) for name in names},
        verifiers,
        starts,
    )


def test_a_place_counts_by_how_a_round_ends_there_and_a_call_emits_what_its_verdict_says() -> None:
    table, verifiers, starts = table_at(TREE, ("rrs", "naive"), ["kseq"], tiny_prompts(6))
    checked = 0
    for index, place in enumerate(starts):
        if len(place.tree):
            stop = verifiers["kseq"].verifier(place.tree, place.target).stop
            paths = [
                [place.tree.token_list[n - 1] for n in place.tree.path_to(node)]
                for node in range(len(stop))
            ]
            emitted = [len(path) + (END not in path) for path in paths]
            assert table["kseq"].tokens[index] == pytest.approx(
                float(stop @ torch.tensor(emitted, dtype=stop.dtype)), abs=1e-12
            )
        if place.before is None:
            assert table["kseq"].weight[index] == 1.0
            continue
        last, chance = place.before, {}
        path = last.paths[last.node]
        for name in ("kseq", "rrs", "naive"):
            verdict = verifiers[name].verifier(last.tree, last.target)
            ends = verdict.stop * verdict.bonus[:, last.token]
            chance[name] = sum(float(e) for e, p in zip(ends, last.paths, strict=True) if p == path)
        weight = min(8.0, 2 * chance["kseq"] / (chance["rrs"] + chance["naive"]))
        assert table["kseq"].weight[index] == pytest.approx(weight, abs=1e-9)
        checked += 1
    assert checked > 10


@pytest.mark.parametrize("seed", range(2))
def test_on_no_chain_does_a_lossless_verifier_accept_more_than_block_verification(
    seed: int,
) -> None:
    """With the tokens after each one integrated out, which leaves the mean over drafts as it is."""
    p, q = (random_model(4, 4, seed=2 * seed + which) for which in (0, 1))
    drafts = [
        (weight, Scored(tree, target_rows(tree, p), 0, 0, node_prefixes(tree)))
        for weight, tree in chain_drafts(q, 3, stop=lambda prefix: prefix[-1] == END)
    ]
    of = {
        name: Enumerated(
            FORMS["chain of 4"].config(SamplingConfig(), name, **parameters), frozenset({END})
        )
        for name, parameters in FORMS["chain of 4"].rows()
    }
    for name, enumerated_once in of.items():
        verifier = enumerated_once.verifier
        counts = np.zeros(2)
        for weight, place in drafts:
            counts += [weight * each for each in of[name](place)[:2]]
            if verifier.lossless:
                assert of[name](place)[1] <= of["block"](place)[1] + 1e-12, name
        enumerated = np.zeros(2)
        for weight, place in drafts:
            stop = verifier(place.tree, place.target).stop.tolist()
            for chance, path in zip(stop, place.paths, strict=True):
                emitted = len(path) + (END not in path)
                enumerated += [weight * chance * emitted, weight * chance * len(path)]
        assert counts == pytest.approx(enumerated, abs=1e-12), name


def test_of_a_draft_on_states_a_text_begins_with_a_round_without_a_draft() -> None:
    places = drafted(*states_pair(12), tiny_prompts(8), DecodeConfig(length=2), max_new_tokens=24)
    first = [place for place in places if place.before is None]
    assert len(first) == 8 < len(places) / 4
    assert not any(len(place.tree) for place in first)


@pytest.mark.parametrize(
    "kind", ["chain of 4", "2 paths of 4", "tree 2x2x1, distinct", "4 siblings, greedy"]
)
def test_a_large_vocabulary_is_enumerated_over_a_smaller_one_with_the_same_counts(
    kind: str,
) -> None:
    target, draft = (tiny_llama(1, vocab=6000) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights, size in ((target.lm_head.weight, 0.8), (draft.lm_head.weight, 0.2)):
            weights += size * torch.randn(weights.shape, generator=generator)
        draft.lm_head.weight += target.lm_head.weight - draft.lm_head.weight.mean()
    verifiers = [
        Enumerated(
            FORMS[kind].config(SamplingConfig(), name, **parameters),
            end_ids(target.generation_config),
        )
        for name, parameters in FORMS[kind].rows()
        if "alphabet" not in parameters
    ]
    timed: list[tuple[DraftTree, torch.Tensor]] = []
    config = FORMS[kind].config(SamplingConfig())
    places = drafted(target, draft, tiny_prompts(2), config, max_new_tokens=6, timed=timed)
    assert len(timed) > len(places) / 2 or len(timed) > 12
    most = 0.0
    for tree, scores in timed:
        node = len(tree) // 2
        paths = [
            tuple(tree.token_list[n - 1] for n in tree.path_to(m)) for m in range(1 + len(tree))
        ]
        token = int(scores[node].argmax())
        whole = Scored(tree, scores, token, node, paths)
        small = Scored(*reduced(tree, scores, token), node, paths)
        assert small.target.shape[-1] < 1200
        for each in verifiers:
            assert each(small) == pytest.approx(each(whole), abs=2e-3), each.verifier.name
            most = max(most, each(small)[1])
    assert most > 0.4, "drafts that are never accepted would show nothing"


PATHS: dict[str, Any] = {"drafter": "paths", "paths": 2, "length": 3}
DYNAMIC: dict[str, Any] = {"drafter": "dynamic_tree", "nodes": 5, "depth": 3, "gain": 0.5}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "references", "names"),
    [
        (CHAIN, ("token", "block", "naive"), ["token", "block", "traversal"]),
        (TREE, ("rrs", "traversal", "naive"), ["rrs", "kseq", "importance", "naive"]),
        ({**TREE, "siblings": "greedy"}, ("greedy_draft", "naive"), ["greedy_draft"]),
        (PATHS, ("rrs", "traversal", "naive"), ["batch", "multipath_block"]),
        (DYNAMIC, ("naive",), ["naive"]),
    ],
)
def test_tokens_a_call_are_those_of_decoding(
    settings: dict[str, Any], references: tuple[str, ...], names: list[str]
) -> None:
    # 600 texts each: a difference of 5 % is found with a power of .9, one of 8 % surely.
    prompts = tiny_prompts(600)
    table, _, _ = table_at(settings, references, names, prompts)
    weights = resamples(len(prompts))
    for name in names:
        decoder = SpeculativeDecoder.from_config(*TINY, DecodeConfig(verifier=name, **settings))
        generations = decoder.generate_batch(
            prompts,
            max_new_tokens=16,
            generators=[generator_for(7, str(index)) for index in range(len(prompts))],
            size=64,
        )
        tokens, calls = (
            weights @ np.array([len(each) for each in column], dtype=np.float64)
            for column in zip(*((one.tokens, one.rounds) for one in generations), strict=True)
        )
        gap = table[name].mean(table[name].tokens) - tokens / calls
        wide = 1.5 * np.nanstd(gap[1:])  # both sides resample the same prompts
        assert abs(gap[0]) < 2 * wide, (name, Interval.of(gap))


def test_every_verifier_has_a_row_on_every_kind_that_it_takes() -> None:
    one_round = {name for name, spec in VERIFIERS.items() if not spec.residual_persists}
    for kind in FORMS.values():
        form = kind.config(SamplingConfig()).kind
        takes = {name for name in one_round if form in VERIFIERS[name].takes}
        assert {name for name, _ in kind.rows()} == takes
    assert {name for kind in FORMS.values() for name, _ in kind.rows()} == one_round


def test_rows_of_one_law_are_one_figure_because_they_are_at_the_same_places() -> None:
    prompts = [("a", prompt) for prompt in tiny_prompts(6)]
    measured = TableInputs(*TINY, prompts, SamplingConfig(), max_new_tokens=16)
    rows = {row.verifier: row for row in verifier_rows(FORMS["chain of 8"], measured, 5.0)}
    for one, other in (("block", "traversal"), ("token", "rrs")):
        assert rows[one].positions == rows[other].positions >= ENOUGH
        tokens = rows[other].expected_tokens.value
        assert rows[one].expected_tokens.value == pytest.approx(tokens, rel=1e-5)


def test_at_temperature_0_every_verifier_of_a_tree_follows_the_targets_own_token() -> None:
    """Siblings are the draft's likeliest tokens; no optimum of drawn ones is theirs."""
    prompts = [("a", prompt) for prompt in tiny_prompts(4)]
    measured = TableInputs(*TINY, prompts, SamplingConfig(0.0), seed=9, max_new_tokens=8)
    for kind in ("4 siblings", "tree 2x2x1, distinct", "tree 4x2x2, greedy"):
        rows = verifier_rows(FORMS[kind], measured, 0.0)
        assert [row.verifier for row in rows] == [name for name, _ in FORMS[kind].rows()]
        assert len({row.expected_tokens.value for row in rows}) == 1
        assert {row.ceiling for row in rows} == {None}


def test_speeds_are_predicted_from_the_times_of_drafts_of_the_same_shape() -> None:
    def record(rounds: int, nodes: int, forwards: int, each: float, extra: float) -> PromptRecord:
        draft, target = forwards * each, rounds * 0.01 + nodes * 0.0005
        seconds = draft + target + rounds * extra
        counts = (rounds, nodes, nodes - rounds, rounds, nodes, [], [], forwards)
        return PromptRecord(
            "p", 2 * rounds, "length", *counts, seconds, draft, target, rounds * extra
        )

    plain = [record(20, 0, 0, 0.0, 0.0)]
    chains = [record(9, 36, 36, 0.001, 0.0002), record(5, 40, 40, 0.001, 0.0002)]
    trees = [record(6, 60, 18, 0.002, 0.0005)]
    times = RoundSeconds.of(plain, chains, trees)
    for branches, (forward, extra) in enumerate(((0.001, 0.0002), (0.002, 0.0005))):
        fit = times[bool(branches)]
        assert (fit.plain, fit.round, fit.forward, fit.node) == pytest.approx(
            (0.005, 0.01 + extra, forward, 0.0005)
        )
    assert RoundSeconds.of(plain, chains, [])[True].forward == times[False].forward
    assert RoundSeconds.of([], chains, trees) == {}


def test_the_rows_of_a_table_are_consistent(results: Results) -> None:
    measured = TableInputs(
        tiny_llama(1, vocab=12),
        tiny_llama(4, vocab=12),
        [(name, torch.tensor([0, 2 + index])) for name in ("a", "b") for index in range(4)],
        SamplingConfig(),
        dict.fromkeys(
            (False, True), RoundSeconds(plain=0.01, round=0.012, forward=0.001, node=0.0001)
        ),
        max_new_tokens=8,
    )
    reported: list[str] = []
    rows = verifier_table(measured, seconds=0.1, report=reported.append)
    assert reported == list(FORMS)
    assert {row.dataset for row in rows} == {ALL_SETS, "a", "b"}
    for row in rows:
        assert 1.0 <= row.expected_tokens.value <= 9.0
        assert row.speedup is not None
        if "chain" in row.draft_kind and row.lossless:
            assert row.ceiling is not None
            assert row.share_of_ceiling is not None
            assert row.share_of_ceiling <= 1.0 + 1e-9
            assert row.expected_tokens.value <= row.ceiling + 1e-9
        if row.verifier == "block":
            assert row.share_of_ceiling == pytest.approx(1.0)
    page = section(results.model_copy(update={"verifiers": rows}))
    assert page is not None
    assert len(page.table.rows) == len(of_all(rows))


def test_the_best_verifier_is_compared_with_another_on_the_same_drafts() -> None:
    """Token verification on other drafts, however few its tokens there, is no measure of it."""
    gain = Interval(0.09, 0.05, 0.13)
    rows = [verifier_row("chain of 4", "token", 3.4), verifier_row("chain of 8", "token", 4.3)]
    best = verifier_row("chain of 8", "traversal", 4.7, gain)
    said = verifier_sentence([*rows, best])
    assert said.startswith("Of 2 lossless verifiers traversal on chain of 8 is best: 4.70 [4.60")
    assert said.endswith("; over token on the same drafts: 9.0 % [5.0, 13.0].")
    unsure = best.model_copy(update={"gain": Interval(0.09, -0.01, 0.13)})
    assert "do not tell them apart" in verifier_sentence([*rows, unsure])


def test_the_command_answers_for_a_pair_and_refuses_what_it_cannot_read(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    long = json.dumps({"prompt": "a" * 100_000})
    prompts.write_text(f'{{"prompt": "3 + 4 ="}}\n{{"prompt": "def add(a, b):"}}\n{long}\n')
    pair = [str(tiny_pair / "target"), str(tiny_pair / "draft")]
    small = ["--seconds", "1", "--max-new-tokens", "6", "--out", str(tmp_path / "out")]
    assert run_tool("verifiers", [*pair, "--prompts", str(prompts), *small]) == 0
    reported, log = capsys.readouterr()
    assert "2 of 3 kept; 1 over_long" in log
    assert "--seconds 1 went by with loading, 2 prompts of up to " in log
    assert reported.startswith("Of ")
    assert "over the target alone here: " in reported
    assert "| chain of 4: block |" in reported
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"verifiers.md", "verifiers.json"}
    prompts.write_text('{"prompt": "' + "far too long " * 5_000 + '"}\n')
    assert run_tool("verifiers", [*pair, "--prompts", str(prompts)]) == 2
    assert "tokens" in capsys.readouterr().err
