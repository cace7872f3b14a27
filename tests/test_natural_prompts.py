"""The embedded natural prompts: fixed texts, the same in every split, rendered as chat."""

from __future__ import annotations

import hashlib

import pytest

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import EMBEDDED, LONG, NATURAL, natural_prompts
from specdata.prompts.chat_templates import chat_ids
from specdata.prompts.loading import load_prompts
from tests.prompt_files import CHAT, PLAIN

SPLITS = {"train": 600, "dev": 5000, "test": 4000}
# Of the first 600 training texts, of all dev texts and of all test texts, joined by NULs.
DIGESTS = {
    "chat-assistant": ("bc9c189e42548cfe", "c86243af3de8ea3b", "e8ba696cfee04d28"),
    "chat-maths": ("43260a2ef0c79f0a", "44865dfd95badfda", "b9a9b21a325549b6"),
    "chat-code": ("5e103d4068faab84", "2785389542f50982", "f7e3d02993e96723"),
    "chat-letters": ("52fc1a43e53b36c1", "acea9728f5a57dfa", "8474934afae0b76f"),
}


@pytest.mark.parametrize("name", NATURAL)
def test_the_texts_that_results_were_measured_on_stay_as_they_are(name: str) -> None:
    for (split, count), digest in zip(SPLITS.items(), DIGESTS[name], strict=True):
        texts = natural_prompts(name, split, count, seed=0)
        assert hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16] == digest, split


@pytest.mark.parametrize("name", NATURAL)
def test_a_larger_count_only_appends_and_another_seed_gives_another_order(name: str) -> None:
    first = natural_prompts(name, "train", 60, seed=1)
    assert natural_prompts(name, "train", 20, seed=1) == first[:20]
    assert len({*natural_prompts(name, "train", 60, seed=2)} & {*first}) < 10


@pytest.mark.parametrize("name", NATURAL)
def test_no_text_comes_twice_in_a_split_or_in_two_splits(name: str) -> None:
    assert name in EMBEDDED
    counts = {"train": 2000, "dev": 5000, "test": 4000}
    texts = [t for split in counts for t in natural_prompts(name, split, counts[split], seed=0)]
    assert len({*texts}) == len(texts)


@pytest.mark.parametrize("name", NATURAL)
def test_the_texts_that_methods_are_chosen_on_are_not_those_of_rollouts(name: str) -> None:
    """`make real-choose` draws dev texts by seed 1, and rollouts are of the first of seed 0."""
    chosen_on = natural_prompts(name, "dev", 16, seed=1)
    assert not {*chosen_on} & {*natural_prompts(name, "dev", 48, seed=0)}


@pytest.mark.parametrize("name", NATURAL)
def test_a_chat_template_renders_them_and_without_one_they_are_plain_text(name: str) -> None:
    wanted = [PromptSet(name, split, 5) for split in SPLITS]
    texts = [text for split in SPLITS for text in natural_prompts(name, split, 5, seed=4)]
    for prompt, text in zip(load_prompts(wanted, CHAT, seed=4).prompts, texts, strict=True):
        assert prompt.messages == ({"role": "user", "content": text},)
        assert prompt.ids == chat_ids(CHAT, prompt.messages)
    for prompt, text in zip(load_prompts(wanted, PLAIN, seed=4).prompts, texts, strict=True):
        assert (prompt.messages, prompt.ids) == ((), PLAIN(text)["input_ids"])
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts([PromptSet(name, "train", 5, chat=True)], PLAIN, seed=4)


@pytest.mark.parametrize("split", SPLITS)
def test_a_long_text_lists_fifteen_of_its_split_and_no_template_renders_it(split: str) -> None:
    loaded = load_prompts([PromptSet(LONG, split, 4)], CHAT, seed=2).prompts
    sets = [natural_prompts(name, split, 20, seed=2) for name in NATURAL[:3]]
    listed = [text for each in zip(*sets, strict=True) for text in each]
    for number, prompt in enumerate(loaded):
        text = "\n\n".join(listed[15 * number : 15 * (number + 1)]) + "\n\n"
        assert (prompt.messages, prompt.ids) == ((), CHAT(text)["input_ids"])
    assert len(loaded) == 4
