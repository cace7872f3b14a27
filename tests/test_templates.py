"""Conversations become the ids their template writes, and masks cover what the assistant said."""

from __future__ import annotations

import pytest

from specdata.errors import ConfigError
from specdata.prompts.chat_templates import (
    TemplateRefusedError,
    assistant_mask,
    chat_ids,
    check_mask,
)
from tests.chats import FAMILIES, chat_tokenizer

SOUND = ("chatml", "marked", "llama3", "gemma", "mistral")
TALK = [
    {"role": "user", "content": "Where is the lantern?"},
    {"role": "assistant", "content": "In the kitchen, I think."},
    {"role": "user", "content": "Thanks. And the boat?"},
    {"role": "assistant", "content": "At the harbour.\n\nUnder the bridge."},
]
ENDS = {"chatml": "<|im_end|>", "marked": "<|im_end|>", "llama3": "<|eot_id|>"}
ENDS |= {"gemma": "<end_of_turn>", "mistral": "<eos>"}


@pytest.mark.parametrize("family", SOUND)
def test_the_ids_of_a_conversation_are_those_of_its_rendered_text_with_one_bos(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids = chat_ids(tokenizer, TALK[:3])
    text = tokenizer.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text
    # The tokenizer would put a second one before a text that has it.
    assert ids.count(tokenizer.bos_token_id) == text.count("<bos>") <= 1
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize("family", SOUND)
def test_the_mask_covers_each_answer_and_its_end_token_and_nothing_else(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids, mask = assistant_mask(tokenizer, TALK)
    assert len(ids) == len(mask)
    assert set(mask) == {0, 1}
    assert ids == chat_ids(tokenizer, TALK, reply=False)
    trained = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    answers = [message["content"] for message in TALK if message["role"] == "assistant"]
    space = " " if family == "mistral" else ""
    assert trained == "".join(f"{space}{answer}{ENDS[family]}" for answer in answers)


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral"])
def test_what_precedes_an_answer_in_training_is_what_the_model_is_served(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids, mask = assistant_mask(tokenizer, TALK)
    first = mask.index(1)
    assert ids[:first] == chat_ids(tokenizer, TALK[:1])


@pytest.mark.parametrize(
    ("family", "spaces"), [("stripping", "  "), ("spaced", "")], ids=["stripping", "spaced"]
)
def test_a_template_that_rewrites_what_it_rendered_is_refused(family: str, spaces: str) -> None:
    talk = [{**message, "content": message["content"] + spaces} for message in TALK]
    with pytest.raises(ConfigError, match=r"no prefix of the conversation, from token \d+ on \("):
        assistant_mask(chat_tokenizer(family), talk)


def test_a_mask_beside_the_answer_is_refused_with_what_it_covers() -> None:
    tokenizer = chat_tokenizer("llama3")
    ids, mask = assistant_mask(tokenizer, TALK)
    with pytest.raises(ConfigError, match=r"does not cover what the assistant said: 2 turns"):
        check_mask(tokenizer, TALK, ids, [*mask[3:], 0, 0, 0])
    half = [*mask[: mask.index(0, mask.index(1))]]
    with pytest.raises(ConfigError, match="2 turns, 1 masked spans"):
        check_mask(tokenizer, TALK, ids, half + [0] * (len(ids) - len(half)))


def test_a_template_that_changes_the_answer_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = FAMILIES["chatml"].replace(
        "message.content +", "message.content[:9] +"
    )
    try:
        with pytest.raises(
            ConfigError, match=r"turn 'In the kitchen, I think\.', trained on 'In the"
        ):
            assistant_mask(tokenizer, TALK)
    finally:
        tokenizer.chat_template = FAMILIES["chatml"]


def test_a_role_that_the_template_does_not_take_is_refused_with_its_reason() -> None:
    system = {"role": "system", "content": "Be short."}
    assert chat_ids(chat_tokenizer("chatml"), [system, *TALK[:1]])
    with pytest.raises(TemplateRefusedError, match="System role not supported"):
        chat_ids(chat_tokenizer("gemma"), [system, *TALK[:1]])
    with pytest.raises(TemplateRefusedError, match="must alternate"):
        chat_ids(chat_tokenizer("mistral"), [TALK[0], TALK[2]])


def test_a_tokenizer_without_a_chat_template_says_what_to_do() -> None:
    for ask in (lambda t: chat_ids(t, TALK), lambda t: assistant_mask(t, TALK)):
        with pytest.raises(ConfigError, match=r"has no chat template.*save one with it"):
            ask(chat_tokenizer("none"))


@pytest.mark.parametrize("family", SOUND)
def test_the_prompt_of_a_later_turn_begins_with_that_of_the_first(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids = chat_ids(tokenizer, TALK[:3])
    assert ids[: len(chat_ids(tokenizer, TALK[:1]))] == chat_ids(tokenizer, TALK[:1])
