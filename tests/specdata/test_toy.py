"""The embedded texts: seeded, split by content, tokenized without loss; natural ones stay."""

import hashlib
from itertools import islice

import pytest

from distill.toy import train_tokenizer
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import EMBEDDED, LONG_TEXTS, NATURAL, natural_prompts
from specdata.prompts.chat_templates import chat_ids
from specdata.prompts.loading import load_prompts
from specdata.toy import corpus as toy
from specdata.toy.corpus import SPLITS, TOY_SETS, corpus, examples, prompts, split_of
from tests.support.prompt_files import CHAT, PLAIN

SMALL = {"examples_per_family": 40, "library_characters": 8_000}


WRITTEN = {"instruct": "477cc76b89b8d583", "maths": "a017c29795aaf030", "code": "967529706768bc32"}
"""Of 300 examples of seed 1, joined by NULs."""


@pytest.mark.parametrize("family", TOY_SETS)
def test_what_a_seed_writes_stays_as_it_is(family: str) -> None:
    first, other = ([*islice(examples(family, seed), 300)] for seed in (1, 2))
    joined = "\0".join(each.prompt + each.completion for each in first)
    assert hashlib.sha256(joined.encode()).hexdigest()[:16] == WRITTEN[family]
    assert first != other


@pytest.mark.parametrize("family", TOY_SETS)
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


def test_prompt_tokens_are_a_prefix_of_the_document_tokens() -> None:
    tokenizer = train_tokenizer(corpus(seed=0, **SMALL), vocab_size=600)
    for family in TOY_SETS:
        for example in islice(examples(family, 5), 40):
            prompt = tokenizer(example.prompt)["input_ids"]
            document = tokenizer(example.prompt + example.completion)["input_ids"]
            assert document[: len(prompt)] == prompt
            assert tokenizer.decode(document) == example.prompt + example.completion


def test_asking_for_more_prompts_than_can_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {"maths": lambda writer: toy.Example(f"Question {writer.rng.randrange(20)}", "")}
    monkeypatch.setattr(toy, "WRITERS", few)
    held = sum(split_of(f"Question {number}") == "train" for number in range(20))
    assert len(prompts("maths", "train", held, seed=0)) == held
    with pytest.raises(ValueError, match=f"has {held} distinct prompts, {held + 1} were asked for"):
        prompts("maths", "train", held + 1, seed=0)


# --- natural prompts, which are rendered as chat

COUNTS = {"train": 600, "dev": 5000, "test": 4000}
# Of the first 600 training texts, of all dev texts and of all test texts, joined by NULs.
DIGESTS = {
    "chat-assistant": ("bc9c189e42548cfe", "c86243af3de8ea3b", "e8ba696cfee04d28"),
    "chat-maths": ("43260a2ef0c79f0a", "44865dfd95badfda", "b9a9b21a325549b6"),
    "chat-code": ("5e103d4068faab84", "2785389542f50982", "f7e3d02993e96723"),
    "chat-letters": ("52fc1a43e53b36c1", "acea9728f5a57dfa", "8474934afae0b76f"),
    "chat-edits": ("627f8d1fe3c50135", "601d3127e235abf8", "4bb7a422a49e7ec0"),
}
EDITS = {"train": 380, "dev": 379, "test": 376}


@pytest.mark.parametrize("name", NATURAL)
def test_the_texts_that_results_were_measured_on_stay_as_they_are_and_none_comes_twice(
    name: str,
) -> None:
    assert name in EMBEDDED
    counts, train = (EDITS, 380) if name == "chat-edits" else (COUNTS, 2000)
    texts = natural_prompts(name, "train", train, seed=0)[counts["train"] :]
    for (split, count), digest in zip(counts.items(), DIGESTS[name], strict=True):
        of_split = natural_prompts(name, split, count, seed=0)
        assert hashlib.sha256("\0".join(of_split).encode()).hexdigest()[:16] == digest, split
        texts += of_split
    assert len({*texts}) == len(texts)


@pytest.mark.parametrize("name", NATURAL[:4])
def test_a_larger_count_only_appends_and_another_seed_gives_another_order(name: str) -> None:
    first = natural_prompts(name, "train", 60, seed=1)
    assert natural_prompts(name, "train", 20, seed=1) == first[:20]
    assert len({*natural_prompts(name, "train", 60, seed=2)} & {*first}) < 10
    # `make real-choose` draws dev texts by seed 1, and rollouts are of the first of seed 0.
    chosen_on = natural_prompts(name, "dev", 16, seed=1)
    assert not {*chosen_on} & {*natural_prompts(name, "dev", 48, seed=0)}


@pytest.mark.parametrize("name", NATURAL)
def test_a_chat_template_renders_them_and_without_one_they_are_plain_text(name: str) -> None:
    wanted = [PromptSet(name, split, 5) for split in COUNTS]
    texts = [text for split in COUNTS for text in natural_prompts(name, split, 5, seed=4)]
    for prompt, text in zip(load_prompts(wanted, CHAT, seed=4).prompts, texts, strict=True):
        assert prompt.messages == ({"role": "user", "content": text},)
        assert prompt.ids == chat_ids(CHAT, prompt.messages)
    for prompt, text in zip(load_prompts(wanted, PLAIN, seed=4).prompts, texts, strict=True):
        assert (prompt.messages, prompt.ids) == ((), PLAIN(text)["input_ids"])
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts([PromptSet(name, "train", 5, chat=True)], PLAIN, seed=4)


@pytest.mark.parametrize("split", COUNTS)
def test_a_long_text_lists_fifteen_of_its_split_and_no_template_renders_it(split: str) -> None:
    loaded = load_prompts([PromptSet(LONG_TEXTS, split, 4)], CHAT, seed=2).prompts
    sets = [natural_prompts(name, split, 20, seed=2) for name in NATURAL[:3]]
    listed = [text for each in zip(*sets, strict=True) for text in each]
    for number, prompt in enumerate(loaded):
        text = "\n\n".join(listed[15 * number : 15 * (number + 1)]) + "\n\n"
        assert (prompt.messages, prompt.ids) == ((), CHAT(text)["input_ids"])
    assert len(loaded) == 4
