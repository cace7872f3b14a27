"""Rows that cannot be a prompt are counted or refused, with the reason and what to do."""

import codecs
import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.conversations import Account, read_conversations
from specdata.prompts.loading import check_sets, dropped, load_prompts
from tests.support.chats import chat_tokenizer
from tests.support.hub import Server
from tests.support.prompt_files import CHAT, PLAIN, datasets_cache, jsonl, load, parquet, texts

__all__ = ["datasets_cache"]
pytestmark = pytest.mark.usefixtures("cache")


def test_what_is_dropped_is_counted_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    long = json.dumps({"prompt": "far too long " * 50})
    lines = [b'{"prompt": "good"}', b'{"prompt": "good"}', b'{"prompt": "  ?! "}', long.encode()]
    lines += [b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800 half"}', b'{"prompt": 7}', b""]
    path.write_bytes(b"\n".join([*lines, b'{"prompt": "also good"}']))
    loaded = load(str(path), PLAIN, max_tokens=40)
    assert texts(loaded) == ["good", "also good"]
    (entry,) = loaded.report
    reasons = {"duplicate": 1, "near_empty": 1, "over_long": 1, "undecodable": 3}
    assert {name: count for name, count in entry["dropped"].items() if count} == reasons
    assert (entry["read"], entry["kept"]) == (8, 2)
    assert json.loads(json.dumps(loaded.report)) == loaded.report
    (line,) = dropped(loaded.report)
    assert "2 of 8 kept; 1 duplicate, 1 near_empty, 1 over_long, 3 undecodable" in line
    learnt = {loaded.prompts[0].example_id}
    others = load_prompts([PromptSet(str(path))], PLAIN, seed=0, trained_on=learnt)
    assert "good" not in texts(others)
    assert others.report[0]["dropped"]["trained_on"] == 2


def test_it_is_said_of_texts_for_a_target_that_chats_that_they_are_taken_as_they_are(
    tmp_path: Path,
) -> None:
    asked = jsonl(tmp_path / "two.jsonl", [{"prompt": "good"}, {"prompt": "also good"}])

    def said(name: str, tokenizer: Any, chat: bool | None = None) -> list[str]:
        sets = [PromptSet(name, "train", 2, chat=chat)]
        return dropped(load_prompts(sets, tokenizer, seed=0).report)

    (line,) = said(asked, CHAT)
    assert "taken as they are; `chat: true`" in line
    assert said(asked, CHAT, True) == said(asked, CHAT, False) == said(asked, PLAIN) == []
    assert said("instruct", CHAT) == []


def test_prompts_with_an_id_that_the_model_has_no_row_for_are_counted_by_its_token(
    tmp_path: Path,
) -> None:
    tokenizer, rows = copy.deepcopy(PLAIN), len(PLAIN)
    tokenizer.add_tokens(["<image>"])
    asked = jsonl(tmp_path / "two.jsonl", [{"prompt": "good"}, {"prompt": "see <image> there"}])
    loaded = load(asked, tokenizer, vocabulary=rows)
    assert texts(loaded) == ["good"]
    (line,) = dropped(loaded.report)
    assert f"1 out_of_vocabulary. the tokenizer's '<image>' is id {rows}, and the" in line


@pytest.mark.parametrize(("name", "end"), [("p[1]", ".jsonl"), ("p*", ".json"), ("p?", ".parquet")])
def test_a_prompt_files_path_is_taken_literally_whatever_it_holds(
    tmp_path: Path, name: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for stem in ("p1", name):
        rows = [{"prompt": f"of {stem}"}]
        path = folder / f"{stem}{end}"
        _ = parquet(path, rows) if end == ".parquet" else jsonl(path, rows)
    for source in (f"{name}{end}", str(folder / f"{name}{end}")):
        assert texts(load(source, PLAIN)) == [f"of {name}"]


def test_an_empty_question_is_not_made_a_prompt_by_its_template(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": ""} for text in ("Why?", "?", "", None)]
    source = parquet(tmp_path / "copy.parquet", rows)
    for tokenizer in (PLAIN, chat_tokenizer("gemma")):
        loaded = load_prompts([PromptSet("gsm8k", "test", 0, source=source)], tokenizer, seed=0)
        (entry,) = loaded.report
        assert (entry["kept"], entry["dropped"]["near_empty"]) == (1, 3)
        assert (entry["source"], entry["licence"]) == (source, "mit")


def test_conversations_that_cannot_be_prompts_are_counted_too(tmp_path: Path) -> None:
    def row(*turns: tuple[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    rows = [
        row(("user", "Hello.")),
        row(("assistant", "Hello.")),
        row(("user", "Hello."), ("narrator", "He left.")),
        row(("user", None)),
        row(("system", "Be brief."), ("user", "Hello.")),
        row(("user", " ")),
        row((["user"], "Hello.")),  # type: ignore[arg-type]
    ]
    wanted = [PromptSet(jsonl(tmp_path / "talks.jsonl", rows), "train", 0)]
    (entry,) = load_prompts(wanted, chat_tokenizer("gemma"), seed=0).report
    assert {name: count for name, count in entry["dropped"].items() if count} == {
        "no_user_turn": 3,
        "undecodable": 1,
        "refused": 1,
        "near_empty": 1,
    }
    assert "System role not supported" in entry["refused_because"]


def test_a_set_of_which_nothing_is_left_is_refused_with_the_reasons(tmp_path: Path) -> None:
    name = jsonl(tmp_path / "long.jsonl", [{"prompt": "word " * 99}, {"prompt": "."}])
    with pytest.raises(
        ConfigError, match=r"0 of 2 kept.*1 near_empty, 1 over_long\. at most 9 tokens fit"
    ):
        load_prompts([PromptSet(name, "train", 2)], PLAIN, seed=0, max_tokens=9)


def bad_sets(folder: Path) -> list[tuple[PromptSet, str]]:
    broken = folder / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing that follows")
    gsm = parquet(folder / "gsm.parquet", [{"qestion": "Why?", "answer": "So."}])
    both = jsonl(folder / "both.jsonl", [{"messages": None, "prompt": "a"}])
    good = jsonl(folder / "good.jsonl", [{"prompt": "a"}])
    (folder / "prompts.csv").write_text("prompt\na\n")

    def lines(*rows: str, count: int) -> PromptSet:
        path = folder / f"{len(rows)}-{count}.jsonl"
        path.write_text("\n".join(rows))
        return PromptSet(str(path), "train", count)

    return [
        (lines('{"prmpt": "a"}', "", count=1), r"no column 'prompt' \(did you mean 'prmpt'"),
        (lines("not json", count=1), "line 1: must be a JSON object"),
        (
            lines('{"prompt": "a"}', "", '{"messages": []}', count=2),
            "row 3, has no column 'prompt'",
        ),
        (lines('{"messages": []}', '{"prompt": "a"}', count=2), "row 2, has no column 'messages'"),
        (lines(count=0), "is empty: it must hold prompts"),
        (
            PromptSet(str(folder / "prompts.csv")),
            r"unknown prompt set.*a file that ends in \.jsonl",
        ),
        (PromptSet(str(broken), count=1), r"cannot be read.*whole"),
        (PromptSet(str(folder / "no.parquet"), count=1), "there is no file"),
        (PromptSet("gsm8k", source=gsm), r"no column 'question'.*did you mean 'qestion'"),
        (PromptSet("gsm8k", "validation"), "no split 'validation'; choose from train, dev, test"),
        (PromptSet("gsm8"), r"unknown prompt set 'gsm8': did you mean 'gsm8k'"),
        (PromptSet(both, count=1), "mixes rows"),
        (PromptSet(good, count=1, template="{prompt!r}"), "may hold a column's name"),
        (PromptSet(good, count=1, template="{q}"), r"no column 'q' \(known: prompt\)"),
        (PromptSet(good, count=1, source="x.jsonl"), "`source` is where a catalogued set"),
        (PromptSet(good, count=1, subset="a"), "`subset` chooses a part of a Hub data set or a"),
        (PromptSet("maths", "train", 1, source_split="a"), "`source_split` chooses a part"),
        (PromptSet(good, count=1, chat=True), "has no chat template"),
        (PromptSet("instruct", "train", 0), "give a `count`"),
        (PromptSet("maths", "train", 10**6), "lower `count`"),
        (PromptSet("owner/absent", "train", 1), r"check the id and the network.*or name a local"),
        (PromptSet("spec-bench"), r"not on the Hub: download it \(`curl -LO https.*`source:`"),
        (PromptSet("https://a.org/b.jsonl"), r"not on the Hub: download it.*and give the file"),
        (PromptSet("alpaca", "train", 1), "check the id and the network.*`source:` a local copy"),
    ]


@pytest.mark.parametrize("number", range(24))
def test_a_set_that_cannot_be_used_says_what_to_do(number: int, tmp_path: Path) -> None:
    wanted, message = bad_sets(tmp_path)[number]
    with pytest.raises(ConfigError, match=message):
        load(wanted, PLAIN)
    if "chat template" not in message:  # all else is found before a model is loaded
        with pytest.raises(ConfigError, match=message):
            check_sets([wanted], 0)


HUB_SETS = [
    PromptSet("me/gated"),
    PromptSet("gsm8k", source="me/absent@v1"),
    PromptSet("wmt-en-de", "test", 0),
    PromptSet("piqa", "test", 0),
    PromptSet("me/data@v2", "train", 0, subset="b"),
    PromptSet("gsm8k", "test", 0),
]


@pytest.mark.slow
def test_of_the_hub_what_is_asked_is_read_and_again_offline_or_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    """By another process: revision, configuration and split of a data set, and no other file."""
    root = tmp_path / "hub"
    parquet(root / "openai/gsm8k/main/test.parquet", [{"question": "Why?", "answer": ""}])
    gsm8k = "- config_name: main\n  data_files:\n  - split: test\n    path: main/test.parquet\n"
    (root / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n{gsm8k}---\n")
    for split in ("train", "test"):
        day = {"translation": {"de": "Tag", "en": f"{split} day"}}
        parquet(root / "wmt/wmt14/de-en" / f"{split}-00000-of-00001.parquet", [day])
        goal = {"goal": f"{split} goal", "sol1": "", "sol2": "", "label": 0}
        parquet(root / "ybisk/piqa/plain_text" / split / "0000.parquet", [goal])
        for subset in ("a", "b"):
            row = {"prompt": f"{subset} {split}"}
            parquet(root / "me/data" / subset / f"{split}.parquet", [row])
    card = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.parquet\n"
        for name in ("a", "b")
    )
    (root / "me/data/README.md").write_text(f"---\nconfigs:\n{card}---\n")
    script = (
        "from specdata.config import PromptSet\n"
        "from specdata.errors import ConfigError\n"
        "from tests.support.prompt_files import PLAIN, load, texts\n"
        f"for wanted in {HUB_SETS}:\n"
        "    try:\n        print(texts(load(wanted, PLAIN)))\n"
        "    except ConfigError as error:\n        print(error)\n"
    )
    with Server(root) as server:
        env = os.environ | {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        online, offline = (
            subprocess.run(
                [sys.executable, "-c", script],
                env=env | {"HF_HUB_OFFLINE": is_offline},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            for is_offline in "01"
        )
    gated, absent, wmt, piqa, mine, gsm8k = online
    assert "is a gated dataset on the Hub" in gated
    assert "ask for access on its page and log in (`hf auth login`" in gated
    assert "'me/absent' doesn't exist on the Hub or cannot be accessed" in absent
    assert "give `source:` a local copy" in absent
    assert offline[2:] == online[2:]
    for line in offline[:2]:
        assert "check the id and the network" in line
    assert "Input: test day" in wmt
    assert "Question: test goal" in piqa
    assert mine == "['b train']"
    assert "Why?" in gsm8k
    fetched = [path for path in server.asked if path.endswith(".parquet")]
    assert fetched
    assert not any("de-en/train" in path or "plain_text/train" in path for path in fetched)
    assert any("piqa/revision/refs/convert/parquet" in path for path in server.asked)
    assert any("data/resolve/v2/" in path for path in server.asked)


SAID = [("user", "Rain in Oslo?"), ("assistant", "Yes."), ("user", "And here?")]
OPENAI = [{"role": role, "content": content} for role, content in SAID]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in SAID
]
PARTS = [
    {**turn, "content": [{"type": "text", "text": each} for each in turn["content"].split("\n")]}
    for turn in OPENAI
]


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize("turns", [OPENAI, SHAREGPT, PARTS], ids=["openai", "sharegpt", "parts"])
@pytest.mark.parametrize("write", [list, json.dumps, lambda said: [*map(json.dumps, said)]])
def test_a_conversation_is_known_by_what_it_holds_not_by_its_column(
    column: str, turns: Any, write: Any, tmp_path: Path
) -> None:
    row = {column: write(turns)}
    if column == "prompt":
        row = {"prompt": write(turns[:1]), "completion": write(turns[1:])}
    for source in (jsonl(tmp_path / "a.jsonl", [row]), parquet(tmp_path / "b.parquet", [row])):
        loaded = load_prompts([PromptSet(source, "train", 0, turns="first")], CHAT, seed=0)
        assert [prompt.messages for prompt in loaded.prompts] == [tuple(OPENAI[:1])]
        ((_, talk),) = read_conversations(Account(source), 0)
        assert talk == (OPENAI, {})


def test_what_a_row_holds_beside_its_messages_is_given_to_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]
    call = {"name": "rain", "arguments": '{"city": "Oslo"}'}
    called = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Oslo"}}}
    system = {"role": "system", "content": "Be brief."}
    asked = {"role": "assistant", "content": None}
    result = {"role": "tool", "content": "wet", "tool_call_id": "1"}
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Wet."}
    answer = {**asked, "content": "", "tool_calls": [called]}
    given = {"tools": tools, "mode": "short"}
    beside = {"system": "Be brief.", "chat_template_kwargs": {"mode": "short"}}
    talk = [OPENAI[0], {**asked, "tool_calls": [{"function": call}]}, result, thought]
    rows = [
        {"messages": talk, "tools": json.dumps(tools), **beside},
        {"messages": [system, *talk], "tools": tools, **beside},
    ]
    odd = [{"system": 7}, {"tools": "none"}, {"chat_template_kwargs": "x"}]
    bad: list[dict[str, Any]] = [{"messages": OPENAI, **each} for each in odd]
    bad.append({"messages": [OPENAI[0], {**asked, "tool_calls": [{"function": 7}]}]})
    source = jsonl(tmp_path / "a.jsonl", [*rows, *bad])
    account = Account(source)
    whole = [system, OPENAI[0], answer, result, thought]
    assert list(read_conversations(account, 0)) == [(row, (whole, given)) for row in (1, 2)]
    assert (account.read, account.left_out) == (6, {"undecodable": 4})
    tokenizer = copy.deepcopy(chat_tokenizer("none"))
    tokenizer.chat_template = (
        "{{ mode }}{{ level }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    loaded = load(source, tokenizer, template_variables={"mode": "long", "level": "low"})
    assert tokenizer.decode(loaded.prompts[0].ids) == "shortlowrainBe brief.Rain in Oslo?"
    assert loaded.prompts[0].variables == {**given, "level": "low"}
    (entry,) = loaded.report
    assert (entry["kept"], entry["dropped"]["duplicate"]) == (1, 1)
    assert entry["dropped"]["undecodable"] == 4


ASKED = {"name": "rain", "arguments": {"city": "Oslo", "unit": None}}
AS_TEXT = {"name": "rain", "arguments": json.dumps(ASKED["arguments"])}
LATER = {"name": "rain", "arguments": {"day": 1, "list": [None]}}
CALLS = [{"type": "function", "function": each} for each in (ASKED, LATER)]
SCHEMA = {"name": "rain", "parameters": {"type": "object", "default": None}}
SCHEMA_AS_TEXT = {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}
TOOL = {"type": "function", "function": SCHEMA}
HI = OPENAI[0]


@pytest.mark.parametrize("role", ["tool", "function", "observation", "tool_response", "ipython"])
@pytest.mark.parametrize(
    ("said", "tools"),
    [
        ([{"tool_calls": CALLS}], {"tools": [TOOL]}),
        ([{"tool_calls": json.dumps(CALLS)}], {"tools": json.dumps([TOOL])}),
        ([{"tool_calls": [{"function": AS_TEXT}, LATER]}], {"tools": [json.dumps(TOOL)]}),
        ([{"function_call": AS_TEXT}, {"role": "tool_call", "content": json.dumps(LATER)}],
         {"functions": [SCHEMA]}),
        ([{"role": "function_call", "content": json.dumps([ASKED, LATER])}],
         {"functions": json.dumps([SCHEMA])}),
        ([{"role": "tool_call", "content": json.dumps(each)} for each in (ASKED, LATER)],
         {"tools": [{**TOOL, "function": SCHEMA_AS_TEXT}]}),
    ],
)  # fmt: skip
def test_calls_of_tools_are_read_in_every_form_with_the_nulls_that_were_said(
    said: list[dict[str, Any]], tools: dict[str, Any], role: str, tmp_path: Path
) -> None:
    turns = [{"role": "assistant", "content": "", **each} for each in said]
    talk = [OPENAI[0], *turns, {"role": role, "name": "rain", "content": "wet"}, OPENAI[2]]
    account = Account(jsonl(tmp_path / "a.jsonl", [{"messages": talk, **tools}]))
    ((_, read),) = read_conversations(account, 0)
    assert read.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert read.messages[2:] == [{"role": "tool", "content": "wet", "name": "rain"}, OPENAI[2]]
    assert read.variables == {"tools": [TOOL]}


def test_what_a_table_fills_up_for_other_rows_is_no_null_that_was_said(tmp_path: Path) -> None:
    calls = [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": [2]}}]
    turns = [{"role": "assistant", "tool_calls": [{"function": call}]} for call in calls]
    path = parquet(tmp_path / "a.parquet", [{"messages": [HI, turn]} for turn in turns])
    talks = read_conversations(Account(path), 0)
    assert [talk.messages[1]["tool_calls"][0]["function"] for _, talk in talks] == calls


@pytest.mark.parametrize(
    "row",
    [
        *({"messages": [HI], name: ["a"]} for name in ("images", "video_path", "imageUrl")),
        {"prompt": "Hello.", "image": {"bytes": "x"}},
        {"messages": [{**HI, "images": ["a.jpg"]}]},
        *({"messages": [{**HI, "content": [{"type": kind, kind: "x"}]}]}
          for kind in ("image_url", "input_audio", "video")),
        {"messages": [{**HI, "content": [{"text": "What?\n<image> ", "type": "text"}]}]},
        *({"messages": [{"from": "human", "value": text}]}
          for text in ("<image>\nWhat?", "What?\n<video>", "<audio><audio>What?", "<|image_pad|>")),
    ],
)  # fmt: skip
def test_rows_of_more_than_text_are_left_out_and_counted(row: Any, tmp_path: Path) -> None:
    text = "<image> is a tag:\n<image>\n</image>"
    good = {"messages": [{**HI, "content": text}], "prompt": text, "image": None, "imagined": "x"}
    source = jsonl(tmp_path / "a.jsonl", [row, {name: good[name] for name in good if name in row}])
    loaded = load(source, CHAT)
    assert (loaded.report[0]["kept"], loaded.report[0]["dropped"]["media"]) == (1, 1)
    assert "1 media. row 1: `" in dropped(loaded.report)[0]


def test_a_row_with_sounds_costs_itself_alone_where_nothing_decodes_them(tmp_path: Path) -> None:
    sounds = ({"bytes": b"RIFF", "path": None}, None)
    rows = datasets.Dataset.from_list([{"messages": [HI], "audio": each} for each in sounds])
    rows.cast_column("audio", datasets.Audio()).to_parquet(source := str(tmp_path / "a.parquet"))
    (entry,) = load(source, CHAT).report
    assert (entry["read"], entry["kept"]) == (2, 1)


def test_keys_that_nothing_reads_are_named_and_counted(tmp_path: Path) -> None:
    turns = [{**turn, "toxic": False, "id": 1} for turn in OPENAI]
    rows = [
        {"id": 1, "messages": turns, "enable_thinking": False, "source": ""},
        {"messages": OPENAI, "enable_thinking": True, "system": "Be brief."},
    ]
    source = jsonl(tmp_path / "a.jsonl", rows)
    (line,) = dropped(
        load_prompts([PromptSet(source, "train", 0, turns="last")], CHAT, seed=0).report
    )
    assert line.endswith("rows: `enable_thinking` in 2, `toxic` of messages in 1")
    list(read_conversations(account := Account(source), 0))
    assert str(account) == "`enable_thinking`, not read, in 2; `toxic` of messages, not read, in 1"
    source = jsonl(tmp_path / "b.jsonl", [{"prompt": "Hi.", "system": "x", "completion": "y"}])
    (said,) = dropped(load(source, PLAIN).report)
    assert said.endswith("rows: `system` in 1")


@pytest.mark.parametrize("end", [".jsonl", ".json"])
def test_a_bad_character_costs_its_row_alone_in_every_kind_of_file(
    end: str, tmp_path: Path
) -> None:
    rows = [b'{"prompt": "\\ud800 half"}', b'{"prompt": "a \xff"}', b'{"prompt": "good"}']
    whole = b"\r\n".join(rows) if end == ".jsonl" else b"[%s]" % b",\r\n".join(rows)
    path = tmp_path / f"a{end}"
    path.write_bytes(codecs.BOM_UTF8 + whole)
    loaded = load(str(path), PLAIN)
    assert texts(loaded) == ["good"]
    assert loaded.report[0]["dropped"]["undecodable"] == 2


def test_published_rows_are_read_as_they_are_or_by_the_template_that_is_named(
    tmp_path: Path,
) -> None:
    said = [{"role": "user", "content": "Why?"}]
    rows: list[tuple[dict[str, Any], str]] = [
        ({"turns": ["Why?", "And how?"], "question_id": 81}, ""),
        ({"prompt": ["Why?", "And how?"]}, ""),
        ({"turns": said}, ""),
        ({"turns": [{"content": "Why?"}], "cluster": "x"}, ""),
        ({"id": "0", "data": ["Why?", "So."]}, "{data.0}"),
        ({"conversation": said, "model": "x"}, ""),
        ({"question": "Why?", "answer": "7"}, "{question}"),
        ({"problem": "Why?", "solution": "7", "level": "1"}, "{problem}"),
        ({"instruction": "Why?", "input": "", "output": "7"}, "{instruction} {input}"),
    ]
    for number, (row, template) in enumerate(rows):
        dataset = PromptSet(str(jsonl(tmp_path / f"{number}.jsonl", [row])), "test", 0)
        if template:
            with pytest.raises(ConfigError, match=re.escape(f"such as {template!r}")):
                load(dataset, CHAT)
            dataset = dataclasses.replace(dataset, template=template, chat=True)
        (prompt,) = load(dataset, CHAT).prompts
        assert prompt.messages == ({"role": "user", "content": "Why?"},)
    batch = jsonl(tmp_path / "batch.jsonl", [{"url": "/v1", "body": {"messages": said}}])
    with pytest.raises(ConfigError, match=re.escape("`body.messages` holds a conversation")):
        load(PromptSet(str(batch), "test", 0), CHAT)
