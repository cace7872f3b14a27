"""The text inside the package: three prompt families and the library text of every CPython.

It lets the whole pipeline run offline. Prompts and answers come from a seeded grammar
(`grammar.yaml`), whose sentences are drawn at random in both, so that the next token is often truly
uncertain; answers also quote their prompt, which a deep model learns and a shallow one does not.
The rest is source code and documentation that Python itself ships. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

SPLITS = ("train", "dev", "test")

# A family counts as used up after this many draws in a row without a prompt not seen before.
_PATIENCE = 2_000

MOST_PROMPTS = {"train": 50_000, "dev": 6_250, "test": 6_250}
"""Prompts of each split that a family is read for; writing more takes minutes of one processor."""


def prompts(family: str, split: str, count: int, *, seed: int) -> dict[str, str]:
    """Return `count` prompts of one split, each with one of its many possible answers.

    No prompt belongs to two splits, for any seed. Raises ValueError if the family or the split is
    unknown, or has fewer prompts.
    """
    if split in MOST_PROMPTS and count > MOST_PROMPTS[split]:
        raise ValueError(
            f"the {split} split of {family!r} has {MOST_PROMPTS[split]} prompts, {count} were "
            "asked for: lower `count`"
        )
    chosen = _take(_split(family, split, seed), count, f"the {split} split of {family!r}")
    return {example.prompt: example.completion for example in chosen}


def split_of(prompt: str) -> str:
    """The split of a prompt, decided by its text alone: 80% train, 10% dev, 10% test."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 10
    return {0: "dev", 1: "test"}.get(bucket, "train")


def library_texts(characters: int) -> list[str]:
    """Return pieces of the standard library (a class or a function each), up to `characters`.

    The modules share the room evenly; the result depends on the installed Python only.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / name for name in _grammar()["modules"] if (folder / name).is_file()]
    texts: list[str] = []
    for path in files:
        room = characters // len(files)
        for piece in re.split(r"\n(?=class |def )", path.read_text("utf-8", errors="replace")):
            text = piece.strip()[: min(room, 1500)]
            if len(text) >= 100:
                texts.append(text)
                room -= len(text)
    return texts


def corpus(
    *, seed: int, examples_per_family: int = 2000, library_characters: int = 100_000
) -> list[str]:
    """Return the training documents in random order: examples of the train split, library text.

    The seed decides the examples and the order.
    """
    documents = library_texts(library_characters)
    for family in TOY_SETS:
        chosen = _take(_split(family, "train", seed), examples_per_family, f"train of {family!r}")
        documents += [example.prompt + example.completion for example in chosen]
    random.Random(seed).shuffle(documents)
    return documents


def examples(family: str, seed: int) -> Iterator[Example]:
    """Examples of a family with distinct prompts, until `_PATIENCE` draws in a row bring none.

    The same seed gives the same ones.
    """
    if family not in WRITERS:
        raise ValueError(f"unknown prompt family {family!r}; choose from {', '.join(TOY_SETS)}")
    rng = random.Random(f"{family}:{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _PATIENCE:
        example = WRITERS[family](Writer(rng))
        repeats = repeats + 1 if example.prompt in seen else 0
        if not repeats:
            seen.add(example.prompt)
            yield example


def _split(family: str, split: str, seed: int) -> Iterator[Example]:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    return (example for example in examples(family, seed) if split_of(example.prompt) == split)


def _take(source: Iterator[Example], count: int, what: str) -> list[Example]:
    taken = list(islice(source, count))
    if len(taken) < count:
        raise ValueError(f"{what} has {len(taken)} distinct prompts, {count} were asked for")
    return taken


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and one of its many possible completions; `prompt + completion` is the document.

    The tokens of the prompt are a prefix of the tokens of the document.
    """

    prompt: str
    completion: str


@cache
def _grammar() -> dict[str, Any]:
    grammar: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("grammar.yaml").read_text("utf-8")
    )
    return grammar


