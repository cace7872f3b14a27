"""Rollouts: the right distribution, whatever the batch and the shard; samples and later turns."""

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from specdata.config import PromptSet, RolloutConfig
from specdata.probability import SamplingConfig
from specdata.prompts.chat_templates import chat_ids
from specdata.prompts.prompt import Prompt
from specdata.rollouts.backend import Backend, Report, TransformersBackend, sample_batch
from specdata.rollouts.make import Dialogue, make_rollouts, turns_asked
from specdata.storage.dataset import load_stored, read_manifest
from specdata.storage.resume import Settings
from specdata.storage.schema import Rollout
from tests.support.chi_square import p_value
from tests.support.tiny import END, joint_distribution, tiny_llama
from tests.support.word_pair import word_tokenizer

PLAIN = SamplingConfig()
WARPED = SamplingConfig(temperature=0.8, top_k=3)


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"id{n:02d}", "d", "train", [2 + (n * 7 + i) % 30 for i in range(1 + n % 5)])
        for n in range(count)
    ]


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARPED], ids=["plain", "warped"])
def test_the_joint_distribution_of_a_batch_is_plain_samplings(sampling: SamplingConfig) -> None:
    model = tiny_llama(0)
    distribution = joint_distribution(model, [2, 3], 4, sampling)
    draws = torch.Generator().manual_seed(0)
    uniforms = torch.rand(4000, 4, generator=draws, dtype=torch.float64)
    rows = sample_batch(model, [[2, 3]] * 4000, uniforms, sampling)
    assert p_value(Counter(map(tuple, rows)), distribution) > 1e-6


def backend(sampling: SamplingConfig = PLAIN, **changes: Any) -> TransformersBackend:
    settings = {"max_new_tokens": 30, "batch_size": 64, "seed": 3, **changes}
    return TransformersBackend(tiny_llama(4, vocab=40), sampling, **settings)


def rows_of(
    folder: Path,
    made: Backend,
    asked: Sequence[Prompt],
    dialogue: Any = None,
    report: Report = lambda ended: None,
    **changes: Any,
) -> list[Rollout]:
    config = RolloutConfig(sets=[PromptSet("d")], max_new_tokens=30, **changes)
    settings: dict[str, Any] = {"settings": Settings({}), "dialogue": dialogue, "report": report}
    make_rollouts(made, asked, folder, config, **settings)
    return load_stored(folder).to_list()


def by_key(rows: Sequence[Rollout]) -> dict[tuple[str, int, int], Rollout]:
    by_id = {(row["example_id"], row["sample"], row["turn"]): row for row in rows}
    assert len(by_id) == len(rows), "no row comes twice"
    return by_id


def test_neither_shards_batches_nor_order_change_a_completion(tmp_path: Path) -> None:
    runs = [
        by_key(rows_of(tmp_path / "a", backend(), prompts(10), shard_size=3)),
        by_key(rows_of(tmp_path / "b", backend(batch_size=4), prompts(10))),
        by_key(rows_of(tmp_path / "c", backend(), prompts(10)[::-1], shard_size=2)),
    ]
    assert runs[0] == runs[1] == runs[2]
    finishes = set()
    for row in runs[0].values():
        assert END not in row["completion_ids"][:-1]
        assert (row["completion_ids"][-1] == END) == (row["finish"] == "eos")
        assert row["finish"] == "eos" or len(row["completion_ids"]) == 30
        finishes.add(row["finish"])
    assert finishes == {"eos", "length"}
    counts = read_manifest(tmp_path / "a")["counts"]
    assert counts["rows"] == 10
    assert counts["tokens"] == sum(len(row["completion_ids"]) for row in runs[0].values())
    assert sum(counts["finish"].values()) == 10


def test_rollouts_are_counted_as_they_end_and_those_of_an_earlier_run_at_once(
    tmp_path: Path,
) -> None:
    for often in (True, False):  # the second run finds every shard made
        ended: list[int] = []
        rows_of(tmp_path, backend(), prompts(10), report=ended.append, shard_size=4)
        assert sum(ended) == 10
        assert (len(ended) > 10) == often


def test_samples_differ_and_the_first_is_what_a_single_one_would_be(tmp_path: Path) -> None:
    first = by_key(rows_of(tmp_path / "one", backend(), prompts(6)))
    three = by_key(rows_of(tmp_path / "three", backend(), prompts(6), samples=3, shard_size=4))
    assert {key: row for key, row in three.items() if key[1] == 0} == first
    texts = {tuple(row["completion_ids"]) for row in three.values()}
    assert len(texts) > 12
    assert len(three) == 18


@pytest.fixture(scope="module")
def chat() -> PreTrainedTokenizerBase:
    tokenizer = word_tokenizer("<u>", "<a>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} "
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    return tokenizer


def test_later_turns_follow_the_models_own_answers(
    tmp_path: Path, chat: PreTrainedTokenizerBase
) -> None:
    asked = []
    for n in range(5):
        messages = ({"role": "user", "content": f"w{n + 5} w{n + 6}"},)
        asked.append(
            Prompt(
                f"id{n}", "d", "test", chat_ids(chat, messages), messages, ("w7", "w8 w9")[: n % 3]
            )
        )
    sampler = TransformersBackend(tiny_llama(4, vocab=48), PLAIN, 30, 64, 3)
    dialogue = Dialogue(chat, longest=200)
    runs = [
        by_key(rows_of(tmp_path / str(size), sampler, asked, dialogue, samples=2, shard_size=size))
        for size in (2, 5)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == turns_asked(asked, 2) == 2 * (1 + 2 + 3 + 1 + 2)
    for (name, sample, turn), row in runs[0].items():
        prompt = next(prompt for prompt in asked if prompt.example_id == name)
        messages = list(prompt.messages)
        for earlier in range(turn):
            answer = runs[0][name, sample, earlier]["completion_ids"]
            text = chat.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": prompt.follow_ups[earlier]})
        assert row["prompt_ids"] == chat_ids(chat, messages)
    short = rows_of(tmp_path / "short", sampler, asked, Dialogue(chat, longest=12), samples=2)
    assert 10 <= len(short) < len(runs[0]), "conversations end where the context does"
    assert all(len(row["prompt_ids"]) <= 12 for row in short)
    refusing = copy.deepcopy(chat)
    once = "{% if messages[1:] %}{{ raise_exception('one turn') }}{% endif %}"
    refusing.chat_template = f"{once}{chat.chat_template}"
    alone = rows_of(tmp_path / "alone", sampler, asked, Dialogue(refusing, longest=200), samples=2)
    assert len(alone) == 10, "or the template takes no more"
