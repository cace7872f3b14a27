"""Conversations become the ids their template writes, and masks cover what the assistant said."""

import copy
import json
import re
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from specdata.errors import ConfigError
from specdata.models import load_tokenizer
from specdata.prompts.chat_templates import (
    TemplateRefusedError,
    UnmaskableError,
    assistant_mask,
    chat_ids,
    text_ids,
)
from specdata.prompts.forms import conversation_of
from tests.support.chats import FAMILIES, chat_tokenizer

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


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_that_lies_with_the_processor_is_the_tokenizers(
    file: str, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    assert not load_tokenizer(str(tmp_path)).chat_template
    named = [{"name": "default", "template": template}]
    for held, expected in ((template, template), (named, {"default": template})):
        (tmp_path / file).write_text(json.dumps({"chat_template": held}))
        assert load_tokenizer(str(tmp_path)).chat_template == expected
    (tmp_path / file).write_text(json.dumps({"chat_template": [{"template": template}]}))
    with pytest.raises(ConfigError, match="must give each a name and a template"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("family", SOUND)
def test_the_mask_covers_each_answer_and_its_end_token_and_nothing_else(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids, mask = assistant_mask(tokenizer, TALK)
    assert len(ids) == len(mask)
    assert set(mask) == {0, 1}
    assert ids == tokenizer.apply_chat_template(TALK)["input_ids"]
    trained = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    answers = [message["content"] for message in TALK if message["role"] == "assistant"]
    space = " " if family == "mistral" else ""
    assert trained == "".join(f"{space}{answer}{ENDS[family]}" for answer in answers)
    assert ids[: mask.index(1)] == chat_ids(tokenizer, TALK[:1]), "as the model is served"


def learnt(tokenizer: Any, talk: Any, variables: Any = None) -> list[str]:
    """The texts that the mask marks."""
    ids, mask = assistant_mask(tokenizer, talk, variables or {})
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for bit, run in runs if bit]


def test_an_answer_is_learnt_as_its_template_writes_it_but_not_from_inside_a_token() -> None:
    spaces = [{**message, "content": message["content"] + "  "} for message in TALK]
    answers = [TALK[1]["content"], spaces[3]["content"]]
    assert learnt(chat_tokenizer("stripping"), spaces) == [f"{each}<|im_end|>" for each in answers]
    with pytest.raises(UnmaskableError, match=r"'At the.*begins inside a token, ' A"):
        assistant_mask(chat_tokenizer("spaced"), TALK)


def test_a_conversation_may_begin_with_the_assistant_and_speak_of_special_tokens() -> None:
    for family in ("chatml", "llama3", "marked"):
        assert len(learnt(chat_tokenizer(family), TALK[1:])) == 2
    said = "It ends with <|im_end|>, and <|im_start|> opens it."
    talk = [{"role": role, "content": said} for role in ("user", "assistant")]
    assert learnt(chat_tokenizer("chatml"), talk) == [f"{said}<|im_end|>"]


SHIPPED = Path(find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr, arg-type]
# What is learnt of a turn, and of the last one where that differs, under each template that TRL
# ships, but those named `training`, which have markers, as some of the others do.
LEARNT = {
    "{}<|im_end|>": "lfm2 lfm2_v2 nemotron_3_5_lightning nemotron_3_nano nemotron_3_super "
    "nemotron_3_ultra qwen2_5 qwen2_5_vl qwen3 qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 "
    "qwen3_instruct_2507 qwen3_vl",
    "{}<|im_end|>\n": "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
    "{}<|END_OF_TURN_TOKEN|>": "cohere",
    "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>": "cohere2",
    "{}<\uff5cend▁of▁sentence\uff5c>": "deepseek_r1_distill deepseekv3",
    "{}<turn|>": "diffusion_gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5",
    "{}<end_of_turn>": "gemma gemma3",
    "{}<|eot_id|>": "llama3 llama3_1 llama3_2",
    "{}<|end|>, {}<|end|>\n<eos>": "phi3 phi3_5",
    "{}<|user|>, {}": "glm4moe",
    "<|channel|>final<|message|>{}<|end|>, <|channel|>final<|message|>{}<|return|>": "gptoss",
    " to=user<|message|>{}<|eot|>": "muse_glimmer",
    # Of images and texts in parts.
    " {}<end_of_utterance>": "idefics3 smolvlm",
    " {}</s>": "llava_next",
}


def shipped(name: str) -> Any:
    """A tokenizer with a template that TRL ships, and the special tokens that are in it."""
    tokenizer = copy.deepcopy(chat_tokenizer("llama3"))
    tokenizer.chat_template = (SHIPPED / f"{name}.jinja").read_text("utf-8")
    special = r"<[|\uff5c][^<>{}\s'\"]+[|\uff5c]>|<\w+\|>|<\|\w+>|</?tool_call>|<end_of_turn>"
    tokenizer.add_tokens(
        sorted({*re.findall(special, tokenizer.chat_template)}), special_tokens=True
    )
    return tokenizer


NAMES = sorted(path.stem for path in SHIPPED.glob("*.jinja") if "training" not in path.stem)


@pytest.mark.parametrize("name", NAMES)
def test_of_every_template_that_trl_ships_it_is_known_which_tokens_are_learnt(name: str) -> None:
    form = next((form for form, names in LEARNT.items() if name in names.split()), "{}")
    tokenizer = shipped(name)
    first, *others = form.split(", ")
    last = others[0] if others else first
    assert learnt(tokenizer, TALK) == [
        first.format(TALK[1]["content"]),
        last.format(TALK[3]["content"]),
    ]


TOOL = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "wet"},
    {"role": "assistant", "content": "It rains."},
]
THOUGHT = [TALK[0], {**TALK[1], "reasoning_content": "Hm."}]
RENAMED = [TALK[0], {**TALK[1], "reasoning": "Hm."}]
INLINE = [TALK[0], {"role": "assistant", "content": "<think>Hm.</think>Yes."}]
SAID = [TALK[0], {**CALLED[1], "content": "Let me see."}, *CALLED[2:]]
UNLEARNT = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]


