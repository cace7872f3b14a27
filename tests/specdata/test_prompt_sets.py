"""Catalogued and other data sets, each read from small files in its true schema."""

import copy
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE
from specdata.prompts.chat_templates import chat_ids
from specdata.prompts.loading import check_sets, dropped, load_prompts
from specdata.prompts.prompt import Prompt
from specdata.prompts.reading import prompt_inputs
from specdata.prompts.stored import Prompts
from tests.support.prompt_files import CHAT, PLAIN, datasets_cache, jsonl, load, parquet, texts

__all__ = ["datasets_cache"]
pytestmark = pytest.mark.usefixtures("cache")

ALPACA = {
    "instruction": "Name the animal.",
    "input": "It barks.",
    "output": "A dog.",
    "text": "Below is an instruction ...",
}
QUESTIONS = ["Write a poem.", "Now in one line."]
# One row of each set, with every column that it has on its page, and what becomes of it:
# the text for a target without chat template, the user's message for one with.
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "alpaca": (
        ALPACA,
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Name the animal.\n\n### Input:\nIt barks.\n\n### Response:\n",
        "Name the animal.\n\nIt barks.",
    ),
    "gsm8k": (
        {"question": "What is 2 + 2?", "answer": "It is 4.\n#### 4"},
        "Question: What is 2 + 2?\nAnswer:",
        "What is 2 + 2?",
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n    '''Half of x.'''\n",
            "canonical_solution": "    return x / 2\n",
            "test": "assert f(2) == 1",
            "entry_point": "f",
        },
        "def f(x):\n    '''Half of x.'''\n",
        "Complete the following Python function.\n\n```python\ndef f(x):\n"
        "    '''Half of x.'''\n```",
    ),
    "wmt-en-de": (
        {"translation": {"de": "Guten Tag.", "en": "Good day."}},
        "Translate the input English sentence into German.\nInput: Good day.\nOutput:",
        "Translate the input English sentence into German.\nInput: Good day.\nOutput:",
    ),
    "xsum": (
        {"document": "It rained. It was wet.", "summary": "Rain fell.", "id": "1"},
        "Article: It rained. It was wet.\n\nSummary in one sentence:",
        "Summarize the following article in one sentence.\n\nIt rained. It was wet.",
    ),
    "dolly": (
        {"instruction": "Who was first?", "context": "", "response": "Ada.", "category": "open_qa"},
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nWho was first?\n\n### Response:\n",
        "Who was first?",
    ),
    "lm1b": ({"text": "The cat sat on the mat ."}, "The cat sat", ""),
    "webqa": (
        {"url": "http://x", "question": "what is it?", "answers": ["this", "that"]},
        "Question: what is it?\nAnswer:",
        "what is it?",
    ),
    "piqa": (
        {"goal": "How to boil eggs?", "sol1": "In water.", "sol2": "In sand.", "label": 0},
        "Question: How to boil eggs?\nAnswer:",
        "How to boil eggs?",
    ),
    "mt-bench": (
        {"prompt": QUESTIONS, "reference": [], "category": "writing", "prompt_id": 1},
        "USER: Write a poem.\nASSISTANT:",
        "Write a poem.",
    ),
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": QUESTIONS},
        "USER: Write a poem.\nASSISTANT:",
        "Write a poem.",
    ),
}


def alpaca(folder: Path, count: int) -> str:
    rows = [
        ALPACA | {"instruction": f"Name animal {index}.", "input": ""} for index in range(count)
    ]
    return parquet(folder / "alpaca.parquet", rows)


def test_every_catalogued_set_has_a_row_here() -> None:
    assert set(CATALOGUE) == {*ROWS, "sharegpt"}
    for entry in CATALOGUE.values():
        assert entry.licence
        assert entry.splits.keys() <= {"train", "dev", "test"}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("write", [parquet, jsonl], ids=["parquet", "jsonl"])
def test_a_row_in_its_true_schema_becomes_the_text_or_the_message(
    name: str, write: Any, tmp_path: Path
) -> None:
    row, plain, asked = ROWS[name]
    source = write(tmp_path / f"copy.{write.__name__}", [row])
    split = "train" if name in ("alpaca", "dolly") else "test"
    wanted = PromptSet(name, split, 1, source=source, turns="first")
    (prompt,) = load(wanted, PLAIN).prompts
    assert PLAIN.decode(prompt.ids[1:]) == plain
    assert (prompt.dataset, prompt.split, prompt.messages) == (name, split, ())
    (prompt,) = load(wanted, CHAT).prompts
    if asked:
        assert prompt.messages == ({"role": "user", "content": asked},)
        assert prompt.ids == chat_ids(CHAT, prompt.messages)
    else:  # text to continue is no message
        assert CHAT.decode(prompt.ids[1:]) == plain


