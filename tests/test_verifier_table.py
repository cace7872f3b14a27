"""The table of all verifiers: what a call is expected to emit is what decoding emits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval.analysis.verifier_table import (
    KINDS,
    Enumerated,
    Expected,
    Measured,
    Times,
    drafted,
    expected,
    rows_of,
    verifier_rows,
    verifier_table,
)
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.intervals import Interval, resamples
from eval.measuring.pooled import ALL_SETS
from eval.measuring.results import ENOUGH
from eval.reporting.verifiers import best, fold, of_all
from eval.verifiers import VERIFIERS
from recipes.verifiers import main
from specdata.models import end_ids, load_model, load_tokenizer, longest_prompt
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import load_prompts
from specdata.sampling import SamplingConfig, generator_for
from tests.synthetic_results import synthetic_results
from tests.tiny import END, tiny_llama

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
    pair: tuple[Any, Any] = TINY,
    tokens: int = 16,
) -> tuple[dict[str, Expected], dict[str, Enumerated], list[Any]]:
    """Verifiers at every round of texts."""
    ends = end_ids(pair[0])
    own = {name: Enumerated(VERIFIERS[name].make(), ends) for name in {*references, *names}}
    starts = drafted(
        *pair,
        prompts,
        DecodeConfig(verifier=references[0], **settings),
        references=[own[name].verifier for name in references],
        max_new_tokens=tokens,
        size=64,
    )
    asked = [own[name] for name in references]
    return {name: expected(own[name], asked, starts) for name in names}, own, starts


def test_a_place_counts_by_how_a_round_ends_there_and_a_call_emits_what_its_verdict_says() -> None:
    found, own, starts = table_at(TREE, ("rrs", "naive"), ["kseq"], tiny_prompts(6))
    checked = 0
    for index, place in enumerate(starts):
        here = place.here
        if len(here.tree):
            stop = own["kseq"].verifier(here.tree, here.target).stop
            paths = [
                [here.tree.token_list[n - 1] for n in here.tree.path_to(node)]
                for node in range(len(stop))
            ]
            emitted = [len(path) + (END not in path) for path in paths]
            assert found["kseq"].tokens[index] == pytest.approx(
                float(stop @ torch.tensor(emitted, dtype=stop.dtype)), abs=1e-12
            )
        if place.before is None:
            assert found["kseq"].weight[index] == 1.0
            continue
        last, chance = place.before, {}
        path = last.paths[last.node]
        for name in ("kseq", "rrs", "naive"):
            verdict = own[name].verifier(last.tree, last.target)
            ends = verdict.stop * verdict.bonus[:, last.token]
            chance[name] = sum(float(e) for e, p in zip(ends, last.paths, strict=True) if p == path)
        wanted = min(8.0, 2 * chance["kseq"] / (chance["rrs"] + chance["naive"]))
        assert found["kseq"].weight[index] == pytest.approx(wanted, abs=1e-9)
        checked += 1
    assert checked > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "references", "names"),
    [
        (CHAIN, ("token", "block", "naive"), ["token", "block", "traversal"]),
        (TREE, ("rrs", "traversal", "naive"), ["rrs", "kseq", "importance", "traversal", "naive"]),
        ({**TREE, "siblings": "distinct"}, ("rrs_wor", "traversal", "naive"), ["rrs_wor"]),
        ({**TREE, "siblings": "greedy"}, ("greedy_draft", "naive"), ["greedy_draft"]),
        (
            {"drafter": "paths", "paths": 2, "length": 3},
            ("rrs", "traversal", "naive"),
            ["batch", "multipath_block"],
        ),
        ({"drafter": "dynamic_tree", "nodes": 5, "depth": 3, "gain": 0.5}, ("naive",), ["naive"]),
    ],
)
@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
def test_tokens_a_call_are_those_of_decoding(
    settings: dict[str, Any],
    references: tuple[str, ...],
    names: list[str],
    trained: bool,
    trained_pair: Path,
) -> None:
    # 600 texts each: a difference of 5 % is found with a power of .9, one of 8 % surely.
    pair, prompts, most = TINY, tiny_prompts(600), 16
    if trained:
        target, draft = (str(trained_pair / name) for name in ("target", "draft"))
        pair, most = (load_model(target), load_model(draft)), 48
        sets = [PromptSet(name, "test", 64) for name in ("instruct", "maths", "code")]
        room = longest_prompt(target, most)
        loaded = load_prompts(sets, load_tokenizer(target), seed=0, max_tokens=room)
        prompts = [torch.tensor(prompt.ids) for prompt in loaded.prompts]
        assert len(prompts) == 192
    found, _, _ = table_at(settings, references, names, prompts, pair, most)
    weights = resamples(len(prompts))
    for name in names:
        decoder = SpeculativeDecoder.from_config(*pair, DecodeConfig(verifier=name, **settings))
        made = decoder.generate_batch(
            prompts,
            max_new_tokens=most,
            generators=[generator_for(7, str(index)) for index in range(len(prompts))],
            size=64,
        )
        tokens, calls = (
            weights @ np.array([len(each) for each in column], dtype=np.float64)
            for column in zip(*((one.tokens, one.rounds) for one in made), strict=True)
        )
        gap = found[name].mean(found[name].tokens) - tokens / calls
        wide = 1.5 * np.nanstd(gap[1:])  # both sides resample the same prompts
        assert abs(gap[0]) < 2 * wide, (name, Interval.of(gap))


def test_every_verifier_has_a_row_on_every_kind_that_it_takes() -> None:
    sampling = SamplingConfig()
    for kind, (settings, references) in KINDS.items():
        form = DecodeConfig(verifier=references[0], **settings).kind
        takes = {name for name, spec in VERIFIERS.items() if form in spec.takes}
        assert {name for name, _ in rows_of(kind, sampling)} == takes - {"greedy_block"}
    known = {name for kind in KINDS for name, _ in rows_of(kind, sampling)}
    assert known == set(VERIFIERS) - {"greedy_block"}


def test_rows_of_one_law_are_one_figure_because_they_are_at_the_same_places() -> None:
    prompts = [("a", prompt) for prompt in tiny_prompts(6)]
    measured = Measured(*TINY, prompts, SamplingConfig(), max_new_tokens=16)
    rows = {row.verifier: row for row in verifier_rows("chain of 8", measured, 5.0)}
    for one, other in (("block", "traversal"), ("token", "rrs")):
        assert rows[one].positions == rows[other].positions >= ENOUGH
        tokens = rows[other].expected_tokens.value
        assert rows[one].expected_tokens.value == pytest.approx(tokens, rel=1e-5)


def test_a_table_goes_on_where_it_was_ended_and_its_rows_are_consistent(tmp_path: Path) -> None:
    measured = Measured(
        tiny_llama(1, vocab=12),
        tiny_llama(4, vocab=12),
        [(name, torch.tensor([0, 2 + index])) for name in ("a", "b") for index in range(4)],
        SamplingConfig(),
        Times(plain=0.01, round=0.012, forward=0.001, node=0.0001),
        {"mine": DecodeConfig("block", length=4)},
        max_new_tokens=8,
    )
    said: list[str] = []
    rows = verifier_table(measured, seconds=0.1, folder=tmp_path, report=said.append)
    assert said == list(KINDS)
    (tmp_path / "tree 4x2x2.json").unlink()
    again = verifier_table(measured, seconds=0.1, folder=tmp_path, report=said.append)
    assert said[len(KINDS) :] == ["tree 4x2x2"]
    others = [row for row in rows if row.draft_kind != "tree 4x2x2"]
    assert [row for row in again if row.draft_kind != "tree 4x2x2"] == others
    assert {row.dataset for row in rows} == {ALL_SETS, "a", "b"}
    for row in rows:
        assert 1.0 <= row.expected_tokens.value <= 9.0
        assert row.speedup is not None
        assert row.lossless or row.bias is not None
        if row.verifier == "block":
            assert row.share_of_ceiling == pytest.approx(1.0)
            assert (row.decoded == "mine") == (row.draft_kind == "chain of 4")
    results = synthetic_results()
    page = fold(results.model_copy(update={"verifiers": rows}))
    assert page is not None
    assert len(page.rows) == len(of_all(rows))
    assert best(rows).name in page.sentence


def test_the_command_answers_for_a_pair_and_refuses_what_it_cannot_read(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "3 + 4 ="}\n{"prompt": "def add(a, b):"}\n')
    pair = [str(tiny_pair / "target"), str(tiny_pair / "draft")]
    small = ["--seconds", "1", "--max-new-tokens", "6", "--out", str(tmp_path / "out")]
    assert main([*pair, "--prompts", str(prompts), *small]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A drafted token is accepted with probability 0.")
    assert "| chain of 4 | block |" in said
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"verifiers.md", "verifiers.json", "verifiers.png"}
    assert main([*pair, "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    prompts.write_text('{"prompt": "' + "far too long " * 5_000 + '"}\n')
    assert main([*pair, "--prompts", str(prompts)]) == 2
    assert "tokens" in capsys.readouterr().err
