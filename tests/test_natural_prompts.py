"""The embedded natural prompts: from the seed alone, split by content, varied, rendered as chat."""

from __future__ import annotations

import ast
import copy
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from specdata.errors import ConfigError
from specdata.natural import maths
from specdata.natural.code import tasks
from specdata.natural.functions import RUN
from specdata.natural.sets import NATURAL, natural_prompts
from specdata.natural.splits import SPLITS, dealt
from specdata.natural.writing import Writer, parse, read_phrases, with_articles
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import load_prompts
from tests.chats import chat_tokenizer

ROOT = Path(__file__).parent.parent
FILES = ("assistant.txt", "maths.txt", "code.txt", "letters.txt")
# Of 2,000 prompts at least so many begin with other first five words, and so many still differ
# once names (capitalised words inside a sentence), quotations and numbers are masked.
VARIED = {
    "chat-assistant": (800, 0.85),
    "chat-maths": (800, 0.6),
    "chat-code": (400, 0.9),
    "chat-letters": (250, 0.9),
}


def masked(text: str) -> str:
    text = re.sub(r"\[[^]]*\]|'[^']*'|\"[^\"]*\"", "Q", text)
    text = re.sub(r"(?<=[a-z,] )[A-Z]\w+", "N", text)
    return re.sub(r"\d[\d,.:]*", "0", text)


@pytest.mark.parametrize("name", NATURAL)
def test_a_larger_count_only_appends_and_another_seed_writes_others(name: str) -> None:
    first = natural_prompts(name, "train", 60, seed=1)
    assert natural_prompts(name, "train", 20, seed=1) == first[:20]
    assert len({*natural_prompts(name, "train", 60, seed=2)} & {*first}) < 10


def test_prompts_are_the_same_in_every_process() -> None:
    program = (
        "from specdata.natural.sets import NATURAL, natural_prompts\n"
        "print(ascii([natural_prompts(name, 'dev', 60, seed=1) for name in NATURAL]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": str(ROOT)},
    )
    here = [natural_prompts(name, "dev", 60, seed=1) for name in NATURAL]
    assert ast.literal_eval(done.stdout) == here


@pytest.mark.parametrize("name", NATURAL)
def test_thousands_of_prompts_take_a_moment_and_differ_in_form(name: str) -> None:
    natural_prompts(name, "train", 1, seed=0)  # reads the phrases
    began = time.process_time()
    prompts = natural_prompts(name, "train", 2000, seed=0)
    assert time.process_time() - began < 1
    assert len({*prompts}) == 2000
    openings, differ = VARIED[name]
    assert len({" ".join(prompt.split()[:5]) for prompt in prompts}) >= openings
    assert len({masked(prompt) for prompt in prompts}) >= differ * len(prompts)
    words = sorted(len(prompt.split()) for prompt in prompts)
    assert words[1900] > 2 * words[100], "lengths vary"
    common = Counter(prompt.split()[0] for prompt in prompts).most_common(1)[0][1]
    assert common < 500, "no first word begins a quarter of them"


@pytest.mark.parametrize("name", NATURAL)
def test_prompts_of_different_splits_never_meet_even_for_different_seeds(name: str) -> None:
    drawn = {
        split: {
            prompt for seed in (0, 1) for prompt in natural_prompts(name, split, 500, seed=seed)
        }
        for split in SPLITS
    }
    assert not drawn["train"] & drawn["dev"]
    assert not drawn["train"] & drawn["test"]
    assert not drawn["dev"] & drawn["test"]


@pytest.mark.parametrize("file", ["assistant.txt", "letters.txt"])
def test_what_a_text_is_about_belongs_to_one_split(file: str) -> None:
    phrases = read_phrases(file)
    subjects = [subject for section, _ in phrases.subjects for subject in phrases.sections[section]]
    repeated = [subject for subject, count in Counter(subjects).items() if count > len(SPLITS)]
    assert not repeated, "a subject of two sections may be dealt differently"
    for split in SPLITS:
        own = {
            subject
            for (_, other), found in phrases.subjects.items()
            if other == split
            for subject in found
        }
        others = {*subjects} - own
        for seed in range(300):
            writer = Writer(phrases, random.Random(seed), split)
            writer.sentence("{prompt}")
            assert writer.drawn & own, "every prompt is about something"
            assert not writer.drawn & others


def test_every_function_belongs_to_one_split_and_its_examples_are_what_python_returns() -> None:
    for composed in (False, True):
        names = [task.name for split in SPLITS for task in tasks(composed)[split]]
        assert len({*names}) == len(names) > 120
        assert all(name.isidentifier() for name in names)
    assert {*RUN} == {task.name for split in SPLITS for task in tasks(False)[split]}
    checked = 0
    for split in SPLITS:
        functions = {task.name: task.run for mix in (False, True) for task in tasks(mix)[split]}
        for prompt in natural_prompts("chat-code", split, 400, seed=3):
            for name, call, result in re.findall(
                r">>> ((?P<name>\w+)\(.*\))\n +(.*)", prompt.replace("P<name>", "")
            ):
                arguments = ast.parse(name, mode="eval").body
                assert isinstance(arguments, ast.Call)
                values = [ast.literal_eval(argument) for argument in arguments.args]
                assert repr(functions[call](*values)) == result
                checked += 1
    assert checked > 200


