"""What the functions that prompts ask for take: how it is named, described and drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "Python",
    "level",
    "garden",
    "noon",
    "window",
    "table",
    "radar",
    "house",
    "night",
    "banana",
    "light",
    "green",
    "tree",
    "summer",
    "cat",
    "dog",
    "mango",
    "hello",
    "world",
    "data",
    "train",
    "refer",
    "music",
    "paper",
    "blue",
    "ocean",
    "salt",
    "bread",
    "moon",
    "civic",
    "lemon",
    "tiger",
    "Anna",
    "kayak",
    "silver",
    "winter",
]
_SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "Hello, world!",
    "to be or not to be",
    "She sells sea shells by the sea shore.",
    "A man, a plan, a canal: Panama",
    "Call me at 555 1234 after 9",
    "it was the best of times",
    "Is this a test? Yes, it is!",
    "one fish two fish red fish blue fish",
    "Meet me in Room 12 at noon",
    "the rain in Spain",
    "Never odd or even",
    "Practice makes perfect",
    "the cat and the hat and the bat",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument.

    Args:
        words: what it is, with "a".
        hint: its type.
        names: of parameters that hold one.
        draw: makes one.
    """

    words: str
    hint: str
    names: tuple[str, ...]
    draw: Callable[[random.Random], Any]


def _integers(low: int, high: int, least: int, most: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def _pairs(rng: random.Random) -> dict[str, int]:
    return {word: rng.randint(1, 30) for word in rng.sample(_WORDS, rng.randint(2, 4))}


def _matrix(rng: random.Random) -> list[list[int]]:
    size = rng.choice((2, 3))
    return [[rng.randint(0, 9) for _ in range(size)] for _ in range(size)]


def _intervals(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.randint(0, 15) for _ in range(rng.randint(2, 4))]
    return [(start, start + rng.randint(1, 6)) for start in starts]


def _brackets(rng: random.Random) -> str:
    return rng.choice(("(())", "([]{})", "(()", "[(])", "{[()]}", "())(", "()[]", "(a + b) * [c]"))


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1950, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


KINDS: Mapping[str, Kind] = {
    "text": Kind(
        "a string", "str", ("text", "sentence", "s", "line", "message"),
        lambda rng: rng.choice(_SENTENCES),
    ),
    "word": Kind(
        "a word", "str", ("word", "name", "term", "s"), lambda rng: rng.choice(_WORDS)
    ),
    "other_word": Kind(
        "another word", "str", ("other", "second", "t"), lambda rng: rng.choice(_WORDS)
    ),
    "words": Kind(
        "a list of words", "list[str]", ("words", "names", "tokens", "strings"),
        lambda rng: [rng.choice(_WORDS) for _ in range(rng.randint(2, 5))],
    ),
    "letter": Kind(
        "a letter", "str", ("letter", "char", "c"), lambda rng: rng.choice("aeionstrl")
    ),
    "brackets": Kind("a string", "str", ("text", "expression", "s"), _brackets),
    "digits": Kind(
        "a string of digits", "str", ("digits", "code", "s"),
        lambda rng: "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 8))),
    ),
    "bits": Kind(
        "a string of zeros and ones", "str", ("bits", "binary", "s"),
        lambda rng: "".join(rng.choice("01") for _ in range(rng.randint(3, 8))),
    ),
    "other_bits": Kind(
        "another such string", "str", ("other", "mask", "b"),
        lambda rng: "".join(rng.choice("01") for _ in range(rng.randint(3, 8))),
    ),
    "date": Kind("a date as YYYY-MM-DD", "str", ("date", "day", "text"), _date),
    "time": Kind(
        "a time as HH:MM", "str", ("time", "clock", "text"),
        lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    ),
    "ints": Kind(
        "a list of integers", "list[int]", ("numbers", "nums", "values", "items", "arr"),
        _integers(-9, 20, 3, 7),
    ),
    "naturals": Kind(
        "a list of positive integers", "list[int]", ("numbers", "nums", "values", "items"),
        _integers(1, 20, 3, 7),
    ),
    "other_ints": Kind(
        "another list of integers", "list[int]", ("other", "second", "b"), _integers(-9, 20, 3, 7)
    ),
    "floats": Kind(
        "a list of numbers", "list[float]", ("numbers", "values", "data", "measurements"),
        lambda rng: [rng.randint(-40, 120) / 10 for _ in range(rng.randint(3, 6))],
    ),
    "n": Kind("an integer", "int", ("n", "number", "num", "x"), lambda rng: rng.randint(2, 60)),
    "small": Kind(
        "a non-negative integer", "int", ("n", "number", "num"), lambda rng: rng.randint(0, 12)
    ),
    "large": Kind(
        "a positive integer", "int", ("n", "number", "num", "value"),
        lambda rng: rng.randint(100, 99999),
    ),
    "k": Kind("an integer", "int", ("k", "size", "count"), lambda rng: rng.randint(1, 4)),
    "limit": Kind(
        "an integer", "int", ("limit", "threshold", "bound"), lambda rng: rng.randint(0, 12)
    ),
    "other_n": Kind("an integer", "int", ("m", "b", "y"), lambda rng: rng.randint(2, 60)),
    "real": Kind(
        "a number", "float", ("x", "value", "amount"), lambda rng: rng.randint(1, 999) / 10
    ),
    "pairs": Kind(
        "a dictionary from strings to integers", "dict[str, int]",
        ("counts", "scores", "prices", "stock"), _pairs,
    ),
    "other_pairs": Kind(
        "another such dictionary", "dict[str, int]", ("other", "updates", "more"), _pairs
    ),
    "matrix": Kind(
        "a square matrix as a list of rows", "list[list[int]]", ("matrix", "grid", "rows"), _matrix
    ),
    "intervals": Kind(
        "a list of (start, end) pairs", "list[tuple[int, int]]", ("intervals", "spans", "ranges"),
        _intervals,
    ),
    "nested": Kind(
        "a list of lists of integers", "list[list[int]]", ("groups", "rows", "nested"),
        lambda rng: [_integers(0, 9, 1, 3)(rng) for _ in range(rng.randint(2, 3))],
    ),
}  # fmt: skip
