"""Prompt sets: embedded or from a file; each mistake says what must hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specdata.config import read_config
from specdata.errors import ConfigError, VocabularyMismatchError
from specdata.models import check_shared_vocabulary, vocabulary_fingerprint
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import load_prompts
from specdata.toy.corpus import FAMILIES, corpus
from specdata.toy.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    texts = corpus(seed=0, examples_per_family=20, library_characters=5000)
    return train_tokenizer(texts, vocab_size=400)


def lines(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_prompts_of_a_file_keep_their_order_and_a_repeated_one_is_dropped(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    name = lines(tmp_path / "mine.jsonl", *({"prompt": text} for text in ("a b", "c", "a b", "d")))
    loaded = load_prompts([PromptSet(name, "train", 4)], tokenizer, seed=0).prompts
    assert [tokenizer.decode(prompt.ids) for prompt in loaded] == ["a b", "c", "d"]
    assert {(prompt.dataset, prompt.split) for prompt in loaded} == {("mine", "train")}
    assert len({prompt.example_id for prompt in loaded}) == 3


def test_every_character_that_json_allows_may_stand_in_a_prompt(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "odd.jsonl"
    text = "one\u2028two\u0085three \U0001f600"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_text("\ufeff" + line + "\r\n\n", encoding="utf-8", newline="")
    (prompt,) = load_prompts([PromptSet(str(path), "train", 1)], tokenizer, seed=0).prompts
    assert tokenizer.decode(prompt.ids) == text


def test_two_files_of_one_name_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    names = [
        lines(path, {"prompt": "a"})
        for path in (tmp_path / "test.jsonl", tmp_path / "sub" / "test.jsonl")
    ]
    with pytest.raises(ConfigError, match="different names"):
        load_prompts([PromptSet(name, "test", 1) for name in names], tokenizer, seed=0)


def test_splits_of_an_embedded_family_share_no_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    for family in FAMILIES:
        sets = [PromptSet(family, split, 40) for split in ("train", "dev", "test")]
        loaded = load_prompts(sets, tokenizer, seed=0).prompts
        assert len(loaded) == 120
        again = load_prompts(sets, tokenizer, seed=0).prompts
        assert [prompt.ids for prompt in again] == [prompt.ids for prompt in loaded]


@pytest.mark.parametrize(
    ("rows", "count", "message"),
    [
        (['{"prompt": "a"}'], 2, "must hold 2 prompts"),
        (['{"prmpt": "a"}'], 1, r"no column 'prompt'; it has 'prmpt' \(did you mean 'prmpt'\?\)"),
        (["not json"], 1, "line 1: must be a JSON object"),
        (["[1]"], 1, "must be a JSON object with a `prompt` or `messages`, got list"),
        (['{"prompt": 3}'], 1, "none of its 1 prompts can be used: 1 undecodable"),
        (['{"prompt": " .. "}'], 1, "none of its 1 prompts can be used: 1 near_empty"),
        (['{"prompt": "a"}', '{"messages": []}'], 2, "row 2, has no column 'prompt'"),
        (['{"messages": []}', '{"prompt": "a"}'], 2, "row 2, has no column 'messages'"),
        ([], 0, "is empty: it must hold prompts"),
    ],
)
def test_an_unusable_file_is_named(
    rows: list[str],
    count: int,
    message: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(ConfigError, match=message):
        load_prompts([PromptSet(str(path), "train", count)], tokenizer, seed=0)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"count: must be greater than or equal to 0 \(got -1\)"):
        read_config(PromptSet, {"name": "maths", "count": -1})


@pytest.mark.parametrize("name", ["nowhere.jsonl", "instructions", "data.csv"])
def test_an_unknown_set_says_what_there_is(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|unknown prompt set"):
        load_prompts([PromptSet(name, "train", 1)], tokenizer, seed=0)


def test_an_unknown_split_and_too_many_prompts_are_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(ConfigError, match="split"):
        load_prompts([PromptSet("maths", "validation", 1)], tokenizer, seed=0)


def test_tokenizers_that_differ_are_refused_with_the_first_ids(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    check_shared_vocabulary(tokenizer, tokenizer)
    other = train_tokenizer(["another text, with other pieces"] * 3, vocab_size=270)
    assert vocabulary_fingerprint(other) != vocabulary_fingerprint(tokenizer)
    with pytest.raises(VocabularyMismatchError, match=r"ids differ \(first: \d+ is '"):
        check_shared_vocabulary(tokenizer, other)
