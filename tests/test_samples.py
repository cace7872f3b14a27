"""What is kept of a few prompts, so that a report can show which drafted tokens were accepted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eval.measuring.assisted import assisted_generate
from eval.measuring.methods import MethodConfig
from eval.measuring.records import RoundTokens, record_file
from eval.measuring.samples import (
    MOST_TOKENS,
    PER_SET,
    RoundText,
    make_samples,
    pieces,
    read_samples,
    round_tokens,
    shown_prompts,
    write_samples,
)
from specdata.errors import ManifestError
from specdata.probability import SamplingConfig
from tests.test_experiment import METHODS, PROMPTS, evaluate
from tests.tiny import tiny_llama

THEIRS = MethodConfig(name="theirs", decoder="assisted", length=3)
KEPT = {(prompt.dataset, prompt.example_id) for prompt in shown_prompts(PROMPTS)}


def in_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer of bytes: half a character is the replacement character."""
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    evaluate(folder, [*METHODS, THEIRS])
    return folder


def stored(folder: Path) -> dict[tuple[str, str], dict[str, list[RoundTokens]]]:
    """Tokens of rounds by prompt and method."""
    tokens = {}
    for prompt in PROMPTS:
        record = json.loads(record_file(folder / "prompts", prompt).read_text())
        if "tokens" in record:
            tokens[prompt.dataset, prompt.example_id] = {
                name: [RoundTokens(**each) for each in rounds]
                for name, rounds in record["tokens"].items()
            }
    return tokens


def test_the_first_prompts_of_each_set_keep_their_tokens_and_no_others(folder: Path) -> None:
    assert len(KEPT) == 2 * PER_SET < len(PROMPTS)
    assert set(stored(folder)) == KEPT


def test_the_tokens_of_every_drafting_method_are_those_that_its_record_counts(
    folder: Path,
) -> None:
    for prompt in shown_prompts(PROMPTS):
        record = json.loads(record_file(folder / "prompts", prompt).read_text())
        kept = stored(folder)[prompt.dataset, prompt.example_id]
        assert set(kept) == set(record["records"]) - {"plain"}
        for name, rounds in kept.items():
            counts = record["records"][name]
            assert len(rounds) == counts["rounds"]
            assert sum(len(each.drafted) for each in rounds) == counts["n_draft"]
            assert sum(len(each.emitted) for each in rounds) == counts["tokens"]
            assert sum(each.accepted for each in rounds) == counts["accepted"]
            assert sum(each.depth for each in rounds) == counts["depth"]
            for each in rounds:
                here = each.emitted[: each.accepted]
                if len(each.drafted) == each.depth:  # a chain
                    assert each.drafted[: each.accepted] == here
                else:
                    assert not set(here) - set(each.drafted)


def test_the_text_of_all_rounds_is_the_decoded_text_of_all_tokens(folder: Path) -> None:
    samples = make_samples(PROMPTS, folder, in_bytes)
    assert {(each.dataset, each.prompt_id) for each in samples.samples} == KEPT
    tokens = stored(folder)
    for sample in samples.samples:
        for name, text in sample.methods.items():
            rounds = tokens[sample.dataset, sample.prompt_id][name]
            assert text.text == in_bytes([token for each in rounds for token in each.emitted])
            assert text.is_whole
            for made, each in zip(text.rounds, rounds, strict=True):
                assert len(made.accepted) == each.accepted
                assert len(made.discarded) == len(each.drafted) - each.accepted
                assert made.is_bonus == (each.accepted == each.depth)
                assert (made.added is None) == (len(each.emitted) == each.accepted)


def test_a_batched_evaluation_keeps_the_tokens_that_decoding_one_by_one_keeps(
    folder: Path, tmp_path: Path
) -> None:
    evaluate(tmp_path, METHODS, batch=2)
    batched, alone = stored(tmp_path), stored(folder)
    assert set(batched) == KEPT
    for key in KEPT:
        assert batched[key] == {method.name: alone[key][method.name] for method in METHODS[1:]}


def test_an_evaluation_resumed_after_an_interruption_has_the_same_samples(
    folder: Path, tmp_path: Path
) -> None:
    evaluate(tmp_path, [*METHODS[:2], THEIRS])
    before = make_samples(PROMPTS, tmp_path, in_bytes)
    record_file(tmp_path / "prompts", PROMPTS[1]).unlink()
    evaluate(tmp_path, [*METHODS[:2], THEIRS])
    after = make_samples(PROMPTS, tmp_path, in_bytes)
    assert after == before
    for mine, first in zip(
        after.samples, make_samples(PROMPTS, folder, in_bytes).samples, strict=True
    ):
        assert mine.methods["K=3"] == first.methods["K=3"]


