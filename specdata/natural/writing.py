r"""Texts written by chance from a file of phrases.

A file has sections (`[name]`, one phrase a line; `#` begins a comment, `\n` is a line break). In a
phrase `{name}` stands for a phrase of that section, another one each time; `{NAME}` or `{NAME2}`
for one that is drawn once in a text and then repeated; `{one|other|}` for one of the alternatives,
which may be empty and hold braces themselves. Sections under `[subject name]` hold what a text is
about: their phrases are dealt to the splits, and a text is written of those of its split.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from string import digits

from specdata.natural.splits import SPLITS, dealt

_PIECES = re.compile(r"[{}|]|[^{}|]+")
# "an" before a vowel's letter, but for words that begin with another sound.
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!one\b|once\b|eu|uni[^nm]|us[aei]|ute)[aeiou]|hour|honest)")

# A text, a slot, or alternatives of phrases.
_Part = str | tuple[str] | list[Sequence["_Part"]]
_Phrase = Sequence[_Part]


@dataclass(frozen=True, slots=True)
class Phrases:
    """The sections of a file.

    Attributes:
        sections: name -> phrases.
        subjects: (name, split) -> the phrases of that split, for the sections of subjects.
    """

    sections: Mapping[str, Sequence[str]]
    subjects: Mapping[tuple[str, str], Sequence[str]]

    def choices(self, section: str, split: str) -> Sequence[str]:
        """What may be drawn of a section in a text of a split."""
        return self.subjects.get((section, split)) or self.sections[section]


@dataclass(slots=True)
class Writer:
    """Writes one text.

    Attributes:
        phrases: what it is written of.
        rng: decides the choices.
        split: whose subjects may be drawn.
        bound: what `{NAME}` stands for; more may be given.
        drawn: the phrases that were.
    """

    phrases: Phrases
    rng: random.Random
    split: str
    bound: dict[str, str] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)

    def write(self, phrase: str) -> str:
        """The phrase with everything in braces replaced."""
        return "".join(self._write(part) for part in parse(phrase))

    def sentence(self, phrase: str) -> str:
        """As `write`, with "an" before a vowel, a capital at the start, one full stop at an end."""
        text = re.sub(r"(?<=[.?!])\"[.,]", '"', with_articles(self.write(phrase)).strip())
        return text[:1].upper() + text[1:]

    def draw(self, section: str) -> str:
        """A phrase of a section, written: another one each time, while there is another."""
        choices = self.phrases.choices(section, self.split)
        phrase = self.rng.choice(choices)
        if phrase in self.drawn:
            phrase = self.rng.choice([new for new in choices if new not in self.drawn] or choices)
        self.drawn.add(phrase)
        return self.write(phrase)

    def _write(self, part: _Part) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, list):
            return "".join(self._write(inner) for inner in self.rng.choice(part))
        (name,) = part
        if name in self.bound:
            return self.bound[name]
        text = self.draw(name.lower().rstrip(digits))
        if not name.islower():
            self.bound[name] = text
        return text


@cache
def parse(phrase: str) -> _Phrase:
    """The parts of a phrase. Raises ValueError for braces that do not match."""
    pieces = _PIECES.findall(phrase)
    alternatives, end = _alternatives(pieces, 0, nested=False)
    if end < len(pieces):
        raise ValueError(f"braces must match, got {phrase!r}")
    return alternatives[0]


def _alternatives(pieces: Sequence[str], at: int, *, nested: bool) -> tuple[list[list[_Part]], int]:
    """Alternatives up to the brace that closes them, and where that is."""
    found: list[list[_Part]] = [[]]
    while at < len(pieces) and pieces[at] != "}":
        piece = pieces[at]
        if piece == "{":
            inner, at = _alternatives(pieces, at + 1, nested=True)
            if at == len(pieces):
                raise ValueError(f"braces must match, got {''.join(pieces)!r}")
            one = inner[0]
            is_name = len(inner) == len(one) == 1 and isinstance(one[0], str)
            found[-1].append((str(one[0]),) if is_name else inner)
        elif piece == "|" and nested:
            found.append([])
        else:
            found[-1].append(piece)
        at += 1
    return found, at


def with_articles(text: str) -> str:
    """The text with "an" where "a" stands before a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


@cache
def read_phrases(name: str) -> Phrases:
    """The sections of a file of this folder.

    Raises:
        ValueError: if a section comes twice.
    """
    sections: dict[str, list[str]] = {}
    subjects: set[str] = set()
    phrases: list[str] = []
    text = files(__package__).joinpath(name).read_text("utf-8")
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(subject )?(\w+)\]", line):
            if header[2] in sections:
                raise ValueError(f"a section must come once, [{header[2]}] comes twice in {name}")
            phrases = sections[header[2]] = []
            subjects |= {header[2]} if header[1] else set()
        elif line.strip() and not line.startswith("#"):
            phrases.append(line.replace("\\n", "\n"))
    by_split = {
        (section, split): dealt(sections[section], split)
        for section in subjects
        for split in SPLITS
    }
    return Phrases(sections, by_split)