class Writer:
    """Expands templates over the grammar; `bound` holds the choices that repeat."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bound: dict[str, str] = {}

    def pick(self, choices: Sequence[str]) -> str:
        """Earlier choices are likelier, as words are in real text."""
        return choices[int(len(choices) * self.rng.random() ** 1.5)]

    def write(self, template: str) -> str:
        """Replace every `{name}` of the template, also inside what replaces it."""
        return re.sub(r"\{(\w+)\}", self._fill, template)

    def _fill(self, match: re.Match[str]) -> str:
        name = match[1]
        if name.islower():
            return self.write(self.pick(_grammar()["rules"][name]))
        if name not in self.bound:
            self.bound[name] = self.write(self.pick(_grammar()["rules"][name.lower()]))
        return self.bound[name]

    def sentence(self, template: str) -> str:
        """A text of single spaces, "an" before a vowel and a capital for each sentence."""
        text = " ".join(self.write(template).split())
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        return re.sub(r"(^|[.!?] )([a-z])", lambda match: match[0].upper(), text)


def _instruct(writer: Writer) -> Example:
    prompt = writer.sentence("{request}")
    return Example(f"Instruction: {prompt}\nResponse:", " " + writer.sentence("{reply}"))


def _maths(writer: Writer) -> Example:
    rng, bound = writer.rng, writer.bound
    a, b, c = rng.randint(12, 60), rng.randint(2, 12), rng.randint(2, 9)
    results = ((a + b, a + b - c), (b * c, b * c + a), (a - b, (a - b) * c))
    story, (middle, last) = rng.choice([*zip(_grammar()["stories"], results, strict=True)])
    numbers = {"A": a, "B": b, "C": c, "M": middle, "R": last}
    bound |= {name: str(number) for name, number in numbers.items()}
    bound["FIRST"], bound["SECOND"] = map(writer.write, story["sums"])
    prompt = writer.sentence(story["text"])
    solution = writer.sentence(writer.pick(_grammar()["solutions"]))
    return Example(f"Question: {prompt}\nAnswer:", f" {solution}")


def _code(writer: Writer) -> Example:
    rng = writer.rng
    grammar = _grammar()
    condition, fold = rng.choice(grammar["conditions"]), rng.choice(grammar["folds"])
    test, start = condition["test"], fold["start"]
    update, short = fold["update"], fold["short"]
    noun, opening = writer.pick(grammar["nouns"]), writer.pick(grammar["openings"])
    example = " ".join(str(rng.randint(1, 30)) for _ in range(rng.randint(0, 3)))
    tail = f" Example: {example}." if example else ""
    name = writer.write(f"{fold['word']}_{condition['word']}{noun}")
    head = f"def {name}({{DATA}}, {{BOUND}}):"
    summary = f"{opening} {fold['phrase']} {condition['phrase']}.{tail}"
    prompt = writer.write(f'{head}\n    """{summary}"""')
    writer.bound["EACH"] = writer.write(f"{{ITEM}} in {{DATA}} if {test}")
    loop = "\n    for {ITEM} in {DATA}:\n        if"
    body = writer.pick(
        (
            f"{{comment}}\n    {{STORE}} = {start}{loop} {test}:\n            {update}"
            "\n    return {STORE}",
            f"{{comment}}\n    return {short}",
            f"\n    {{STORE}} = {start}{{comment}}{loop} not {test}:\n            continue"
            f"\n        {update}\n    return {{STORE}}",
            f"{{comment}}\n    {{STORE}} = {short}\n    return {{STORE}}",
        )
    )
    check = writer.pick(
        (
            "",
            "\n\n\nprint({CALL})",
            "\n\n\nassert {CALL} is not None",
            "\n\n\n# {note} the {adjective} {goods}\n{store} = {CALL}\nprint({store})",
        )
    )
    numbers = ", ".join(str(rng.randint(1, 30)) for _ in range(rng.randint(2, 5)))
    writer.bound["CALL"] = f"{name}([{numbers}], {rng.randint(1, 9)})"
    return Example(prompt, writer.write(body + check))


WRITERS: Mapping[str, Callable[[Writer], Example]] = {
    "instruct": _instruct,
    "maths": _maths,
    "code": _code,
}
TOY_SETS = tuple(WRITERS)
