"""samples.json: texts of a few prompts, kept as tokens with the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.decode_config import Method
from eval.measuring.records import PER_SET, record_file, shown_prompts, write_samples
from tests.support.experiment import METHODS, PROMPTS, evaluate

THEIRS = Method(name="theirs", decoder="assisted", length=3)
KEPT = {(prompt.dataset, prompt.example_id) for prompt in shown_prompts(PROMPTS)}


def in_words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    evaluate(folder, [*METHODS, THEIRS])
    return folder


def test_the_first_prompts_of_each_set_keep_the_tokens_that_their_records_count(
    folder: Path,
) -> None:
    assert len(KEPT) == 2 * PER_SET < len(PROMPTS)
    for prompt in PROMPTS:
        record = json.loads(record_file(folder / "prompts", prompt).read_text())
        kept = record.get("tokens", {})
        assert bool(kept) == ((prompt.dataset, prompt.example_id) in KEPT)
        for name, tokens in kept.items():
            assert len(tokens) == record["records"][name]["tokens"]
        assert not kept or kept.keys() == record["records"].keys() - {"plain"}


def test_batches_and_interruptions_keep_the_same_texts(folder: Path, tmp_path: Path) -> None:
    alone = {
        each.prompt_id + each.dataset: each for each in write_samples(PROMPTS, folder, in_words)
    }
    evaluate(tmp_path, METHODS, batch=2)
    record_file(tmp_path / "prompts", PROMPTS[1]).unlink()
    evaluate(tmp_path, METHODS, batch=2)
    batched = write_samples(PROMPTS, tmp_path, in_words)
    written = json.loads((tmp_path / "samples.json").read_text())
    assert written["samples"] == [each.model_dump() for each in batched]
    assert {(each.dataset, each.prompt_id) for each in batched} == KEPT
    for each in batched:
        first = alone[each.prompt_id + each.dataset]
        assert each.prompt == first.prompt
        assert each.methods == {m.name: first.methods[m.name] for m in METHODS[1:]}