def test_transformers_drafts_are_observed_token_by_token() -> None:
    """Its draft of greedy tokens is what the draft model itself continues with."""
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)
    prompt = torch.tensor([2, 5, 7])
    out = assisted_generate(
        target,
        draft,
        prompt,
        length=3,
        sampling=SamplingConfig(temperature=0.0),
        max_new_tokens=12,
        seed=0,
    )
    text, rounds = prompt.tolist(), round_tokens(out)
    assert any(len(each.drafted) > each.accepted for each in rounds)
    for each in rounds:
        wanted = list(text)
        for token in each.drafted:
            logits = draft(torch.tensor([wanted])).logits[0, -1]
            assert token == int(logits.argmax())
            wanted.append(token)
        text += each.emitted
    assert text == [*prompt.tolist(), *out.tokens.tolist()]


@pytest.mark.parametrize("text", ["né → 漢字 🙂!", "a", "", "\ufffd and the mark itself \ufffd"])
def test_pieces_of_a_text_are_that_text_and_a_character_belongs_to_its_last_token(
    text: str,
) -> None:
    tokens = list(text.encode())
    parts = pieces(tokens, in_bytes)
    assert len(parts) == len(tokens)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert all(len(part) <= 1 for part in parts)


def test_pieces_are_the_text_even_of_a_half_character_and_of_a_decoder_that_looks_back() -> None:
    assert "".join(pieces([0xE6, 0xBC], in_bytes)) == in_bytes([0xE6, 0xBC])

    def tidied(tokens: Sequence[int]) -> str:
        """Removes a space before a full stop, as some tokenizers do."""
        return in_bytes(tokens).replace(" .", ".")

    tokens = list(b"so . and so .")
    assert "".join(pieces(tokens, tidied)) == "so. and so."


def test_a_long_generation_is_cut_after_a_round_and_says_so(folder: Path, tmp_path: Path) -> None:
    path = record_file(folder / "prompts", PROMPTS[0])
    record = json.loads(path.read_text())
    one = {"drafted": [65, 66], "emitted": [65, 67], "accepted": 1, "depth": 2}
    record["tokens"] = {"K=3": [one] * MOST_TOKENS}
    (tmp_path / "prompts").mkdir()
    for prompt in shown_prompts(PROMPTS):
        record_file(tmp_path / "prompts", prompt).write_text(json.dumps(record))
    text = make_samples(PROMPTS, tmp_path, in_bytes).samples[0].methods["K=3"]
    assert not text.is_whole
    assert text.text == "AC" * (MOST_TOKENS // 2)
    assert text.rounds[0] == RoundText(accepted=["A"], added="C", discarded=["B"], is_bonus=False)


def test_records_without_tokens_make_no_samples_and_damaged_tokens_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    path = record_file(folder / "prompts", PROMPTS[0])
    record = json.loads(path.read_text())
    (tmp_path / "prompts").mkdir()
    for tokens in ({"K=3": [{"drafted": [1]}]}, {"K=3": 7}, [3]):
        for prompt in shown_prompts(PROMPTS):
            record_file(tmp_path / "prompts", prompt).write_text(
                json.dumps(record | {"tokens": tokens})
            )
        with pytest.raises(ManifestError, match=r"damaged.*remove it, and run again"):
            make_samples(PROMPTS, tmp_path, in_bytes)
    del record["tokens"]
    for prompt in shown_prompts(PROMPTS):
        record_file(tmp_path / "prompts", prompt).write_text(json.dumps(record))
    assert make_samples(PROMPTS, tmp_path, in_bytes).samples == []


def test_samples_are_read_as_they_were_written_and_a_lost_or_damaged_file_is_none(
    folder: Path, tmp_path: Path
) -> None:
    samples = make_samples(PROMPTS, folder, in_bytes)
    path = tmp_path / "samples.json"
    assert read_samples(path) is None
    write_samples(path, samples)
    assert read_samples(path) == samples
    assert samples.of("code") == samples.samples[PER_SET:]
    path.write_text(path.read_text()[:-9])
    assert read_samples(path) is None
