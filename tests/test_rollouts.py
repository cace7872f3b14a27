"""Rollouts and labels: the right laws, whatever the batch, the shard or the interruption."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from specdata.probability import SamplingConfig
from specdata.prompts import Prompt, PromptSet
from specdata.rollouts import RolloutConfig, make_rollouts, sample_batch
from specdata.tables import load_table
from tests.test_decoder import p_value
from tests.tiny import END, joint_law, tiny_llama

WARPED = SamplingConfig(temperature=0.8, top_k=3)


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"id{n:02d}", "d", "train", [2 + (n * 7 + i) % 30 for i in range(1 + n % 5)])
        for n in range(count)
    ]


def uniforms(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, length, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARPED], ids=["plain", "warped"])
def test_the_joint_law_of_a_batch_is_plain_samplings(sampling: SamplingConfig) -> None:
    model = tiny_llama(0)
    law = joint_law(model, [2, 3], 4, sampling)
    rows = sample_batch(model, [[2, 3]] * 4000, uniforms(4000, 4), sampling)
    assert p_value(Counter(map(tuple, rows)), law) > 1e-6


def test_a_row_is_the_same_alone_and_in_a_batch_of_other_lengths() -> None:
    model = tiny_llama(4, vocab=40, layers=2)
    table = prompts(9)
    draws = uniforms(9, 20)
    together = sample_batch(model, [prompt.ids for prompt in table], draws, SamplingConfig())
    for index, prompt in enumerate(table):
        alone = sample_batch(model, [prompt.ids], draws[index : index + 1], SamplingConfig())
        assert alone == [together[index]]


def test_greedy_rollouts_are_those_of_generate() -> None:
    model = tiny_llama(4, vocab=40, layers=2)
    rows = sample_batch(model, [[2, 3, 4], [9]], uniforms(2, 15), SamplingConfig(temperature=0.0))
    for prompt, row in zip(([2, 3, 4], [9]), rows, strict=True):
        ids = torch.tensor([prompt])
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=15
        )
        assert row == plain[0, len(prompt) :].tolist()


def test_shard_size_changes_no_completion_and_a_completion_stops_at_its_end_token(
    tmp_path: Path,
) -> None:
    model = tiny_llama(4, vocab=40)
    found = []
    for size in (3, 10):
        folder = tmp_path / str(size)
        rows = make_rollouts(
            model,
            prompts(10),
            folder,
            RolloutConfig([PromptSet("d")], max_new_tokens=30, shard_size=size),
            sampling=SamplingConfig(),
            seed=3,
            settings={},
            report=lambda rows: None,
        )
        assert rows == 10
        found.append({row["example_id"]: row for row in load_table(folder)})
    assert found[0] == found[1]
    finishes = set()
    for row in found[0].values():
        assert END not in row["completion_ids"][:-1]
        assert (row["completion_ids"][-1] == END) == (row["finish"] == "eos")
        assert row["finish"] == "eos" or len(row["completion_ids"]) == 30
        finishes.add(row["finish"])
    assert finishes == {"eos", "length"}