def test_alpaca_is_cut_as_40_10_and_2_by_content_alone(tmp_path: Path) -> None:
    source = alpaca(tmp_path, 520)
    sets = [PromptSet("alpaca", split, 0, source=source) for split in ("train", "dev", "test")]
    whole = load_prompts(sets, CHAT, seed=0)
    assert [entry["kept"] for entry in whole.report] == [400, 100, 20]
    where = {prompt.example_id: prompt.split for prompt in whole.prompts}
    assert len(where) == 520
    # Another order, doubled rows and another seed move no prompt to another split.
    rows = pq.read_table(source).to_pylist()
    again = [
        dataclasses.replace(
            prompt_set, source=parquet(tmp_path / "b.parquet", [*rows[::-1], *rows[:99]])
        )
        for prompt_set in sets
    ]
    moved = load_prompts(again, CHAT, seed=7)
    assert {prompt.example_id: prompt.split for prompt in moved.prompts} == where
    assert sum(entry["dropped"]["duplicate"] for entry in moved.report) == 99


def test_the_order_follows_the_seed_and_a_larger_count_appends(tmp_path: Path) -> None:
    wanted = PromptSet("alpaca", "train", 10, source=alpaca(tmp_path, 52))
    first, other = (texts(load_prompts([wanted], PLAIN, seed=seed)) for seed in (0, 1))
    assert len(first) == 10
    assert first != other
    assert first == texts(load(wanted, PLAIN))
    more = dataclasses.replace(wanted, count=20)
    assert texts(load(more, PLAIN))[:10] == first
    all_there_are = load(dataclasses.replace(wanted, count=41), PLAIN)
    assert len(all_there_are.prompts) == 40
    assert "40 of 40 kept; it has no more (41 were asked for)" in dropped(all_there_are.report)[0]


def test_a_copy_of_the_repository_is_read_with_its_configurations_and_splits(
    tmp_path: Path,
) -> None:
    row = ROWS["gsm8k"][0]
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            parquet(
                tmp_path / "copy" / subset / f"{split}-00000-of-00001.parquet",
                [row | {"question": f"{subset} {split} {index}?"} for index in range(20)],
            )
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {name}\n    path: {subset}/{name}-*\n" for name in ("train", "test"))
        for subset in ("main", "socratic")
    )
    (tmp_path / "copy" / "README.md").write_text(card + "---\n")
    sets = [
        PromptSet("gsm8k", split, 0, source=str(tmp_path / "copy"))
        for split in ("train", "dev", "test")
    ]
    loaded = load_prompts(sets, PLAIN, seed=0)
    assert [entry["kept"] for entry in loaded.report] == [19, 1, 20]
    assert all(" main " in text.replace(":", " ") for text in texts(loaded))
    inputs = prompt_inputs(sets)
    assert sum(name.endswith(".parquet") for name in inputs.values()) == 4
    with pytest.raises(ConfigError, match=r"cannot be read.*source_split"):
        load(dataclasses.replace(sets[2], source_split="tests"), PLAIN)
    with pytest.raises(ConfigError, match=r"cannot be read.*subset"):
        load(dataclasses.replace(sets[2], subset="mian"), PLAIN)


@pytest.mark.parametrize(
    ("names", "is_whole"),
    [
        (("a.jsonl", "b.jsonl"), True),
        (("train-a.jsonl", "train-b.jsonl", "test.jsonl"), True),
        (("a.jsonl", "b.jsonl", ".cache/c.jsonl"), True),
        (("a.jsonl", "b.parquet"), False),
        (("train-maths.jsonl", "chats.jsonl"), False),
        (("train/a.jsonl", "b.jsonl"), False),
    ],
)
def test_a_folder_is_read_whole_or_refused(
    names: tuple[str, ...], is_whole: bool, tmp_path: Path
) -> None:
    """Its files may be links to others without a suffix, as in the Hub's cache."""
    folder = tmp_path / "prompts"
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write = parquet if name.endswith("parquet") else jsonl
        (folder / name).symlink_to(write(tmp_path / f"{number}", [{"prompt": f"Say {name}."}]))
    if is_whole:
        assert len(load(PromptSet(str(folder), "train", 0), PLAIN).prompts) == 2
    else:
        with pytest.raises(ConfigError, match="would be passed over"):
            load(PromptSet(str(folder), "train", 0), PLAIN)


