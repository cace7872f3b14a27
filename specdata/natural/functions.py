"""Python functions to ask for: what each takes and returns, in words and as a function that runs.

The functions only compute the examples, so each is as short as it can be.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate, groupby, pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """A function to ask for.

    Args:
        name: its name.
        takes: the kinds of its arguments (names in `inputs.KINDS`).
        gives: its type of result.
        what: the result in words, with {0} and {1} for the names of the arguments.
        run: computes it.
    """

    name: str
    takes: Sequence[str]
    gives: str
    what: str
    run: Callable[..., Any]


_VOWELS = "aeiouAEIOU"


def _prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9']+", text)


def _digits(n: int) -> list[int]:
    return [int(digit) for digit in str(abs(n))]


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _factors(n: int) -> list[int]:
    found = []
    for k in range(2, n + 1):
        while n % k == 0:
            found.append(k)
            n //= k
    return found


def _collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def _fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]


def _balanced(text: str) -> bool:
    opened: list[str] = []
    for sign in text:
        if sign in "([{":
            opened.append(sign)
        elif sign in ")]}" and (not opened or opened.pop() + sign not in ("()", "[]", "{}")):
            return False
    return not opened


def _depth(text: str) -> int:
    return max(accumulate((sign in "([{") - (sign in ")]}") for sign in text), default=0)


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _roman(n: int) -> str:
    text = ""
    for value, sign in zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        "M CM D CD C XC L XL X IX V IV I".split(),
        strict=True,
    ):
        text += sign * (n // value)
        n %= value
    return text


def _shift(text: str, k: int) -> str:
    return "".join(
        chr((ord(sign) - 97 + k) % 26 + 97) if sign.islower()
        else chr((ord(sign) - 65 + k) % 26 + 65) if sign.isupper()
        else sign
        for sign in text
    )  # fmt: skip


def _longest_rise(numbers: Sequence[int]) -> int:
    best = run = 1
    for before, after in pairwise(numbers):
        run = run + 1 if after > before else 1
        best = max(best, run)
    return best


def _largest_slice(numbers: Sequence[int]) -> int:
    best = run = numbers[0]
    for number in numbers[1:]:
        run = max(number, run + number)
        best = max(best, run)
    return best


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        last, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (left != right))
    return row[-1]


def _common(a: str, b: str) -> str:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if count is None else count]


def _look_and_say(digits: str) -> str:
    return "".join(f"{len(list(group))}{digit}" for digit, group in groupby(digits))


def _minutes(time: str) -> int:
    hours, minutes = map(int, time.split(":"))
    return 60 * hours + minutes


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _anagrams(words: Sequence[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(sorted(word.lower())), []).append(word)
    return list(groups.values())


def _index(values: Sequence[Any], wanted: Any) -> int:
    return next((i for i, value in enumerate(values) if value == wanted), -1)


def _half(numbers: Sequence[float]) -> float:
    ranked = sorted(numbers)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


_TEXT: tuple[Task, ...] = (
    Task("count_vowels", ["text"], "int", "the number of vowels in {0}, in upper or lower case", lambda s: sum(c in _VOWELS for c in s)),
    Task("count_consonants", ["text"], "int", "how many consonants {0} has, ignoring everything that is not a letter", lambda s: sum(c.isalpha() and c not in _VOWELS for c in s)),
    Task("reverse_words", ["text"], "str", "{0} with its words in reverse order, separated by single spaces", lambda s: " ".join(s.split()[::-1])),
    Task("reverse_each_word", ["text"], "str", "{0} with the letters of each word reversed but the words in their places", lambda s: " ".join(w[::-1] for w in s.split())),
    Task("is_palindrome", ["text"], "bool", "True if {0} reads the same backwards, ignoring case, spaces and punctuation, and False otherwise", lambda s: _letters(s) == _letters(s)[::-1]),
    Task("is_palindrome_word", ["word"], "bool", "whether {0} is the same when it is spelled backwards, ignoring case", lambda w: w.lower() == w.lower()[::-1]),
    Task("longest_word", ["text"], "str", "the longest word of {0} (the first one if there are several), without punctuation", lambda s: max(_words(s), key=len)),
    Task("shortest_word_length", ["text"], "int", "the length of the shortest word in {0}, without punctuation", lambda s: min(map(len, _words(s)))),
    Task("word_count", ["text"], "int", "the number of words in {0}, where words are separated by white space", lambda s: len(s.split())),
    Task("word_lengths", ["text"], "list[int]", "a list with the length of each word in {0}, split at white space", lambda s: [len(w) for w in s.split()]),
    Task("word_frequencies", ["text"], "dict[str, int]", "a dictionary that maps each word of {0}, in lower case and without punctuation, to how often it occurs", lambda s: dict(Counter(_words(s.lower())))),
    Task("most_common_word", ["text"], "str", "the word that occurs most often in {0}, in lower case; the first one if there is a tie", lambda s: Counter(_words(s.lower())).most_common(1)[0][0]),
    Task("letter_counts", ["word"], "dict[str, int]", "a dictionary of how often each letter occurs in {0}, ignoring case", lambda w: dict(Counter(w.lower()))),
    Task("most_common_letter", ["text"], "str", "the letter that is used most often in {0}, in lower case; the earliest in the alphabet if there is a tie", lambda s: min((-n, c) for c, n in Counter(filter(str.isalpha, s.lower())).items())[1]),
    Task("first_unique_character", ["word"], "str", "the first character of {0} that does not repeat, or an empty string if all of them do", lambda w: next((c for c in w if w.count(c) == 1), "")),
    Task("remove_vowels", ["text"], "str", "{0} without its vowels", lambda s: "".join(c for c in s if c not in _VOWELS)),
    Task("remove_punctuation", ["text"], "str", "{0} with everything removed but letters, digits and spaces", lambda s: "".join(c for c in s if c.isalnum() or c == " ")),
    Task("remove_duplicate_letters", ["word"], "str", "{0} with only the first occurrence of each character kept", lambda w: "".join(_unique(w))),
    Task("swap_case", ["text"], "str", "{0} with upper-case letters made lower-case and the other way round", lambda s: s.swapcase()),
    Task("capitalize_words", ["text"], "str", "{0} with the first letter of every word in upper case and the others unchanged", lambda s: " ".join(w[:1].upper() + w[1:] for w in s.split(" "))),
    Task("alternate_case", ["word"], "str", "{0} with its letters alternately in upper and lower case, beginning with upper case", lambda w: "".join(c.lower() if i % 2 else c.upper() for i, c in enumerate(w))),
    Task("acronym", ["text"], "str", "the acronym of {0}: the first letters of its words, in upper case", lambda s: "".join(w[0].upper() for w in _words(s))),
    Task("count_upper", ["text"], "int", "how many characters of {0} are upper-case letters", lambda s: sum(map(str.isupper, s))),
    Task("count_letter", ["text", "letter"], "int", "how many times {1} occurs in {0}, ignoring case", lambda s, c: s.lower().count(c)),
    Task("words_with_letter", ["text", "letter"], "list[str]", "the words of {0} that contain {1}, in their order", lambda s, c: [w for w in s.split() if c in w.lower()]),
    Task("words_longer_than", ["text", "k"], "list[str]", "the words of {0} that have more than {1} letters", lambda s, k: [w for w in _words(s) if len(w) > k]),
    Task("starts_with_vowel", ["text"], "list[str]", "all words of {0} that start with a vowel", lambda s: [w for w in _words(s) if w[0] in _VOWELS]),
    Task("truncate_words", ["text", "k"], "str", "the first {1} words of {0}, followed by '...' if any were cut off", lambda s, k: " ".join(s.split()[:k]) + ("..." if len(s.split()) > k else "")),
    Task("caesar_cipher", ["text", "k"], "str", "{0} with each letter shifted {1} places forward in the alphabet, wrapping around after z; other characters stay", _shift),
    Task("rot13", ["word"], "str", "{0} in ROT13, where each letter is replaced by the one 13 places later", lambda w: _shift(w, 13)),
    Task("run_length_encode", ["bits"], "str", "{0} run-length encoded, with each run written as the character followed by the length of the run", lambda s: "".join(f"{c}{len(list(g))}" for c, g in groupby(s))),
    Task("look_and_say", ["digits"], "str", "the look-and-say description of {0}: for each run of equal digits its length and then the digit", _look_and_say),
    Task("is_anagram", ["word", "other_word"], "bool", "True if {0} and {1} are made of the same letters, ignoring case", lambda a, b: sorted(a.lower()) == sorted(b.lower())),
    Task("common_prefix", ["word", "other_word"], "str", "the longest prefix that {0} and {1} share, which may be empty", _common),
    Task("common_letters", ["word", "other_word"], "list[str]", "the letters that occur in both {0} and {1}, sorted and without duplicates", lambda a, b: sorted({*a.lower()} & {*b.lower()})),
    Task("edit_distance", ["word", "other_word"], "int", "the smallest number of insertions, deletions and replacements of a character that turn {0} into {1}", _distance),
    Task("interleave_strings", ["word", "other_word"], "str", "the characters of {0} and {1} taken in turn, with the rest of the longer one at the end", lambda a, b: "".join(x + y for x, y in zip(a.ljust(len(b), "\0"), b.ljust(len(a), "\0"), strict=True)).replace("\0", "")),
    Task("hamming_distance", ["bits", "k"], "int", "the number of positions at which {0} differs from itself shifted to the right by {1} places around the end", lambda s, k: sum(a != b for a, b in zip(s, s[-k % len(s):] + s[: -k % len(s)], strict=True))),
    Task("rotate_string", ["word", "k"], "str", "{0} rotated to the left by {1} characters", lambda w, k: w[k % len(w):] + w[: k % len(w)]),
    Task("chunk_string", ["word", "k"], "list[str]", "{0} cut into pieces of {1} characters; the last piece may be shorter", lambda w, k: [w[i : i + k] for i in range(0, len(w), k)]),
    Task("balanced_brackets", ["brackets"], "bool", "True if all round, square and curly brackets in {0} are closed in the right order", _balanced),
    Task("nesting_depth", ["brackets"], "int", "how deeply the brackets in {0} are nested at most, without checking that they match", _depth),
    Task("snake_to_camel", ["word", "other_word"], "str", "the camelCase name made of {0} and {1}: the first in lower case, the second capitalized", lambda a, b: a.lower() + b.capitalize()),
    Task("to_snake_case", ["text"], "str", "{0} in snake_case: its words in lower case, without punctuation, joined by underscores", lambda s: "_".join(_words(s.lower()))),
    Task("slugify", ["text"], "str", "a slug for a web address made of {0}: lower-case words joined by hyphens, with other characters removed", lambda s: "-".join(re.findall(r"[a-z0-9]+", s.lower()))),
    Task("extract_numbers", ["text"], "list[int]", "a list of all whole numbers that are written in {0}", lambda s: [int(n) for n in re.findall(r"\d+", s)]),
    Task("mask_digits", ["digits"], "str", "{0} with all but the last four characters replaced by '*'", lambda s: "*" * max(0, len(s) - 4) + s[-4:]),
    Task("is_pangram", ["text"], "bool", "whether {0} contains every letter of the English alphabet at least once", lambda s: {*"abcdefghijklmnopqrstuvwxyz"} <= {*s.lower()}),
    Task("char_positions", ["word"], "dict[str, list[int]]", "a dictionary from each character of {0} to the list of its positions, counted from 0", lambda w: {c: [i for i, x in enumerate(w) if x == c] for c in _unique(w)}),
    Task("collapse_spaces", ["text"], "str", "{0} without spaces at its ends and with single spaces between words", lambda s: " ".join(s.split())),
    Task("every_other_word", ["text"], "str", "every other word of {0}, starting with the first, joined by spaces", lambda s: " ".join(s.split()[::2])),
    Task("ends_match", ["word"], "bool", "True if the first and the last letter of {0} are the same, ignoring case", lambda w: w[0].lower() == w[-1].lower()),
    Task("pig_latin", ["word"], "str", "{0} in pig Latin: if it starts with a vowel, add 'way'; otherwise move its first letter to the end and add 'ay'", lambda w: w + "way" if w[0] in _VOWELS else w[1:] + w[0] + "ay"),
    Task("ascii_sum", ["word"], "int", "the sum of the character codes of {0}", lambda w: sum(map(ord, w))),
    Task("alphabet_score", ["word"], "int", "the sum of the positions of the letters of {0} in the alphabet, where a counts 1 and z counts 26", lambda w: sum(ord(c) - 96 for c in w.lower())),
    Task("insert_dashes", ["digits"], "str", "{0} with a dash between each two odd digits that follow one another", lambda s: re.sub(r"([13579])(?=[13579])", r"\1-", s)),
    Task("count_words_by_length", ["text"], "dict[int, int]", "a dictionary from word length to the number of words of that length in {0}, without punctuation", lambda s: dict(Counter(map(len, _words(s))))),
    Task("is_isogram", ["word"], "bool", "True if no letter occurs twice in {0}, ignoring case", lambda w: len({*w.lower()}) == len(w)),
    Task("double_letters", ["text"], "list[str]", "the words of {0} that have the same letter twice in a row", lambda s: [w for w in _words(s) if any(a == b for a, b in pairwise(w.lower()))]),
    Task("center_text", ["word", "k"], "str", "{0} with {1} stars on each side", lambda w, k: "*" * k + w + "*" * k),
)

_LISTS: tuple[Task, ...] = (
    Task("sum_of_evens", ["ints"], "int", "the sum of the even numbers in {0}", lambda v: sum(x for x in v if x % 2 == 0)),
    Task("product_of_odds", ["naturals"], "int", "the product of the odd numbers in {0}, which is 1 if there are none", lambda v: math.prod(x for x in v if x % 2)),
    Task("second_largest", ["ints"], "int | None", "the second largest distinct value in {0}, or None if there is none", lambda v: sorted({*v})[-2] if len({*v}) > 1 else None),
    Task("kth_smallest", ["ints", "k"], "int | None", "the {1}-th smallest element of {0}, counted from 1, or None if there are fewer elements", lambda v, k: sorted(v)[k - 1] if k <= len(v) else None),
    Task("running_total", ["ints"], "list[int]", "the running totals of {0}", lambda v: list(accumulate(v))),
    Task("running_maximum", ["ints"], "list[int]", "a list of the largest element of {0} seen so far at each position", lambda v: list(accumulate(v, max))),
    Task("differences", ["ints"], "list[int]", "a list of the differences between each element of {0} and the one before it", lambda v: [b - a for a, b in pairwise(v)]),
    Task("is_sorted", ["ints"], "bool", "True if {0} is in ascending order, where equal neighbours are allowed", lambda v: v == sorted(v)),
    Task("remove_duplicates", ["ints"], "list[int]", "the elements of {0} without duplicates, in the order in which they first appear", _unique),
    Task("duplicates", ["ints"], "list[int]", "a sorted list of the values that occur more than once in {0}", lambda v: sorted(x for x, n in Counter(v).items() if n > 1)),
    Task("only_once", ["ints"], "list[int]", "the elements that appear exactly once in {0}, in their order", lambda v: [x for x in v if v.count(x) == 1]),
    Task("most_frequent", ["naturals"], "int", "the most frequent element of {0}; the smallest one if there is a tie", lambda v: min((-n, x) for x, n in Counter(v).items())[1]),
    Task("rotate_left", ["ints", "k"], "list[int]", "{0} rotated {1} places to the left", lambda v, k: v[k % len(v):] + v[: k % len(v)]),
    Task("rotate_right", ["ints", "k"], "list[int]", "{0} rotated {1} places to the right", lambda v, k: v[-(k % len(v)):] + v[: -(k % len(v))] if k % len(v) else v),
    Task("chunk", ["ints", "k"], "list[list[int]]", "{0} divided into lists of {1} elements each; the last may have fewer", lambda v, k: [v[i : i + k] for i in range(0, len(v), k)]),
    Task("every_kth", ["ints", "k"], "list[int]", "every {1}-th element of {0}, starting with the first", lambda v, k: v[::k]),
    Task("take_until_negative", ["ints"], "list[int]", "the elements of {0} before the first negative one", lambda v: v[: next((i for i, x in enumerate(v) if x < 0), len(v))]),
    Task("move_zeros", ["ints"], "list[int]", "{0} with all zeros moved to the end and the order of the others kept", lambda v: [x for x in v if x] + [x for x in v if not x]),
    Task("evens_first", ["ints"], "list[int]", "{0} with the even numbers before the odd ones, each in their original order", lambda v: sorted(v, key=lambda x: x % 2)),
    Task("interleave", ["ints", "other_ints"], "list[int]", "the elements of {0} and {1} in turn, as far as the shorter list goes", lambda a, b: [x for pair in zip(a, b, strict=False) for x in pair]),
    Task("intersection", ["ints", "other_ints"], "list[int]", "the sorted values that are in both {0} and {1}, without duplicates", lambda a, b: sorted({*a} & {*b})),
    Task("union_sorted", ["ints", "other_ints"], "list[int]", "a sorted list of all values that are in {0} or in {1}, each once", lambda a, b: sorted({*a} | {*b})),
    Task("only_in_first", ["ints", "other_ints"], "list[int]", "the elements of {0} that are not in {1}, in their order", lambda a, b: [x for x in a if x not in b]),
    Task("merge_sorted", ["ints", "other_ints"], "list[int]", "one sorted list of all elements of {0} and {1}, with repetitions", lambda a, b: sorted(a + b)),
    Task("dot_product", ["ints", "other_ints"], "int", "the sum of the products of elements of {0} and {1} at the same positions, as far as both go", lambda a, b: sum(x * y for x, y in zip(a, b, strict=False))),
    Task("pairs_with_sum", ["naturals", "limit"], "list[tuple[int, int]]", "all pairs (a, b) of distinct values from {0} with a < b whose sum is {1}, sorted", lambda v, n: sorted((a, n - a) for a in {*v} if a < n - a and n - a in v)),
    Task("has_pair_with_sum", ["ints", "limit"], "bool", "True if two elements at different positions of {0} add up to {1}", lambda v, n: any(v[i] + v[j] == n for i in range(len(v)) for j in range(i))),
    Task("count_greater", ["ints", "limit"], "int", "how many elements of {0} are greater than {1}", lambda v, n: sum(x > n for x in v)),
    Task("filter_range", ["ints", "limit"], "list[int]", "the elements of {0} whose absolute value is at most {1}", lambda v, n: [x for x in v if abs(x) <= n]),
    Task("clip_values", ["ints", "limit"], "list[int]", "{0} with every element that is greater than {1} replaced by {1}", lambda v, n: [min(x, n) for x in v]),
    Task("closest_to", ["ints", "limit"], "int", "the element of {0} that is closest to {1}; the smaller one if two are equally close", lambda v, n: min(v, key=lambda x: (abs(x - n), x))),
    Task("index_of_maximum", ["ints"], "int", "the position of the largest element of {0}; the first one if there are several", lambda v: v.index(max(v))),
    Task("argsort", ["ints"], "list[int]", "the positions of the elements of {0} in the order that would sort it", lambda v: sorted(range(len(v)), key=v.__getitem__)),
    Task("span", ["ints"], "int", "the difference between the largest and the smallest element of {0}", lambda v: max(v) - min(v)),
    Task("largest_gap", ["ints"], "int", "the largest difference between neighbours after {0} is sorted", lambda v: max(b - a for a, b in pairwise(sorted(v)))),
    Task("longest_increasing_run", ["ints"], "int", "the length of the longest run of consecutive elements in {0} that strictly increase", _longest_rise),
    Task("maximum_subarray", ["ints"], "int", "the largest sum of any non-empty slice of consecutive elements of {0}", _largest_slice),
    Task("moving_average", ["naturals", "k"], "list[float]", "the averages of each {1} neighbouring elements of {0}, rounded to two decimals; an empty list if there are too few", lambda v, k: [round(sum(v[i : i + k]) / k, 2) for i in range(len(v) - k + 1)]),
    Task("largest_window_sum", ["ints", "k"], "int | None", "the largest sum of {1} neighbouring elements of {0}, or None if there are fewer than {1}", lambda v, k: max((sum(v[i : i + k]) for i in range(len(v) - k + 1)), default=None)),
    Task("top_k", ["ints", "k"], "list[int]", "the {1} largest elements of {0} in descending order", lambda v, k: sorted(v, reverse=True)[:k]),
    Task("split_by_sign", ["ints"], "tuple[list[int], list[int]]", "two lists: the negative elements of {0} and the others", lambda v: ([x for x in v if x < 0], [x for x in v if x >= 0])),
    Task("sign_changes", ["ints"], "int", "how often the sign changes from one element of {0} to the next, where zero counts as positive", lambda v: sum((a < 0) != (b < 0) for a, b in pairwise(v))),
    Task("local_peaks", ["ints"], "list[int]", "the elements of {0} that are greater than both their neighbours", lambda v: [v[i] for i in range(1, len(v) - 1) if v[i - 1] < v[i] > v[i + 1]]),
    Task("missing_numbers", ["naturals"], "list[int]", "the whole numbers between the smallest and the largest element of {0} that are not in it", lambda v: [x for x in range(min(v), max(v)) if x not in v]),
    Task("ranks", ["ints"], "list[int]", "the rank of each element of {0}, where the largest has rank 1 and equal elements share a rank", lambda v: [1 + sum(y > x for y in v) for x in v]),
    Task("group_consecutive", ["ints"], "list[list[int]]", "the elements of {0} with equal neighbours grouped into lists", lambda v: [list(g) for _, g in groupby(v)]),
    Task("mean", ["floats"], "float", "the arithmetic mean of {0}, rounded to two decimals", lambda v: round(sum(v) / len(v), 2)),
    Task("median", ["ints"], "float", "the median of {0}: the middle value, or the mean of the two middle values", _half),
    Task("variance", ["floats"], "float", "the population variance of {0}, rounded to three decimals", lambda v: round(sum((x - sum(v) / len(v)) ** 2 for x in v) / len(v), 3)),
    Task("mean_absolute_deviation", ["floats"], "float", "the mean of the absolute differences between the elements of {0} and their mean, rounded to three decimals", lambda v: round(sum(abs(x - sum(v) / len(v)) for x in v) / len(v), 3)),
    Task("normalize", ["floats"], "list[float]", "{0} scaled linearly so that the smallest value becomes 0 and the largest 1, rounded to two decimals", lambda v: [round((x - min(v)) / (max(v) - min(v) or 1), 2) for x in v]),
    Task("closest_pair", ["floats"], "tuple[float, float]", "the two elements of {0} that are closest to each other, the smaller one first", lambda v: min(pairwise(sorted(v)), key=lambda p: p[1] - p[0])),
    Task("round_all", ["floats"], "list[int]", "the elements of {0} rounded down to whole numbers", lambda v: [math.floor(x) for x in v]),
    Task("geometric_mean", ["naturals"], "float", "the geometric mean of {0}, rounded to two decimals", lambda v: round(math.prod(v) ** (1 / len(v)), 2)),
    Task("flatten", ["nested"], "list[int]", "one list of all elements of the lists in {0}, in order", lambda v: [x for row in v for x in row]),
    Task("longest_list", ["nested"], "list[int]", "the longest of the lists in {0}; the first one if there are several", lambda v: max(v, key=len)),
    Task("sort_by_sum", ["nested"], "list[list[int]]", "the lists in {0} sorted by their sums, the smallest first", lambda v: sorted(v, key=sum)),
    Task("common_to_all", ["nested"], "list[int]", "a sorted list of the numbers that are in every list of {0}", lambda v: sorted(set.intersection(*map(set, v)))),
    Task("sort_by_length", ["words"], "list[str]", "{0} sorted by length; words of equal length stay in their order", lambda v: sorted(v, key=len)),
    Task("longest_string", ["words"], "str", "the longest string in {0}, or the first of them if there are several", lambda v: max(v, key=len)),
    Task("join_with_and", ["words"], "str", "the words of {0} as a phrase with commas and 'and' before the last", lambda v: ", ".join(v[:-1]) + " and " + v[-1]),
    Task("count_by_first_letter", ["words"], "dict[str, int]", "a dictionary from first letter, in lower case, to the number of words in {0} that begin with it", lambda v: dict(Counter(w[0].lower() for w in v))),
    Task("group_by_length", ["words"], "dict[int, list[str]]", "a dictionary from length to the words in {0} of that length", lambda v: {n: [w for w in v if len(w) == n] for n in _unique([*map(len, v)])}),
    Task("group_anagrams", ["words"], "list[list[str]]", "the words of {0} grouped into lists of anagrams, in order of first appearance", _anagrams),
    Task("filter_by_prefix", ["words", "letter"], "list[str]", "those of {0} that begin with {1}, ignoring case", lambda v, c: [w for w in v if w.lower().startswith(c)]),
    Task("total_length", ["words"], "int", "the total number of characters in all of {0}", lambda v: sum(map(len, v))),
    Task("sort_case_insensitive", ["words"], "list[str]", "{0} in alphabetical order, ignoring case", lambda v: sorted(v, key=str.lower)),
    Task("palindromes", ["words"], "list[str]", "the palindromes among {0}, ignoring case", lambda v: [w for w in v if w.lower() == w.lower()[::-1]]),
    Task("word_positions", ["words"], "dict[str, int]", "a dictionary from each word in {0} to the position of its last occurrence", lambda v: {w: i for i, w in enumerate(v)}),
    Task("find_word", ["words", "word"], "int", "the position of {1} in {0}, or -1 if it is not there", _index),
    Task("longest_chain", ["words"], "int", "how many words at the beginning of {0} form a chain in which each word starts with the last letter of the one before, ignoring case", lambda v: 1 + next((i for i, (a, b) in enumerate(pairwise(v)) if a[-1].lower() != b[0].lower()), len(v) - 1)),
)

_NUMBERS: tuple[Task, ...] = (
    Task("is_prime", ["n"], "bool", "True if {0} is a prime number, and False otherwise", _prime),
    Task("primes_up_to", ["n"], "list[int]", "a list of all prime numbers up to and including {0}", lambda n: [*filter(_prime, range(n + 1))]),
    Task("next_prime", ["n"], "int", "the smallest prime number that is greater than {0}", lambda n: next(filter(_prime, range(n + 1, 3 * n + 3)))),
    Task("prime_factors", ["n"], "list[int]", "the prime factors of {0} in ascending order, repeated as often as they divide it", _factors),
    Task("divisors", ["n"], "list[int]", "all positive divisors of {0} in ascending order", _divisors),
    Task("count_divisors", ["n"], "int", "how many positive divisors {0} has", lambda n: len(_divisors(n))),
    Task("is_perfect", ["n"], "bool", "True if {0} equals the sum of its divisors other than itself", lambda n: sum(_divisors(n)[:-1]) == n),
    Task("greatest_common_divisor", ["n", "other_n"], "int", "the greatest common divisor of {0} and {1}", math.gcd),
    Task("least_common_multiple", ["n", "other_n"], "int", "the least common multiple of {0} and {1}", math.lcm),
    Task("are_coprime", ["n", "other_n"], "bool", "whether {0} and {1} have no common divisor other than 1", lambda a, b: math.gcd(a, b) == 1),
    Task("factorial", ["small"], "int", "the factorial of {0}", math.factorial),
    Task("fibonacci", ["small"], "int", "the {0}-th Fibonacci number, where the numbers with index 0 and 1 are 0 and 1", lambda n: _fibonacci(n + 1)[-1]),
    Task("fibonacci_list", ["small"], "list[int]", "a list of the first {0} Fibonacci numbers, starting with 0 and 1", _fibonacci),
    Task("triangular_number", ["small"], "int", "the sum of the whole numbers from 1 to {0}", lambda n: n * (n + 1) // 2),
    Task("sum_of_squares", ["small"], "int", "the sum of the squares of the whole numbers from 1 to {0}", lambda n: sum(k * k for k in range(n + 1))),
    Task("digit_sum", ["large"], "int", "the sum of the decimal digits of {0}", lambda n: sum(_digits(n))),
    Task("digital_root", ["large"], "int", "the digital root of {0}: the sum of its digits, taken again until one digit is left", lambda n: 1 + (n - 1) % 9),
    Task("reverse_digits", ["large"], "int", "the number that has the digits of {0} in reverse order", lambda n: int(str(n)[::-1])),
    Task("is_palindrome_number", ["large"], "bool", "True if {0} has the same digits when it is read from right to left", lambda n: str(n) == str(n)[::-1]),
    Task("count_even_digits", ["large"], "int", "how many digits of {0} are even", lambda n: sum(d % 2 == 0 for d in _digits(n))),
    Task("largest_digit", ["large"], "int", "the largest digit of {0}", lambda n: max(_digits(n))),
    Task("digit_product", ["large"], "int", "the product of the digits of {0} that are not zero", lambda n: math.prod(d for d in _digits(n) if d)),
    Task("is_armstrong", ["large"], "bool", "whether {0} equals the sum of its digits, each raised to the power of the number of digits", lambda n: n == sum(d ** len(str(n)) for d in _digits(n))),
    Task("is_harshad", ["large"], "bool", "True if {0} can be divided by the sum of its digits without a remainder", lambda n: n % sum(_digits(n)) == 0),
    Task("sort_digits", ["large"], "int", "the largest number that can be made by reordering the digits of {0}", lambda n: int("".join(sorted(str(n), reverse=True)))),
    Task("with_thousands", ["large"], "str", "{0} as a string with commas between groups of three digits", lambda n: f"{n:,}"),
    Task("to_binary", ["n"], "str", "{0} in binary notation, without a prefix", lambda n: f"{n:b}"),
    Task("to_hexadecimal", ["large"], "str", "{0} in hexadecimal notation with capital letters", lambda n: f"{n:X}"),
    Task("from_binary", ["bits"], "int", "the number whose binary notation is {0}", lambda s: int(s, 2)),
    Task("count_ones", ["n"], "int", "how many ones the binary notation of {0} has", int.bit_count),
    Task("longest_run_of_ones", ["bits"], "int", "the length of the longest run of ones in {0}", lambda s: max(map(len, s.split("0")))),
    Task("to_base", ["large", "k"], "str", "{0} written in base {1} + 1", lambda n, k: _in_base(n, k + 1)),
    Task("to_roman", ["n"], "str", "{0} as a Roman numeral", _roman),
    Task("collatz_steps", ["n"], "int", "how many steps the Collatz sequence takes from {0} to 1, where even numbers are halved and odd ones tripled plus one", _collatz),
    Task("is_perfect_square", ["large"], "bool", "True if {0} is the square of a whole number", lambda n: math.isqrt(n) ** 2 == n),
    Task("integer_square_root", ["large"], "int", "the largest integer whose square is not greater than {0}", math.isqrt),
    Task("is_power_of_two", ["n"], "bool", "whether {0} is a power of two", lambda n: n & (n - 1) == 0),
    Task("round_to_multiple", ["n", "k"], "int", "the largest multiple of {1} that is not greater than {0}", lambda n, k: n - n % k),
    Task("clamp", ["n", "limit"], "int", "{0}, but at most {1}", min),
    Task("multiplication_table", ["k"], "list[list[int]]", "the multiplication table from 1 to {0} as a list of rows", lambda k: [[i * j for j in range(1, k + 1)] for i in range(1, k + 1)]),
    Task("fizz_buzz", ["small"], "list[str]", "a list of the numbers from 1 to {0} as strings, with 'Fizz' for multiples of 3, 'Buzz' for multiples of 5 and 'FizzBuzz' for multiples of both", lambda n: ["Fizz" * (k % 3 == 0) + "Buzz" * (k % 5 == 0) or str(k) for k in range(1, n + 1)]),
    Task("pascal_row", ["k"], "list[int]", "row {0} of Pascal's triangle, where row 0 is [1]", lambda k: [math.comb(k, i) for i in range(k + 1)]),
    Task("binomial", ["small", "k"], "int", "the number of ways to choose {1} things from {0}", math.comb),
    Task("celsius_to_fahrenheit", ["real"], "float", "the temperature {0}, given in degrees Celsius, in degrees Fahrenheit, rounded to one decimal", lambda x: round(x * 9 / 5 + 32, 1)),
    Task("miles_to_kilometres", ["real"], "float", "{0} miles in kilometres (a mile is 1.609 km), rounded to two decimals", lambda x: round(x * 1.609, 2)),
    Task("circle_area", ["real"], "float", "the area of a circle with radius {0}, rounded to two decimals", lambda x: round(math.pi * x * x, 2)),
    Task("sphere_volume", ["real"], "float", "the volume of a sphere with radius {0}, rounded to two decimals", lambda x: round(4 / 3 * math.pi * x**3, 2)),
    Task("add_tax", ["real", "k"], "float", "the price {0} with a tax of {1} percent added, rounded to cents", lambda x, k: round(x * (1 + k / 100), 2)),
    Task("compound_interest", ["large", "k"], "float", "what {0} dollars are worth after ten years at {1} percent interest, compounded yearly, rounded to cents", lambda n, k: round(n * (1 + k / 100) ** 10, 2)),
    Task("seconds_to_clock", ["large"], "str", "{0} seconds as hours, minutes and seconds in the form H:MM:SS", lambda n: f"{n // 3600}:{n // 60 % 60:02}:{n % 60:02}"),
    Task("count_coins", ["n"], "int", "the smallest number of coins of 1, 5, 10 and 25 cents that make {0} cents", lambda n: n // 25 + n % 25 // 10 + n % 25 % 10 // 5 + n % 5),
    Task("ordinal", ["n"], "str", "{0} as an ordinal number such as '1st', '2nd', '3rd' or '11th'", lambda n: f"{n}" + ("th" if n % 100 // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th"))),
    Task("even_numbers_below", ["small"], "list[int]", "all even numbers from 0 up to but not including {0}", lambda n: [*range(0, n, 2)]),
    Task("countdown", ["k"], "list[int]", "a list that counts down from {0} to 0", lambda k: [*range(k, -1, -1)]),
)

_OTHERS: tuple[Task, ...] = (
    Task("invert_dictionary", ["pairs"], "dict[int, str]", "a dictionary with the keys and values of {0} exchanged; of equal values the last counts", lambda d: {v: k for k, v in d.items()}),
    Task("merge_counts", ["pairs", "other_pairs"], "dict[str, int]", "a dictionary with the sums of the values of {0} and {1}; a key that is in one only keeps its value", lambda a, b: {k: a.get(k, 0) + b.get(k, 0) for k in [*a, *(k for k in b if k not in a)]}),
    Task("updated", ["pairs", "other_pairs"], "dict[str, int]", "a new dictionary with the entries of {0} and {1}, where those of {1} have precedence", lambda a, b: {**a, **b}),
    Task("common_keys", ["pairs", "other_pairs"], "list[str]", "a sorted list of the keys that {0} and {1} have in common", lambda a, b: sorted({*a} & {*b})),
    Task("key_of_maximum", ["pairs"], "str", "the key with the largest value in {0}; the first one if there is a tie", lambda d: max(d, key=d.get)),
    Task("sort_by_value", ["pairs"], "list[tuple[str, int]]", "the (key, value) pairs of {0}, sorted by value with the largest first", lambda d: sorted(d.items(), key=lambda kv: -kv[1])),
    Task("filter_by_value", ["pairs", "limit"], "dict[str, int]", "the entries of {0} whose value is greater than {1}", lambda d, n: {k: v for k, v in d.items() if v > n}),
    Task("total_value", ["pairs"], "int", "the sum of all values in {0}", lambda d: sum(d.values())),
    Task("average_value", ["pairs"], "float", "the average of the values in {0}, rounded to two decimals", lambda d: round(sum(d.values()) / len(d), 2)),
    Task("shares", ["pairs"], "dict[str, float]", "a dictionary with each value of {0} as a percentage of their total, rounded to one decimal", lambda d: {k: round(100 * v / sum(d.values()), 1) for k, v in d.items()}),
    Task("keys_by_length", ["pairs"], "list[str]", "the keys of {0} sorted by their length, then alphabetically", lambda d: sorted(d, key=lambda k: (len(k), k))),
    Task("as_lines", ["pairs"], "str", "a string with one line 'key: value' for each entry of {0}, in alphabetical order", lambda d: "\n".join(f"{k}: {v}" for k, v in sorted(d.items()))),
    Task("transpose", ["matrix"], "list[list[int]]", "the transpose of {0}", lambda m: [list(row) for row in zip(*m, strict=True)]),
    Task("trace", ["matrix"], "int", "the sum of the elements on the main diagonal of {0}", lambda m: sum(m[i][i] for i in range(len(m)))),
    Task("row_sums", ["matrix"], "list[int]", "the sum of each row of {0}", lambda m: [*map(sum, m)]),
    Task("column_maxima", ["matrix"], "list[int]", "the largest element of each column of {0}", lambda m: [*map(max, zip(*m, strict=True))]),
    Task("rotate_matrix", ["matrix"], "list[list[int]]", "{0} rotated clockwise by 90 degrees", lambda m: [list(row) for row in zip(*m[::-1], strict=True)]),
    Task("is_symmetric", ["matrix"], "bool", "True if {0} equals its transpose", lambda m: all(m[i][j] == m[j][i] for i in range(len(m)) for j in range(i))),
    Task("spiral", ["matrix"], "list[int]", "the elements of {0} in spiral order, clockwise from the upper left corner", lambda m: _spiral(m)),
    Task("anti_diagonal", ["matrix"], "list[int]", "the elements of {0} from the upper right corner to the lower left one", lambda m: [m[i][-1 - i] for i in range(len(m))]),
    Task("count_zeros", ["matrix"], "int", "how many elements of {0} are zero", lambda m: sum(row.count(0) for row in m)),
    Task("scale_matrix", ["matrix", "k"], "list[list[int]]", "{0} with every element multiplied by {1}", lambda m, k: [[k * x for x in row] for row in m]),
    Task("merge_intervals", ["intervals"], "list[tuple[int, int]]", "the intervals of {0} with those that overlap or touch merged, in ascending order", _merged),
    Task("covered_length", ["intervals"], "int", "the total length that the intervals in {0} cover, with overlaps counted once", lambda v: sum(b - a for a, b in _merged(v))),
    Task("any_overlap", ["intervals"], "bool", "whether any two intervals in {0} overlap; touching at an end does not count", lambda v: any(b > c for (_, b), (c, _) in pairwise(sorted(v)))),
    Task("longest_interval", ["intervals"], "tuple[int, int]", "the longest interval in {0}; the first one if there are several", lambda v: max(v, key=lambda p: p[1] - p[0])),
    Task("sort_by_end", ["intervals"], "list[tuple[int, int]]", "{0} sorted by the second element of each pair", lambda v: sorted(v, key=lambda p: p[1])),
    Task("is_leap_year", ["date"], "bool", "True if the year of {0} is a leap year", lambda s: int(s[:4]) % 4 == 0 and (int(s[:4]) % 100 != 0 or int(s[:4]) % 400 == 0)),
    Task("weekday", ["date"], "str", "the name of the weekday of {0} in English", lambda s: f"{date.fromisoformat(s):%A}"),
    Task("day_of_year", ["date"], "int", "the number of the day of {0} within its year, counted from 1", lambda s: date.fromisoformat(s).timetuple().tm_yday),
    Task("quarter", ["date"], "int", "the quarter of the year, from 1 to 4, that {0} lies in", lambda s: (int(s[5:7]) + 2) // 3),
    Task("us_date", ["date"], "str", "{0} in the form MM/DD/YYYY", lambda s: f"{s[5:7]}/{s[8:]}/{s[:4]}"),
    Task("is_weekend", ["date"], "bool", "whether {0} is a Saturday or a Sunday", lambda s: date.fromisoformat(s).weekday() > 4),
    Task("days_left_in_year", ["date"], "int", "how many days of the year remain after {0}", lambda s: (date(int(s[:4]), 12, 31) - date.fromisoformat(s)).days),
    Task("minutes_since_midnight", ["time"], "int", "the number of minutes between midnight and {0}", _minutes),
    Task("add_minutes", ["time", "n"], "str", "the time {1} minutes after {0}, as HH:MM, starting again at 00:00 after midnight", lambda s, n: f"{(_minutes(s) + n) // 60 % 24:02}:{(_minutes(s) + n) % 60:02}"),
    Task("to_twelve_hours", ["time"], "str", "{0} in the twelve-hour form, such as '3:05 PM'", lambda s: f"{(int(s[:2]) - 1) % 12 + 1}:{s[3:]} {'AM' if int(s[:2]) < 12 else 'PM'}"),
    Task("clock_angle", ["time"], "float", "the smaller angle in degrees between the hands of a clock at {0}", lambda s: min(a := abs((_minutes(s) * 0.5 - int(s[3:]) * 6) % 360), 360 - a)),
    Task("validate_checksum", ["digits"], "bool", "True if {0} passes the Luhn check that is used for card numbers", lambda s: sum(sum(_digits(2 * int(c))) if i % 2 else int(c) for i, c in enumerate(reversed(s))) % 10 == 0),
    Task("digit_histogram", ["digits"], "dict[str, int]", "a dictionary from each digit in {0} to how often it occurs", lambda s: dict(Counter(s))),
    Task("binary_or", ["bits", "other_bits"], "str", "the bitwise OR of {0} and {1} as a string, the shorter one filled with zeros on the left", lambda a, b: f"{int(a, 2) | int(b, 2):0{max(len(a), len(b))}b}"),
    Task("flip_bits", ["bits"], "str", "{0} with every 0 replaced by 1 and every 1 by 0", lambda s: s.translate(str.maketrans("01", "10"))),
    Task("zip_to_dictionary", ["words", "ints"], "dict[str, int]", "a dictionary that maps each word in {0} to the number at the same position in {1}, as far as both go", lambda a, b: dict(zip(a, b, strict=False))),
    Task("repeat_each", ["words", "k"], "list[str]", "a list in which each word of {0} is repeated {1} times", lambda v, k: [w for w in v for _ in range(k)]),
    Task("polynomial_value", ["ints", "k"], "int", "the value at {1} of the polynomial whose coefficients are {0}, the constant one first", lambda v, k: sum(c * k**i for i, c in enumerate(v))),
)


def _in_base(n: int, base: int) -> str:
    return (_in_base(n // base, base) if n >= base else "") + str(n % base)


def _spiral(matrix: list[list[int]]) -> list[int]:
    if not matrix:
        return []
    rest = [list(row) for row in zip(*matrix[1:], strict=True)][::-1]
    return matrix[0] + _spiral(rest)


TASKS: tuple[Task, ...] = (*_TEXT, *_LISTS, *_NUMBERS, *_OTHERS)
