"""samples.json: texts of a few prompts, kept as tokens with the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.decode_config import Method
from eval.measuring.records import record_file
from eval.measuring.samples import PER_SET, read_samples, shown_prompts, write_samples
from specdata.storage.files import write_json
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
        each.prompt_id + each.dataset: each
        for each in write_samples(PROMPTS, folder, in_words).samples
    }
    evaluate(tmp_path, METHODS, batch=2)
    record_file(tmp_path / "prompts", PROMPTS[1]).unlink()
    evaluate(tmp_path, METHODS, batch=2)
    batched = write_samples(PROMPTS, tmp_path, in_words).samples
    assert {(each.dataset, each.prompt_id) for each in batched} == KEPT
    for each in batched:
        first = alone[each.prompt_id + each.dataset]
        assert each.prompt == first.prompt
        assert each.methods == {m.name: first.methods[m.name] for m in METHODS[1:]}


def test_samples_are_read_as_they_were_written_and_a_lost_or_damaged_file_is_none(
    folder: Path, tmp_path: Path
) -> None:
    samples = write_samples(PROMPTS, folder, in_words)
    path = tmp_path / "samples.json"
    assert read_samples(path) is None
    write_json(path, samples.model_dump(mode="json"))
    assert read_samples(path) == samples
    assert samples.of("code") == samples.samples[PER_SET:]
    path.write_text(path.read_text()[:-9])
    assert read_samples(path) is None