SHAREGPT = {
    "id": "a_0",
    "conversations": [
        {"from": "human", "value": "Hello there."},
        {"from": "gpt", "value": "Hello to you."},
        {"from": "human", "value": "How are you?"},
        {"from": "gpt", "value": "Well."},
    ],
}


@pytest.mark.parametrize(("turns", "lengths"), [("all", [1, 3]), ("first", [1]), ("last", [3])])
def test_a_recorded_conversation_gives_a_prompt_a_turn(
    turns: Any, lengths: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps([SHAREGPT]))
    wanted = PromptSet("sharegpt", "train", 0, source=str(path), turns=turns)
    prompts = load(wanted, CHAT).prompts
    assert [len(prompt.messages) for prompt in prompts] == lengths
    own = PromptSet(jsonl(tmp_path / "own.jsonl", [SHAREGPT]), "train", 0, turns=turns)
    assert [each.ids for each in load_prompts([own], CHAT, seed=0).prompts] == [
        each.ids for each in prompts
    ]
    assert prompts[-1].messages[-1]["role"] == "user"
    assert prompts[-1].ids == chat_ids(CHAT, prompts[-1].messages)
    with pytest.raises(ConfigError, match="has no chat template"):
        load(wanted, PLAIN)


def test_conversations_are_cut_by_what_they_say_whatever_their_keys(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": f"Say {n}."}] for n in range(100)]
    renamed = [[{"from": "human", "value": turn["content"]} for turn in talk] for talk in turns]
    for name, talks in (("a", turns), ("b", renamed)):
        source = jsonl(tmp_path / f"{name}.jsonl", [{"conversations": talk} for talk in talks])
        sets = [
            PromptSet("sharegpt", split, 0, source=source) for split in ("train", "dev", "test")
        ]
        assert [entry["kept"] for entry in load_prompts(sets, CHAT, seed=0).report] == [96, 2, 2]


def test_questions_that_depend_on_an_answer_wait_as_follow_ups(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "question.jsonl", [ROWS["spec-bench"][0]])
    wanted = PromptSet("spec-bench", "test", 1, source=source)
    (prompt,) = load(wanted, CHAT).prompts
    assert prompt.follow_ups == ("Now in one line.",)
    (first,) = load(dataclasses.replace(wanted, turns="first"), CHAT).prompts
    assert first.follow_ups == ()
    assert first.ids == prompt.ids
    assert first.example_id != prompt.example_id
    with pytest.raises(ConfigError, match=r"has no chat template.*`turns: first`"):
        load(wanted, PLAIN)
    with pytest.raises(ConfigError, match="leave `chat: false` out, or ask the first"):
        load(dataclasses.replace(wanted, chat=False), CHAT)
    with pytest.raises(ConfigError, match="may be all"):
        load(dataclasses.replace(wanted, turns="last"), CHAT)


@pytest.mark.parametrize("write", [parquet, jsonl], ids=["parquet", "jsonl"])
def test_any_file_with_prompts_or_messages_or_a_template_can_be_read(
    write: Any, tmp_path: Path
) -> None:
    kind = write.__name__
    prompts = write(tmp_path / f"prompts.{kind}", [{"prompt": "One."}, {"prompt": "Two."}])
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    talks = write(tmp_path / f"talks.{kind}", [{"messages": talk}])
    other = write(tmp_path / f"other.{kind}", [{"q": "Why?", "n": {"en": "not"}}])
    loaded = load_prompts(
        [
            PromptSet(prompts, "train", 2),
            PromptSet(talks, "train", 0),
            PromptSet(other, "dev", 1, template="Q: {q} {{{n.en}}}\nA:"),
        ],
        CHAT,
        seed=0,
    )
    first, second, conversation, templated = loaded.prompts
    # A plain prompt stays one, whatever the target; a file keeps its order.
    assert [CHAT.decode(prompt.ids[1:]) for prompt in (first, second)] == ["One.", "Two."]
    assert conversation.messages == tuple(talk)
    assert CHAT.decode(templated.ids[1:]) == "Q: Why? {not}\nA:"
    (asked,) = load_prompts([PromptSet(prompts, "train", 1, chat=True)], CHAT, seed=0).prompts
    assert asked.messages == ({"role": "user", "content": "One."},)


def counting(tokenizer: Any, calls: list[int]) -> Any:
    """The same tokenizer, which notes of each call how many texts it was given."""

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: list[str], **how: Any) -> Any:
            calls.append(len(texts))
            return super().__call__(texts, **how)

    counted = copy.deepcopy(tokenizer)
    counted.__class__ = Counting
    return counted


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_tokenized_once_and_many_at_once(chat: bool, tmp_path: Path) -> None:
    rows = [{"prompt": f"Is {number % 2400} even?"} for number in range(2500)]
    sets = [PromptSet(jsonl(tmp_path / "a.jsonl", rows), "train", 0, chat=chat)]
    calls: list[int] = []
    loaded = load_prompts(sets, counting(CHAT, calls), seed=0)
    assert calls == [1024, 1024, 2400 - 2048]
    assert (len(loaded.prompts), loaded.report[0]["dropped"]["duplicate"]) == (2400, 100)
    alone = [load(dataclasses.replace(sets[0], count=n), CHAT) for n in (1, 9)]
    assert [each.prompts[-1] for each in alone] == [loaded.prompts[n] for n in (0, 8)]


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the file": {"rows": [{"prompt": "Another?"}]},
    "the sets": {"count": 2},
    "the seed": {"seed": 1},
    "the limit": {"max_tokens": 99},
    "the vocabulary": {"vocabulary": 9999},
    "the template's variables": {"template_variables": {"bos_token": "x"}},
    "the template": {"template": f"{CHAT.chat_template} "},
    "the tokenizer": {"token": "<new>"},
    "damage": {"damage": b"ARROW1"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_prompts_that_a_folder_keeps_are_tokenized_again_only_if_they_are_made_of_something_else(
    change: str, tmp_path: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}]} for text in ("Hi.", "You?", "a " * 99)
    ]
    path, kept = tmp_path / "a.jsonl", tmp_path / "kept"
    given: dict[str, Any] = {"rows": rows, "count": 0, "seed": 0, "max_tokens": 90}

    def load(folder: Path | None, calls: list[int], **changes: Any) -> Any:
        how = {**given, **changes}
        tokenizer = counting(CHAT, calls)
        tokenizer.chat_template = how.pop("template", CHAT.chat_template)
        tokenizer.add_tokens(how.pop("token", []))
        if damage := how.pop("damage", b""):
            (kept / "prompts.arrow").write_bytes(damage)
        sets = [PromptSet(jsonl(path, how.pop("rows")), "train", how.pop("count"))]
        return load_prompts(sets, tokenizer, folder=folder, **how), sets

    made: list[int] = []
    first, sets = load(kept, made)
    assert made == [3]
    assert check_sets(sets, 0, folder=kept) == first.report, "no row is read"
    assert first.report[0]["dropped"]["over_long"] == 1, "which rows alone do not tell"
    again, _ = load(kept, made, **CHANGES[change])
    assert len(made) == 1 + (change != "nothing")
    found = again.report, list(again.prompts)
    anew, _ = load(None, [], **CHANGES[change])
    assert found == (anew.report, list(anew.prompts))


