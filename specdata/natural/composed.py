"""Python functions that choose some of what they are given and make one thing of it.

Each is composed of a choice ("the even numbers") and of what is made of it ("the sum of").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

# (part of the name, words with {0}, test of an element)
_NUMBERS: Sequence[tuple[str, str, Callable[[int], bool]]] = (
    ("even", "the even numbers in {0}", lambda x: x % 2 == 0),
    ("odd", "the odd numbers in {0}", lambda x: x % 2 == 1),
    ("positive", "the {positive elements|numbers greater than zero} in {0}", lambda x: x > 0),
    ("negative", "the negative {numbers|elements} in {0}", lambda x: x < 0),
    ("two_digit", "the elements of {0} with exactly two digits", lambda x: 9 < abs(x) < 100),
    ("multiples_of_three", "the multiples of three in {0}", lambda x: x % 3 == 0),
    ("square", "the perfect squares in {0}", lambda x: x >= 0 and math.isqrt(x) ** 2 == x),
    ("prime", "the prime numbers in {0}",
     lambda x: x > 1 and all(x % k for k in range(2, x))),
)  # fmt: skip
# (name with {} for the choice, type of the result, words with {} for the choice, the function)
_OF_NUMBERS: Sequence[tuple[str, str, str, Callable[[list[int]], Any]]] = (
    ("sum_{}", "int", "the sum of {}", sum),
    ("count_{}", "int", "the number of {}, counted with repetitions", len),
    ("largest_{}", "int | None", "the largest of {}, or None if there are none",
     lambda v: max(v, default=None)),
    ("smallest_{}", "int | None", "the smallest of {}, or None if there are none",
     lambda v: min(v, default=None)),
    ("squares_of_{}", "list[int]", "a list of the squares of {}", lambda v: [x * x for x in v]),
    ("last_{}", "int", "the last of {}, or -1 if there are none", lambda v: [-1, *v][-1]),
    ("{}_sorted", "list[int]", "a list of {} in {descending|decreasing} order",
     lambda v: sorted(v, reverse=True)),
    ("{}_unique", "list[int]", "a list of {} without duplicates, in order of first appearance",
     lambda v: list(dict.fromkeys(v))),
    ("average_{}", "float", "the average of {}, rounded to two decimals, and 0.0 if there are none",
     lambda v: round(sum(v) / len(v), 2) if v else 0.0),
)  # fmt: skip
_VOWELS = "aeiouAEIOU"
_WORDS: Sequence[tuple[str, str, Callable[[str], bool]]] = (
    ("vowel_words", "the words in {0} that {start|begin} with a vowel", lambda w: w[0] in _VOWELS),
    ("short_words", "the words in {0} with at most four letters", lambda w: len(w) < 5),
    ("long_words", "those of {0} that have more than four letters", lambda w: len(w) > 4),
    ("capitalized", "the {strings|words} in {0} that start with a capital letter",
     lambda w: w[0].isupper()),
    ("e_words", "the words in {0} that contain the letter e", lambda w: "e" in w),
    ("odd_length", "the words in {0} whose length is odd", lambda w: len(w) % 2 == 1),
)  # fmt: skip
_OF_WORDS: Sequence[tuple[str, str, str, Callable[[list[str]], Any]]] = (
    ("count_{}", "int", "how many there are of {}", len),
    ("join_{}", "str", "one string of {}, joined by {hyphens|dashes}", "-".join),
    ("sorted_{}", "list[str]", "a list of {} in alphabetical order", sorted),
    ("upper_{}", "list[str]", "a list of {} in upper case", lambda v: [w.upper() for w in v]),
    ("lengths_of_{}", "dict[str, int]", "a dictionary that maps {} to their lengths",
     lambda v: {w: len(w) for w in v}),
    ("longest_{}", "str", "the longest of {}, or an empty string if there are none",
     lambda v: max(v, key=len, default="")),
    ("reversed_{}", "list[str]", "a list of {}, each of them spelled backwards",
     lambda v: [w[::-1] for w in v]),
)  # fmt: skip
_CHARACTERS: Sequence[tuple[str, str, Callable[[str], bool]]] = (
    ("digits", "the digits in {0}", str.isdigit),
    ("capitals", "the capital letters in {0}", str.isupper),
    ("spaces", "the spaces in {0}", str.isspace),
    ("letters", "the letters in {0}", str.isalpha),
    ("vowels", "the vowels in {0}", lambda c: c in _VOWELS),
    ("symbols", "the characters of {0} that are no letters, digits or spaces",
     lambda c: not c.isalnum() and not c.isspace()),
)  # fmt: skip
_OF_CHARACTERS: Sequence[tuple[str, str, str, Callable[[list[str]], Any]]] = (
    ("keep_{}", "str", "a string of {} alone, in their order", "".join),
    ("distinct_{}", "int", "the number of different characters among {}", lambda v: len({*v})),
    ("first_{}", "str", "the first of {}, or an empty string if there are none",
     lambda v: "".join(v[:1])),
    ("last_three_{}", "str", "the last three of {}, or fewer if there are not as many",
     lambda v: "".join(v[-3:])),
    ("repeated_{}", "bool", "True if any two of {} are the same", lambda v: len({*v}) < len(v)),
)  # fmt: skip

Composed = tuple[str, tuple[str], str, str, Callable[..., Any]]


def _compose(kind: str, choices: Sequence[Any], makers: Sequence[Any]) -> Iterator[Composed]:
    for (which, elements, test), (name, gives, what, make) in product(choices, makers):

        def run(values: Any, test: Any = test, make: Any = make) -> Any:
            return make([value for value in values if test(value)])

        yield name.replace("{}", which), (kind,), gives, what.replace("{}", elements), run


COMPOSED = (
    *_compose("ints", _NUMBERS, _OF_NUMBERS),
    *_compose("words", _WORDS, _OF_WORDS),
    *_compose("text", _CHARACTERS, _OF_CHARACTERS),
)