def test_stubs_of_functions_are_python() -> None:
    stubs = [
        prompt
        for prompt in natural_prompts("chat-code", "train", 1500, seed=5)
        if prompt.startswith("def ")
    ]
    assert len(stubs) > 20
    for stub in stubs:
        (function,) = ast.parse(stub).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function)


@pytest.mark.parametrize("file", FILES)
def test_every_slot_of_a_phrase_is_known(file: str) -> None:
    """A text has no brace left, no word twice in a row and no double space."""
    phrases = read_phrases(file)
    for lines in phrases.sections.values():
        for line in lines:
            parse(line)
    name = next(name for name in NATURAL if name.endswith(file.removesuffix(".txt")))
    for prompt in natural_prompts(name, "train", 2000, seed=9):
        prose = re.sub(r"```.*?```|^.*(def|>>>|\(.*\)).*$", "", prompt, flags=re.S | re.M)
        if name != "chat-code":
            assert not re.search(r"[{}|]|  ", prose), prompt
        assert not re.search(r"\b(a|the|of|to|in|is|and|how)\s+\1\b", prose, re.I), prompt
        assert not re.search(r"\ba (?!one)[aeio]\w", prose), prompt
        assert not re.search(r"\s[.,?!]( |$)|[.?!]\.(?!\.)", prose), prompt


def test_numbers_of_a_story_are_drawn_as_declared() -> None:
    rng = random.Random(0)
    values: dict[str, int] = {}
    assert {maths.draw_number("2..4", values, rng) for _ in range(50)} == {2, 3, 4}
    assert {maths.draw_number("10..20:5", values, rng) for _ in range(50)} == {10, 15, 20}
    assert {maths.draw_number("7,9", values, rng) for _ in range(50)} == {7, 9}
    assert maths.draw_number("a*b+2-c", {"a": 3, "b": 4, "c": 1}, rng) == 13
    with pytest.raises(ValueError, match="added, subtracted and multiplied"):
        maths.draw_number("a**b", {"a": 3, "b": 4}, rng)


def test_stories_share_things_without_a_rest_where_they_say_so() -> None:
    shared = [
        re.search(r"share (\d+) \w+(?: \w+)? equally among (\d+)", prompt)
        for prompt in natural_prompts("chat-maths", "train", 3000, seed=1)
    ]
    found = [match for match in shared if match]
    assert found
    assert all(int(match[1]) % int(match[2]) == 0 for match in found)


def test_subjects_are_dealt_whatever_their_order() -> None:
    subjects = [f"subject {number}" for number in range(55)]
    parts = {split: dealt(subjects, split) for split in SPLITS}
    assert [len(parts[split]) for split in SPLITS] == [43, 6, 6]
    assert sorted(part for split in SPLITS for part in parts[split]) == sorted(subjects)
    assert parts == {split: dealt(subjects[::-1], split) for split in SPLITS}


def test_a_writer_repeats_bound_phrases_and_draws_others_anew() -> None:
    phrases = read_phrases("maths.txt")
    for seed in range(20):
        writer = Writer(phrases, random.Random(seed), "train")
        first, second, again = writer.write("{WARE}/{ware}/{WARE}").split("/")
        assert first == again != second
    with pytest.raises(ValueError, match="braces must match"):
        parse("one {two|three")
    with pytest.raises(ValueError, match="braces must match"):
        parse("one} two")


def test_articles_follow_the_sound() -> None:
    text = "a apple, a useful unit, a hour, a one-way street, a umbrella, A old man, a European"
    assert with_articles(text) == (
        "an apple, a useful unit, an hour, a one-way street, an umbrella, An old man, a European"
    )


@pytest.mark.parametrize("name", NATURAL)
def test_a_chat_template_renders_them_and_without_one_they_are_plain_text(name: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    wanted = [PromptSet(name, split, 5) for split in SPLITS]
    loaded = load_prompts(wanted, tokenizer, seed=4)
    assert [account["kept"] for account in loaded.report] == [5, 5, 5]
    for prompt in loaded.prompts:
        (message,) = prompt.messages
        assert message["role"] == "user"
        rendered = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        assert prompt.ids == rendered
    texts = natural_prompts(name, "train", 5, seed=4)
    assert [prompt.messages[0]["content"] for prompt in loaded.prompts[:5]] == texts
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    plain = load_prompts(wanted[:1], tokenizer, seed=4).prompts
    assert not any(prompt.messages for prompt in plain)
    assert plain[0].ids == tokenizer(texts[0])["input_ids"]
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts([PromptSet(name, "train", 5, chat=True)], tokenizer, seed=4)


def test_what_cannot_be_had_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    with pytest.raises(ConfigError, match="give a `count`"):
        load_prompts([PromptSet("chat-maths", "train", 0)], tokenizer, seed=0)
    with pytest.raises(ConfigError, match="choose from train, dev, test"):
        load_prompts([PromptSet("chat-maths", "validation", 1)], tokenizer, seed=0)
    with pytest.raises(ConfigError, match="did you mean 'chat-maths'"):
        load_prompts([PromptSet("chat-math", "train", 1)], tokenizer, seed=0)
    with pytest.raises(ConfigError, match="lower `count`"):
        load_prompts([PromptSet("chat-maths", "train", 10**6)], tokenizer, seed=0)