def test_of_processes_that_load_prompts_at_the_same_time_one_tokenizes(tmp_path: Path) -> None:
    sets = [PromptSet(jsonl(tmp_path / "a.jsonl", [{"prompt": "One."}]), "train", 0)]
    calls: list[int] = []
    tokenizer = counting(PLAIN, calls)
    with ThreadPoolExecutor() as threads:
        found = list(
            threads.map(
                lambda _: load_prompts(sets, tokenizer, seed=0, folder=tmp_path / "kept"), range(4)
            )
        )
    assert calls == [1]
    assert {each.prompts[0].ids[-1] for each in found} == {PLAIN("One.")["input_ids"][-1]}


def test_stored_prompts_are_those_that_were_given_in_the_order_of_their_lengths() -> None:
    call = {"tool_calls": [{"function": {"name": "rain", "arguments": {"city": None}}}]}
    talk = ({"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "", **call})
    given = [
        Prompt(f"{number * 7 % 5}", "d", "train", [3] * (number % 3 + 1), talk[:number], ("b",))
        for number in range(5)
    ]
    given[1] = dataclasses.replace(given[1], reference="4", variables={"tools": [{"a": 1.5}]})
    stored = Prompts.of(given)
    assert [*stored, stored[-1], *stored[1:3]] == [*given, given[-1], *given[1:3]]
    expected = sorted(given, key=lambda prompt: (len(prompt.ids), prompt.example_id))
    assert [stored[number] for number in stored.by_length()] == expected
    assert stored.turns == 10