@pytest.mark.parametrize(
    ("name", "talk", "variables", "said"),
    [
        (
            "qwen3",
            CALLED,
            {"tools": TOOLS},
            [
                '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
                "<|im_end|>",
                "It rains.<|im_end|>",
            ],
        ),
        (
            "gemma4",
            CALLED,
            {"tools": TOOLS},
            [
                '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>',
                "It rains.<turn|>",
            ],
        ),
        ("qwen3", THOUGHT, {}, ["<think>\nHm.\n</think>\n\nIn the kitchen, I think.<|im_end|>"]),
        ("qwen3", TALK[:2], {"enable_thinking": False}, ["In the kitchen, I think.<|im_end|>"]),
        ("llama3", CALLED, {"tools": TOOLS}, "leaves out `tools`, `tool_calls`"),
        ("phi3", [*TALK, CALLED[2]], {}, "leaves out what the role tool says"),
        (
            "deepseek_r1_distill",
            CALLED,
            {},
            [
                "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function"
                '<\uff5ctool▁sep\uff5c>weather\n```json\n{"city": "Oslo"}\n```'
                "<\uff5ctool▁call▁end\uff5c>",
                "It rains.<\uff5cend▁of▁sentence\uff5c>",
            ],
        ),
        ("lfm2_training", CALLED, {"tools": TOOLS}, "leaves out `tool_calls`"),
        ("llama3", THOUGHT, {}, "leaves out `reasoning_content`"),
        ("qwen3_instruct_2507_training", THOUGHT, {}, "leaves out `reasoning_content`"),
        ("llama3_1", SAID, {"tools": TOOLS}, "leaves out what the role assistant says"),
        ("qwen3", UNLEARNT, {}, ["At the harbour.\n\nUnder the bridge.<|im_end|>"]),
        ("gemma4", THOUGHT, {}, r"rendered as 'In the kitchen.*leaves out what the assistant says"),
        (
            "llama3",
            TALK[:2],
            {"enable_thinking": False, "xml": []},
            [f"{TALK[1]['content']}<|eot_id|>"],
        ),
        ("llama3", TALK, {"custom_instructions": "Be brief."}, "leaves out `custom_instructions`"),
        ("qwen3", RENAMED, {}, ["<think>\nHm.\n</think>\n\nIn the kitchen, I think.<|im_end|>"]),
        ("deepseek_r1_distill", INLINE, {}, "leaves out what the assistant says"),
        ("qwen3_instruct_2507_training", INLINE, {}, ["<think>Hm.</think>Yes.<|im_end|>\n"]),
        ("qwen3", TALK, {"messages": []}, "refuses a conversation"),
    ],
)
def test_what_a_row_holds_is_rendered_and_what_the_assistant_did_is_learnt_or_it_is_refused(
    name: str, talk: Any, variables: Any, said: Any
) -> None:
    if isinstance(said, str):
        with pytest.raises(ConfigError, match=said):
            assistant_mask(shipped(name), talk, variables)
    else:
        assert learnt(shipped(name), talk, variables) == said


def test_a_text_to_continue_has_one_beginning_and_no_end() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("none"))
    ids = tokenizer("Once", add_special_tokens=False)["input_ids"]
    names = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<bos>", "<eos>")}
    for single in ("<bos> $A <eos>", "$A <eos>", "<bos> $A", "$A"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=list(names.items())
        )
        begun = [names["<bos>"], *ids]
        once = begun if "<bos>" in single else ids
        assert text_ids(tokenizer, ["<bos>Once", "Once"], is_chat=False) == [begun, once]


