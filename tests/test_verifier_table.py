"""The table of all verifiers: what a call is expected to emit is what decoding emits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eval.analysis.verifier_table import Enumerated, Expected, drafted, expected
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.intervals import Interval, resamples
from eval.verifiers import VERIFIERS
from specdata.sampling import generator_for
from tests.tiny import END, tiny_llama

ENDS = frozenset({END})
CHAIN: dict[str, Any] = {"drafter": "chain", "length": 3}
TREE: dict[str, Any] = {"drafter": "tree", "widths": (2, 2)}


def tiny_table(
    settings: dict[str, Any], references: tuple[str, ...], names: list[str], texts: int
) -> tuple[dict[str, Expected], dict[str, Enumerated], list[Any]]:
    """Verifiers at every round of texts of a tiny pair."""
    target, draft = tiny_llama(1, vocab=6), tiny_llama(4, vocab=6)
    own = {name: Enumerated(VERIFIERS[name].make(), ENDS) for name in {*references, *names}}
    starts = drafted(
        target,
        draft,
        [torch.tensor([0, 2 + index % 4, 2 + index // 4 % 4]) for index in range(texts)],
        DecodeConfig(verifier=references[0], **settings),
        references=[own[name].verifier for name in references],
        max_new_tokens=16,
        size=64,
    )
    asked = [own[name] for name in references]
    return {name: expected(own[name], asked, starts) for name in names}, own, starts


def test_a_place_counts_by_how_a_round_ends_there_and_a_call_emits_what_its_verdict_says() -> None:
    found, own, starts = tiny_table(TREE, ("rrs", "naive"), ["kseq"], 6)
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
    ],
)
def test_tokens_a_call_are_those_of_decoding(
    settings: dict[str, Any], references: tuple[str, ...], names: list[str]
) -> None:
    # 600 texts each: a difference of 5 % is found with a power of .9, one of 8 % surely.
    texts = 600
    found, _, _ = tiny_table(settings, references, names, texts)
    target, draft = tiny_llama(1, vocab=6), tiny_llama(4, vocab=6)
    weights = resamples(texts)
    for name in names:
        decoder = SpeculativeDecoder.from_config(
            target, draft, DecodeConfig(verifier=name, **settings)
        )
        made = decoder.generate_batch(
            [torch.tensor([0, 2 + index % 4, 2 + index // 4 % 4]) for index in range(texts)],
            max_new_tokens=16,
            generators=[generator_for(7, str(index)) for index in range(texts)],
            size=64,
        )
        tokens, calls = (
            weights @ np.array([len(each) for each in column], dtype=np.float64)
            for column in zip(*((one.tokens, one.rounds) for one in made), strict=True)
        )
        gap = found[name].mean(found[name].tokens) - tokens / calls
        wide = 1.5 * np.nanstd(gap[1:])  # both sides resample the same prompts
        assert abs(gap[0]) < 2 * wide, (name, Interval.of(gap))
