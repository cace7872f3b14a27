"""The text inside the package: three prompt families and the library text of every CPython.

It lets the whole pipeline run offline. Prompts and answers come from seeded grammars, whose
sentences are drawn at random in both, so that the next token is often truly uncertain; answers also
quote their prompt, which a deep model learns and a shallow one does not. The rest is source code
and documentation that Python itself ships. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SPLITS = ("train", "dev", "test")

# A family counts as used up after this many draws in a row without a prompt not seen before.
_PATIENCE = 2_000

# Modules that every CPython since 3.8 ships, as paths below the standard library.
TRAINING_MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "collections/__init__.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "datetime.py",
    "difflib.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "inspect.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/__init__.py",
    "random.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
    "threading.py",
    "unittest/case.py",
)

MOST = {"train": 50_000, "dev": 6_250, "test": 6_250}
"""Prompts of each split that a family is read for; writing more takes minutes of one processor."""


def prompts(family: str, split: str, count: int, *, seed: int) -> dict[str, str]:
    """Return `count` prompts of one split, each with one of its many possible answers.

    No prompt belongs to two splits, for any seed. Raises ValueError if the family or the split is
    unknown, or has fewer prompts.
    """
    if split in MOST and count > MOST[split]:
        raise ValueError(
            f"the {split} split of {family!r} has {MOST[split]} prompts, {count} were asked for: "
            "lower `count`"
        )
    chosen = _take(_split(family, split, seed), count, f"the {split} split of {family!r}")
    return {example.prompt: example.completion for example in chosen}


def split_of(prompt: str) -> str:
    """The split of a prompt, decided by its text alone: 80% train, 10% dev, 10% test."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 10
    return {0: "dev", 1: "test"}.get(bucket, "train")


