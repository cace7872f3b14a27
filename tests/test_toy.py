"""The embedded text: seeded, split by content, tokenized without loss."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from distill.toy import train_tokenizer
from specdata.toy.corpus import FAMILIES, SPLITS, corpus, examples, prompts, split_of

SMALL = {"examples_per_family": 40, "library_characters": 8_000}


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_depend_on_the_seed_alone(family: str) -> None:
    first, again, other = ([*islice(examples(family, seed), 30)] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_comes_with_the_answer_that_was_written_with_it(family: str) -> None:
    written = {each.prompt: each.completion for each in islice(examples(family, 0), 60)}
    train = [prompt for prompt in written if split_of(prompt) == "train"]
    assert prompts(family, "train", len(train), seed=0) == {text: written[text] for text in train}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_different_splits_never_meet_even_for_different_seeds(family: str) -> None:
    drawn = {
        (split, seed): prompts(family, split, 60, seed=seed) for split in SPLITS for seed in (0, 1)
    }
    for (split, _), texts in drawn.items():
        assert len(set(texts)) == len(texts) == 60
        assert {split_of(text) for text in texts} == {split}


def test_the_training_documents_hold_no_prompt_of_dev_or_test() -> None:
    documents = corpus(seed=0, **SMALL)
    for split in ("dev", "test"):
        for prompt in prompts("maths", split, 200, seed=0):
            assert not any(document.startswith(prompt) for document in documents)
    assert len(documents) > 3 * SMALL["examples_per_family"]
    assert documents == corpus(seed=0, **SMALL)


def test_maths_answers_are_right() -> None:
    for example in islice(examples("maths", 3), 200):
        steps = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", example.completion)
        assert len(steps) == 2
        for left, sign, right, result in steps:
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[sign]


def test_prompt_tokens_are_a_prefix_of_the_document_tokens() -> None:
    tokenizer = train_tokenizer(corpus(seed=0, **SMALL), vocab_size=600)
    for family in FAMILIES:
        for example in islice(examples(family, 5), 40):
            prompt = tokenizer(example.prompt)["input_ids"]
            document = tokenizer(example.prompt + example.completion)["input_ids"]
            assert document[: len(prompt)] == prompt
            assert tokenizer.decode(document) == example.prompt + example.completion


def test_tokenizer_is_deterministic_and_loses_nothing() -> None:
    texts = corpus(seed=0, **SMALL)
    tokenizer = train_tokenizer(texts, vocab_size=400)
    assert tokenizer.get_vocab() == train_tokenizer(texts, vocab_size=400).get_vocab()
    assert len(tokenizer) == 400
    odd = " \tüñ 漢字 🙂\r\n\n  x"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