def test_a_template_that_changes_the_answer_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = FAMILIES["chatml"].replace(
        "message.content +", "message.content[:9] +"
    )
    try:
        with pytest.raises(
            ConfigError, match=r"turn 'In the kitchen, I think\.'.* as 'In the ki':"
        ):
            assistant_mask(tokenizer, TALK)
    finally:
        tokenizer.chat_template = FAMILIES["chatml"]


@pytest.mark.parametrize("family", ["chatml", "marked"])
def test_a_template_that_writes_the_date_makes_the_same_prompts_every_day(family: str) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer(family))
    today = """{{ strftime_now('%d %b %Y') }} {{ strftime_now( "%Y-%m-%d" ) }} """
    tokenizer.chat_template = f"{{% if strftime_now is defined %}}{today}{{% endif %}}" + str(
        tokenizer.chat_template
    )
    same = "26 Jul 2024 2024-07-26 "
    assert tokenizer.decode(chat_ids(tokenizer, TALK[:1])).startswith(same)
    assert tokenizer.decode(assistant_mask(tokenizer, TALK)[0]).startswith(same)


def test_a_role_that_the_template_does_not_take_is_refused_with_its_reason() -> None:
    system = {"role": "system", "content": "Be short."}
    assert chat_ids(chat_tokenizer("chatml"), [system, *TALK[:1]])
    with pytest.raises(TemplateRefusedError, match="System role not supported"):
        chat_ids(chat_tokenizer("gemma"), [system, *TALK[:1]])
    with pytest.raises(TemplateRefusedError, match="must alternate"):
        chat_ids(chat_tokenizer("mistral"), [TALK[0], TALK[2]])


NOT_LEARNT = [{name: 0} for name in ("weight", "loss_mask", "loss_weight")]
NOT_LEARNT += [{name: False} for name in ("loss", "train", "training", "trainable", "learn")]
NOT_LEARNT += [{"train_on_turn": False}, {"masked": True}, {"no_loss": True}, {"loss": "false"}]
LEARNT_TOO = [{"loss": True}, {"weight": 1}, {"masked": False}, {"train": None}, {"note": False}]
NEITHER = [{"weight": 0.5}, {"loss_mask": [1, 0]}, {"mask": 0}, {"train_detail": [{}]}]


@pytest.mark.parametrize("flag", [*NOT_LEARNT, *LEARNT_TOO, *NEITHER], ids=str)
def test_an_answer_that_its_row_says_not_to_learn_is_not_learnt(flag: dict[str, Any]) -> None:
    def said(row: dict[str, Any]) -> list[str]:
        talk: Any = conversation_of(row, "messages")
        return learnt(chat_tokenizer("chatml"), talk.messages)

    row = {"messages": [TALK[0], {**TALK[1], **flag}, *TALK[2:]]}
    if flag in NEITHER:
        with pytest.raises(UnmaskableError, match=next(iter(flag))):
            said(row)
        return
    answers = [f"{TALK[index]['content']}<|im_end|>" for index in (1, 3)]
    expected = answers[1:] if flag in NOT_LEARNT else answers
    assert said(row) == expected
    assert said({"messages": TALK, "loss_mask": [0, int(flag in LEARNT_TOO), 0, 1]}) == expected


def test_a_developer_is_the_system_unless_the_template_knows_the_role() -> None:
    roles = ("Developer", "human", "bot", "User")
    turns = [{"from": role, "value": f"said by {role}"} for role in roles]
    talk: Any = conversation_of({"prompt": turns}, "prompt")
    for family in ("chatml", "marked"):
        tokenizer = copy.deepcopy(chat_tokenizer(family))
        assert "system\nsaid by Developer" in tokenizer.decode(chat_ids(tokenizer, talk.messages))
        assert learnt(tokenizer, talk.messages) == ["said by bot<|im_end|>"]
    tokenizer.chat_template += "{% if messages[0].role == 'developer' %}{% endif %}"
    assert "developer\nsaid by Developer" in tokenizer.decode(chat_ids(tokenizer, talk.messages))


@pytest.mark.parametrize("name", ["m", "loop.previtem", "ns.last"])
def test_a_template_may_ask_for_no_content_by_any_name(name: str) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("none"))
    tokenizer.chat_template = (
        "{% set ns = namespace(last=messages[0]) %}{% for m in messages %}{% set ns.last = m %}"
        f"{{% if {name} is defined and {name}.content is none %}}<called>{{% endif %}}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"function": {"name": "rain", "arguments": {}}}
    for content in ("", "So: "):
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        text = tokenizer.decode(chat_ids(tokenizer, [TALK[0], called, TALK[2]]))
        assert text.count("<called>") == (not content)


def test_a_tokenizer_without_a_chat_template_says_what_to_do() -> None:
    for ask in (lambda t: chat_ids(t, TALK), lambda t: assistant_mask(t, TALK)):
        with pytest.raises(ConfigError, match=r"has no chat template.*save one with it"):
            ask(chat_tokenizer("none"))