def library_texts(characters: int) -> list[str]:
    """Return pieces of the standard library (a class or a function each), up to `characters`.

    The modules share the room evenly, in a fixed order; one that is missing here is left out. The
    result depends on the installed Python only.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / name for name in TRAINING_MODULES if (folder / name).is_file()]
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
    for family in FAMILIES:
        chosen = _take(_split(family, "train", seed), examples_per_family, f"train of {family!r}")
        documents += [example.prompt + example.completion for example in chosen]
    random.Random(seed).shuffle(documents)
    return documents


def examples(family: str, seed: int) -> Iterator[Example]:
    """Examples of a family with distinct prompts, until `_PATIENCE` draws in a row bring none.

    The same seed gives the same ones.
    """
    if family not in WRITERS:
        raise ValueError(f"unknown prompt family {family!r}; choose from {', '.join(FAMILIES)}")
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


# A name in lower case is drawn anew each time; in upper case it is drawn once and then repeated.
_GRAMMAR: Mapping[str, tuple[str, ...]] = {
    name: tuple(text.split("|"))
    for name, text in {
        "person": "Anna|Boris|Clara|Dmitri|Elena|Farid|Greta|Hugo|Ines|Jonas|Keiko|Liam|Mona|Nadia|"
        "Oscar|Priya|Quentin|Rosa|Sven|Tara|Umar|Vera|Wanda|Xavier|Yusuf|Zoe",
        "role": "gardener|teacher|baker|sailor|painter|doctor|miller|pilot|farmer|librarian|"
        "carpenter|nurse|singer|judge|tailor|potter|student|neighbour",
        "adjective": "old|small|bright|quiet|heavy|green|broken|cheap|clean|strange|wooden|long|"
        "warm|famous|empty|gentle|narrow|rough|silver|early|honest|modern|simple|golden",
        "thing": "lantern|basket|letter|bicycle|kettle|map|violin|ladder|mirror|blanket|clock|"
        "rope|camera|engine|bottle|hammer|notebook|umbrella|boat|table|window|bridge|garden|stove",
        "goods": "apples|pencils|stamps|coins|tickets|books|candles|plums|shells|cards|buttons|"
        "loaves|tiles|roses|marbles|bottles|stones|eggs",
        "place": "market|river|harbour|library|station|village|mountain|kitchen|museum|school|"
        "forest|island|workshop|valley|theatre|orchard|bakery|castle",
        "when": "in the morning|before winter|after the rain|every Sunday|at night|in spring|"
        "on Monday|during the holidays|once a month|before breakfast|when the wind turns|at noon",
        "doing": "repair the {thing}|paint the {place}|carry the {thing}|visit the {place}|"
        "sell the {thing}|clean the {thing}|find a {adjective} {thing}|write to the {role}|"
        "measure the {place}|borrow a {thing}|cross the {place}|learn about the {place}",
        "reason": "the {thing} is too {adjective}|it is {adjective} and easy to carry|"
        "the {role} asked for it|nobody knows the {place} well|time is short|"
        "the {place} closes early|a {adjective} {thing} costs less|{person} said so|"
        "the weather changes quickly|it saves money {when}",
        "opening": "Yes,|Of course.|In short,|First,|Usually|Well,|To be fair,|Today|"
        "There are many ways, but|Here is one idea:|As a rule",
        "advice": "it helps to {doing} {when}|you should {doing} because {reason}|"
        "{PERSON} can {doing} or {doing}|never {doing} {when}|ask the {role} to {doing}|"
        "the {adjective} {THING} needs care, so {doing} first|try to {doing} with {person}|"
        "keep the {THING} near the {PLACE} because {reason}",
        "fact": "The {PLACE} has a {adjective} {thing} and a {adjective} {thing}.|"
        "Some people {doing} {when}, while others {doing}.|{person} and {person} {doing} {when}.|"
        "The {ROLE} knows that {reason}.|A {adjective} {thing} is better than a {adjective} one.|"
        "It was {adjective}, {adjective} and {adjective}.|{PERSON} kept the {THING} {when}.|"
        "For example, the {role} may {doing} if {reason}.",
        "closing": "That is all {PERSON} needs.|Do it {when}.|Then the {THING} is safe.|"
        "Ask {person} if {reason}.|In the end {reason}.|Good luck with the {THING}!|"
        "The {PLACE} will look {adjective}.|{fact}",
        "request": "Explain to {PERSON} the {ROLE} how to {doing} at the {PLACE} with a {THING}.|"
        "Write a note to {PERSON}, the {ROLE}, about the {adjective} {THING} near the {PLACE}.|"
        "Why does the {ROLE} at the {PLACE} need a {THING}? Answer for {PERSON}.|"
        "Give {PERSON} advice: the {ROLE} wants to take a {THING} to the {PLACE} {when}.|"
        "Describe the {adjective} {THING} that {PERSON} the {ROLE} left at the {PLACE}.|"
        "{PERSON} is a {ROLE}. Suggest what to do with the {THING} in the {PLACE} {when}.",
        "reply": "{opening} {advice}. {fact} {fact} {closing}|"
        "{opening} {advice}. {advice}. {fact} {fact}|{fact} {fact} {opening} {advice}. {closing}|"
        "{opening} {advice}, and {advice}. {fact} {fact}|{opening} {advice}. {fact} {advice}. "
        "{fact}|{PERSON}, {advice}. {fact} {fact} {fact} {closing}",
        "aside": "|Let us count.|We go step by step.|Look at the {GOODS} first.|{fact}|"
        "{PERSON} starts at the {PLACE}.|This is easy.|The {PLACE} does not matter here.",
        "check": "|{fact}|{PERSON} is {adjective} {when}.|We can check: {R} {GOODS}.|"
        "The {adjective} {thing} is not counted.|{fact} {fact}",
        "so": "So|Then|Therefore|Now|This means that|Hence",
        "result": "The answer is {R}.|So the answer is {R}.|{PERSON} has {R} {GOODS}.|"
        "That makes {R} {GOODS} in all.|The result is {R} {GOODS}.",
        "gain": "finds|buys|picks|collects|receives|wins",
        "loss": "gives away|loses|sells|breaks|drops|forgets",
        "item": "item|value|x|entry|element|number|n|current",
        "store": "result|total|out|found|answer|acc|kept",
        "data": "values|items|numbers|data|sequence|entries",
        "bound": "limit|bound|threshold|k|size|top",
        "comment": "|\n    # {note} {DATA}|\n    # {note} the {adjective} ones|"
        "\n    # {note} {goods} of the {role}|\n    {guard}|\n    # {note} {DATA}\n    {guard}",
        "guard": "if not {DATA}:\n        return {none}|"
        "if len({DATA}) < {digit}:\n        return {none}|{BOUND} = int({BOUND})|"
        "{DATA} = list({DATA})|if {BOUND} is None:\n        {BOUND} = {digit}",
        "none": "None|0|[]|False|-1",
        "digit": "1|2|3|10|0|5|100",
        "note": "go through|look at|check all of the|walk over|skip empty|keep only some of the",
    }.items()
}


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
            return self.write(self.pick(_GRAMMAR[name]))
        if name not in self.bound:
            self.bound[name] = self.write(self.pick(_GRAMMAR[name.lower()]))
        return self.bound[name]

    def sentence(self, template: str) -> str:
        """As `write`, with single spaces, "an" before a vowel and a capital for each sentence."""
        text = " ".join(self.write(template).split())
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        return re.sub(r"(^|[.!?] )([a-z])", lambda match: match[0].upper(), text)


def _instruct(writer: Writer) -> Example:
    prompt = writer.sentence("{request}")
    return Example(f"Instruction: {prompt}\nResponse:", " " + writer.sentence("{reply}"))


def _maths(writer: Writer) -> Example:
    rng, bound = writer.rng, writer.bound
    a, b, c = rng.randint(12, 60), rng.randint(2, 12), rng.randint(2, 9)
    bound |= {"A": str(a), "B": str(b), "C": str(c)}
    story, first, second, middle, last = rng.choice(
        (
            (
                "{PERSON} has {A} {GOODS} and {gain} {B} more at the {PLACE}. "
                "Later {PERSON} {loss} {C} of them. How many {GOODS} are left?",
                "{A} + {B} = {M}",
                "{M} - {C} = {R}",
                a + b,
                a + b - c,
            ),
            (
                "At the {PLACE} there are {B} {adjective} boxes with {C} {GOODS} each. "
                "{PERSON} {gain} {A} more {when}. How many {GOODS} are there?",
                "{B} * {C} = {M}",
                "{M} + {A} = {R}",
                b * c,
                b * c + a,
            ),
            (
                "{PERSON} {gain} {A} {GOODS} {when} and {loss} {B} at the {PLACE}. "
                "The {ROLE} brings {C} times as many. How many {GOODS} does the {ROLE} bring?",
                "{A} - {B} = {M}",
                "{M} * {C} = {R}",
                a - b,
                (a - b) * c,
            ),
        )
    )
    bound |= {"M": str(middle), "R": str(last)}
    prompt = writer.sentence(story)
    steps = writer.pick(
        (
            f"{{aside}} {first}. {{so}} {second}. {{result}} {{check}}",
            f"{{PERSON}} has {first} {{GOODS}}. {{aside}} {{so}} {second}. {{result}} {{check}}",
            f"{first} {{GOODS}} {{when}}, and {second} {{when}}. {{fact}} {{result}}",
            f"{{aside}} {{so}} we have {first} {{GOODS}} at the {{PLACE}}. {{aside}} "
            f"{second}. {{result}}",
            f"{{fact}} {{aside}} {{so}} {first}. {{so}} {second}. {{result}} {{check}}",
        )
    )
    return Example(f"Question: {prompt}\nAnswer:", " " + writer.sentence(steps))


# (word in the name, phrase in the documentation, test)
_TESTS = (
    ("even", "even", "{ITEM} % 2 == 0"),
    ("odd", "odd", "{ITEM} % 2 == 1"),
    ("large", "larger than {BOUND}", "{ITEM} > {BOUND}"),
    ("small", "smaller than {BOUND}", "{ITEM} < {BOUND}"),
    ("positive", "positive", "{ITEM} > 0"),
    ("divisible", "divisible by {BOUND}", "{ITEM} % {BOUND} == 0"),
    ("close", "close to {BOUND}", "abs({ITEM} - {BOUND}) <= 1"),
    ("different", "not equal to {BOUND}", "{ITEM} != {BOUND}"),
)
# (word in the name, phrase in the documentation, start, update, short form)
_FOLDS = (
    ("count", "how many {DATA} are", "0", "{STORE} += 1", "sum(1 for {EACH})"),
    ("sum", "the sum of the {DATA} that are", "0", "{STORE} += {ITEM}", "sum({ITEM} for {EACH})"),
    ("list", "the {DATA} that are", "[]", "{STORE}.append({ITEM})", "[{ITEM} for {EACH}]"),
    ("square", "squares of the {DATA} that are", "[]", "{STORE}.append({ITEM} * {ITEM})",
     "[{ITEM} ** 2 for {EACH}]"),
    ("last", "the last of the {DATA} that is", "None", "{STORE} = {ITEM}",
     "([None] + [{ITEM} for {EACH}])[-1]"),
    ("most", "the largest of the {DATA} that are", "0", "{STORE} = max({STORE}, {ITEM})",
     "max(({ITEM} for {EACH}), default=0)"),
)  # fmt: skip


def _code(writer: Writer) -> Example:
    rng = writer.rng
    kind, phrase, test = rng.choice(_TESTS)
    verb, summary, start, update, short = rng.choice(_FOLDS)
    noun = writer.pick(("", "_{goods}", "_{DATA}", "_for_{role}", "_{adjective}", "_in_{place}"))
    opening = writer.pick(("Return", "Compute", "Find", "Give", "Work out"))
    example = " ".join(str(rng.randint(1, 30)) for _ in range(rng.randint(0, 3)))
    tail = f" Example: {example}." if example else ""
    name = writer.write(f"{verb}_{kind}{noun}")
    head = f"def {name}({{DATA}}, {{BOUND}}):"
    prompt = writer.write(f'{head}\n    """{opening} {summary} {phrase}.{tail}"""')
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
FAMILIES = tuple(WRITERS)
