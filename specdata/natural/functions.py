"""The functions that prompts ask for, as short as can be: they only compute the examples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import accumulate, groupby, pairwise
from typing import Any

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
        ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"],
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


def _in_base(n: int, base: int) -> str:
    return (_in_base(n // base, base) if n >= base else "") + str(n % base)


def _spiral(matrix: list[list[int]]) -> list[int]:
    if not matrix:
        return []
    rest = [list(row) for row in zip(*matrix[1:], strict=True)][::-1]
    return matrix[0] + _spiral(rest)


RUN: Mapping[str, Callable[..., Any]] = {
    "count_vowels": lambda s: sum(c in _VOWELS for c in s),
    "count_consonants": lambda s: sum(c.isalpha() and c not in _VOWELS for c in s),
    "reverse_words": lambda s: " ".join(s.split()[::-1]),
    "reverse_each_word": lambda s: " ".join(w[::-1] for w in s.split()),
    "is_palindrome": lambda s: _letters(s) == _letters(s)[::-1],
    "is_palindrome_word": lambda w: w.lower() == w.lower()[::-1],
    "longest_word": lambda s: max(_words(s), key=len),
    "shortest_word_length": lambda s: min(map(len, _words(s))),
    "word_count": lambda s: len(s.split()),
    "word_lengths": lambda s: [len(w) for w in s.split()],
    "word_frequencies": lambda s: dict(Counter(_words(s.lower()))),
    "most_common_word": lambda s: Counter(_words(s.lower())).most_common(1)[0][0],
    "letter_counts": lambda w: dict(Counter(w.lower())),
    "most_common_letter": lambda s: min(
        (-n, c) for c, n in Counter(filter(str.isalpha, s.lower())).items()
    )[1],
    "first_unique_character": lambda w: next((c for c in w if w.count(c) == 1), ""),
    "remove_vowels": lambda s: "".join(c for c in s if c not in _VOWELS),
    "remove_punctuation": lambda s: "".join(c for c in s if c.isalnum() or c == " "),
    "remove_duplicate_letters": lambda w: "".join(_unique(w)),
    "swap_case": lambda s: s.swapcase(),
    "capitalize_words": lambda s: " ".join(w[:1].upper() + w[1:] for w in s.split(" ")),
    "alternate_case": lambda w: "".join(c.lower() if i % 2 else c.upper() for i, c in enumerate(w)),
    "acronym": lambda s: "".join(w[0].upper() for w in _words(s)),
    "count_upper": lambda s: sum(map(str.isupper, s)),
    "count_letter": lambda s, c: s.lower().count(c),
    "words_with_letter": lambda s, c: [w for w in s.split() if c in w.lower()],
    "words_longer_than": lambda s, k: [w for w in _words(s) if len(w) > k],
    "starts_with_vowel": lambda s: [w for w in _words(s) if w[0] in _VOWELS],
    "truncate_words": lambda s, k: " ".join(s.split()[:k]) + ("..." if len(s.split()) > k else ""),
    "caesar_cipher": _shift,
    "rot13": lambda w: _shift(w, 13),
    "run_length_encode": lambda s: "".join(f"{c}{len(list(g))}" for c, g in groupby(s)),
    "look_and_say": _look_and_say,
    "is_anagram": lambda a, b: sorted(a.lower()) == sorted(b.lower()),
    "common_prefix": _common,
    "common_letters": lambda a, b: sorted({*a.lower()} & {*b.lower()}),
    "edit_distance": _distance,
    "interleave_strings": lambda a, b: "".join(
        x + y for x, y in zip(a.ljust(len(b), "\0"), b.ljust(len(a), "\0"), strict=True)
    ).replace("\0", ""),
    "hamming_distance": lambda s, k: sum(
        a != b for a, b in zip(s, s[-k % len(s) :] + s[: -k % len(s)], strict=True)
    ),
    "rotate_string": lambda w, k: w[k % len(w) :] + w[: k % len(w)],
    "chunk_string": lambda w, k: [w[i : i + k] for i in range(0, len(w), k)],
    "balanced_brackets": _balanced,
    "nesting_depth": _depth,
    "snake_to_camel": lambda a, b: a.lower() + b.capitalize(),
    "to_snake_case": lambda s: "_".join(_words(s.lower())),
    "slugify": lambda s: "-".join(re.findall(r"[a-z0-9]+", s.lower())),
    "extract_numbers": lambda s: [int(n) for n in re.findall(r"\d+", s)],
    "mask_digits": lambda s: "*" * max(0, len(s) - 4) + s[-4:],
    "is_pangram": lambda s: {*"abcdefghijklmnopqrstuvwxyz"} <= {*s.lower()},
    "char_positions": lambda w: {c: [i for i, x in enumerate(w) if x == c] for c in _unique(w)},
    "collapse_spaces": lambda s: " ".join(s.split()),
    "every_other_word": lambda s: " ".join(s.split()[::2]),
    "ends_match": lambda w: w[0].lower() == w[-1].lower(),
    "pig_latin": lambda w: w + "way" if w[0] in _VOWELS else w[1:] + w[0] + "ay",
    "ascii_sum": lambda w: sum(map(ord, w)),
    "alphabet_score": lambda w: sum(ord(c) - 96 for c in w.lower()),
    "insert_dashes": lambda s: re.sub(r"([13579])(?=[13579])", r"\1-", s),
    "count_words_by_length": lambda s: dict(Counter(map(len, _words(s)))),
    "is_isogram": lambda w: len({*w.lower()}) == len(w),
    "double_letters": lambda s: [
        w for w in _words(s) if any(a == b for a, b in pairwise(w.lower()))
    ],
    "center_text": lambda w, k: "*" * k + w + "*" * k,
    "sum_of_evens": lambda v: sum(x for x in v if x % 2 == 0),
    "product_of_odds": lambda v: math.prod(x for x in v if x % 2),
    "second_largest": lambda v: sorted({*v})[-2] if len({*v}) > 1 else None,
    "kth_smallest": lambda v, k: sorted(v)[k - 1] if k <= len(v) else None,
    "running_total": lambda v: list(accumulate(v)),
    "running_maximum": lambda v: list(accumulate(v, max)),
    "differences": lambda v: [b - a for a, b in pairwise(v)],
    "is_sorted": lambda v: v == sorted(v),
    "remove_duplicates": _unique,
    "duplicates": lambda v: sorted(x for x, n in Counter(v).items() if n > 1),
    "only_once": lambda v: [x for x in v if v.count(x) == 1],
    "most_frequent": lambda v: min((-n, x) for x, n in Counter(v).items())[1],
    "rotate_left": lambda v, k: v[k % len(v) :] + v[: k % len(v)],
    "rotate_right": lambda v, k: v[-(k % len(v)) :] + v[: -(k % len(v))] if k % len(v) else v,
    "chunk": lambda v, k: [v[i : i + k] for i in range(0, len(v), k)],
    "every_kth": lambda v, k: v[::k],
    "take_until_negative": lambda v: v[: next((i for i, x in enumerate(v) if x < 0), len(v))],
    "move_zeros": lambda v: [x for x in v if x] + [x for x in v if not x],
    "evens_first": lambda v: sorted(v, key=lambda x: x % 2),
    "interleave": lambda a, b: [x for pair in zip(a, b, strict=False) for x in pair],
    "intersection": lambda a, b: sorted({*a} & {*b}),
    "union_sorted": lambda a, b: sorted({*a} | {*b}),
    "only_in_first": lambda a, b: [x for x in a if x not in b],
    "merge_sorted": lambda a, b: sorted(a + b),
    "dot_product": lambda a, b: sum(x * y for x, y in zip(a, b, strict=False)),
    "pairs_with_sum": lambda v, n: sorted((a, n - a) for a in {*v} if a < n - a and n - a in v),
    "has_pair_with_sum": lambda v, n: any(
        v[i] + v[j] == n for i in range(len(v)) for j in range(i)
    ),
    "count_greater": lambda v, n: sum(x > n for x in v),
    "filter_range": lambda v, n: [x for x in v if abs(x) <= n],
    "clip_values": lambda v, n: [min(x, n) for x in v],
    "closest_to": lambda v, n: min(v, key=lambda x: (abs(x - n), x)),
    "index_of_maximum": lambda v: v.index(max(v)),
    "argsort": lambda v: sorted(range(len(v)), key=v.__getitem__),
    "span": lambda v: max(v) - min(v),
    "largest_gap": lambda v: max(b - a for a, b in pairwise(sorted(v))),
    "longest_increasing_run": _longest_rise,
    "maximum_subarray": _largest_slice,
    "moving_average": lambda v, k: [round(sum(v[i : i + k]) / k, 2) for i in range(len(v) - k + 1)],
    "largest_window_sum": lambda v, k: max(
        (sum(v[i : i + k]) for i in range(len(v) - k + 1)), default=None
    ),
    "top_k": lambda v, k: sorted(v, reverse=True)[:k],
    "split_by_sign": lambda v: ([x for x in v if x < 0], [x for x in v if x >= 0]),
    "sign_changes": lambda v: sum((a < 0) != (b < 0) for a, b in pairwise(v)),
    "local_peaks": lambda v: [v[i] for i in range(1, len(v) - 1) if v[i - 1] < v[i] > v[i + 1]],
    "missing_numbers": lambda v: [x for x in range(min(v), max(v)) if x not in v],
    "ranks": lambda v: [1 + sum(y > x for y in v) for x in v],
    "group_consecutive": lambda v: [list(g) for _, g in groupby(v)],
    "mean": lambda v: round(sum(v) / len(v), 2),
    "median": _half,
    "variance": lambda v: round(sum((x - sum(v) / len(v)) ** 2 for x in v) / len(v), 3),
    "mean_absolute_deviation": lambda v: round(
        sum(abs(x - sum(v) / len(v)) for x in v) / len(v), 3
    ),
    "normalize": lambda v: [round((x - min(v)) / (max(v) - min(v) or 1), 2) for x in v],
    "closest_pair": lambda v: min(pairwise(sorted(v)), key=lambda p: p[1] - p[0]),
    "round_all": lambda v: [math.floor(x) for x in v],
    "geometric_mean": lambda v: round(math.prod(v) ** (1 / len(v)), 2),
    "flatten": lambda v: [x for row in v for x in row],
    "longest_list": lambda v: max(v, key=len),
    "sort_by_sum": lambda v: sorted(v, key=sum),
    "common_to_all": lambda v: sorted(set.intersection(*map(set, v))),
    "sort_by_length": lambda v: sorted(v, key=len),
    "longest_string": lambda v: max(v, key=len),
    "join_with_and": lambda v: ", ".join(v[:-1]) + " and " + v[-1],
    "count_by_first_letter": lambda v: dict(Counter(w[0].lower() for w in v)),
    "group_by_length": lambda v: {
        n: [w for w in v if len(w) == n] for n in _unique([*map(len, v)])
    },
    "group_anagrams": _anagrams,
    "filter_by_prefix": lambda v, c: [w for w in v if w.lower().startswith(c)],
    "total_length": lambda v: sum(map(len, v)),
    "sort_case_insensitive": lambda v: sorted(v, key=str.lower),
    "palindromes": lambda v: [w for w in v if w.lower() == w.lower()[::-1]],
    "word_positions": lambda v: {w: i for i, w in enumerate(v)},
    "find_word": _index,
    "longest_chain": lambda v: (
        1
        + next(
            (i for i, (a, b) in enumerate(pairwise(v)) if a[-1].lower() != b[0].lower()), len(v) - 1
        )
    ),
    "is_prime": _prime,
    "primes_up_to": lambda n: [*filter(_prime, range(n + 1))],
    "next_prime": lambda n: next(filter(_prime, range(n + 1, 3 * n + 3))),
    "prime_factors": _factors,
    "divisors": _divisors,
    "count_divisors": lambda n: len(_divisors(n)),
    "is_perfect": lambda n: sum(_divisors(n)[:-1]) == n,
    "greatest_common_divisor": math.gcd,
    "least_common_multiple": math.lcm,
    "are_coprime": lambda a, b: math.gcd(a, b) == 1,
    "factorial": math.factorial,
    "fibonacci": lambda n: _fibonacci(n + 1)[-1],
    "fibonacci_list": _fibonacci,
    "triangular_number": lambda n: n * (n + 1) // 2,
    "sum_of_squares": lambda n: sum(k * k for k in range(n + 1)),
    "digit_sum": lambda n: sum(_digits(n)),
    "digital_root": lambda n: 1 + (n - 1) % 9,
    "reverse_digits": lambda n: int(str(n)[::-1]),
    "is_palindrome_number": lambda n: str(n) == str(n)[::-1],
    "count_even_digits": lambda n: sum(d % 2 == 0 for d in _digits(n)),
    "largest_digit": lambda n: max(_digits(n)),
    "digit_product": lambda n: math.prod(d for d in _digits(n) if d),
    "is_armstrong": lambda n: n == sum(d ** len(str(n)) for d in _digits(n)),
    "is_harshad": lambda n: n % sum(_digits(n)) == 0,
    "sort_digits": lambda n: int("".join(sorted(str(n), reverse=True))),
    "with_thousands": lambda n: f"{n:,}",
    "to_binary": lambda n: f"{n:b}",
    "to_hexadecimal": lambda n: f"{n:X}",
    "from_binary": lambda s: int(s, 2),
    "count_ones": int.bit_count,
    "longest_run_of_ones": lambda s: max(map(len, s.split("0"))),
    "to_base": lambda n, k: _in_base(n, k + 1),
    "to_roman": _roman,
    "collatz_steps": _collatz,
    "is_perfect_square": lambda n: math.isqrt(n) ** 2 == n,
    "integer_square_root": math.isqrt,
    "is_power_of_two": lambda n: n & (n - 1) == 0,
    "round_to_multiple": lambda n, k: n - n % k,
    "clamp": min,
    "multiplication_table": lambda k: [[i * j for j in range(1, k + 1)] for i in range(1, k + 1)],
    "fizz_buzz": lambda n: [
        "Fizz" * (k % 3 == 0) + "Buzz" * (k % 5 == 0) or str(k) for k in range(1, n + 1)
    ],
    "pascal_row": lambda k: [math.comb(k, i) for i in range(k + 1)],
    "binomial": math.comb,
    "celsius_to_fahrenheit": lambda x: round(x * 9 / 5 + 32, 1),
    "miles_to_kilometres": lambda x: round(x * 1.609, 2),
    "circle_area": lambda x: round(math.pi * x * x, 2),
    "sphere_volume": lambda x: round(4 / 3 * math.pi * x**3, 2),
    "add_tax": lambda x, k: round(x * (1 + k / 100), 2),
    "compound_interest": lambda n, k: round(n * (1 + k / 100) ** 10, 2),
    "seconds_to_clock": lambda n: f"{n // 3600}:{n // 60 % 60:02}:{n % 60:02}",
    "count_coins": lambda n: n // 25 + n % 25 // 10 + n % 25 % 10 // 5 + n % 5,
    "ordinal": lambda n: (
        f"{n}" + ("th" if n % 100 // 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th"))
    ),
    "even_numbers_below": lambda n: [*range(0, n, 2)],
    "countdown": lambda k: [*range(k, -1, -1)],
    "invert_dictionary": lambda d: {v: k for k, v in d.items()},
    "merge_counts": lambda a, b: {
        k: a.get(k, 0) + b.get(k, 0) for k in [*a, *(k for k in b if k not in a)]
    },
    "updated": lambda a, b: {**a, **b},
    "common_keys": lambda a, b: sorted({*a} & {*b}),
    "key_of_maximum": lambda d: max(d, key=d.get),
    "sort_by_value": lambda d: sorted(d.items(), key=lambda kv: -kv[1]),
    "filter_by_value": lambda d, n: {k: v for k, v in d.items() if v > n},
    "total_value": lambda d: sum(d.values()),
    "average_value": lambda d: round(sum(d.values()) / len(d), 2),
    "shares": lambda d: {k: round(100 * v / sum(d.values()), 1) for k, v in d.items()},
    "keys_by_length": lambda d: sorted(d, key=lambda k: (len(k), k)),
    "as_lines": lambda d: "\n".join(f"{k}: {v}" for k, v in sorted(d.items())),
    "transpose": lambda m: [list(row) for row in zip(*m, strict=True)],
    "trace": lambda m: sum(m[i][i] for i in range(len(m))),
    "row_sums": lambda m: [*map(sum, m)],
    "column_maxima": lambda m: [*map(max, zip(*m, strict=True))],
    "rotate_matrix": lambda m: [list(row) for row in zip(*m[::-1], strict=True)],
    "is_symmetric": lambda m: all(m[i][j] == m[j][i] for i in range(len(m)) for j in range(i)),
    "spiral": lambda m: _spiral(m),
    "anti_diagonal": lambda m: [m[i][-1 - i] for i in range(len(m))],
    "count_zeros": lambda m: sum(row.count(0) for row in m),
    "scale_matrix": lambda m, k: [[k * x for x in row] for row in m],
    "merge_intervals": _merged,
    "covered_length": lambda v: sum(b - a for a, b in _merged(v)),
    "any_overlap": lambda v: any(b > c for (_, b), (c, _) in pairwise(sorted(v))),
    "longest_interval": lambda v: max(v, key=lambda p: p[1] - p[0]),
    "sort_by_end": lambda v: sorted(v, key=lambda p: p[1]),
    "is_leap_year": lambda s: (
        int(s[:4]) % 4 == 0 and (int(s[:4]) % 100 != 0 or int(s[:4]) % 400 == 0)
    ),
    "weekday": lambda s: f"{date.fromisoformat(s):%A}",
    "day_of_year": lambda s: date.fromisoformat(s).timetuple().tm_yday,
    "quarter": lambda s: (int(s[5:7]) + 2) // 3,
    "us_date": lambda s: f"{s[5:7]}/{s[8:]}/{s[:4]}",
    "is_weekend": lambda s: date.fromisoformat(s).weekday() > 4,
    "days_left_in_year": lambda s: (date(int(s[:4]), 12, 31) - date.fromisoformat(s)).days,
    "minutes_since_midnight": _minutes,
    "add_minutes": lambda s, n: f"{(_minutes(s) + n) // 60 % 24:02}:{(_minutes(s) + n) % 60:02}",
    "to_twelve_hours": lambda s: (
        f"{(int(s[:2]) - 1) % 12 + 1}:{s[3:]} {'AM' if int(s[:2]) < 12 else 'PM'}"
    ),
    "clock_angle": lambda s: min(a := abs((_minutes(s) * 0.5 - int(s[3:]) * 6) % 360), 360 - a),
    "validate_checksum": lambda s: (
        sum(sum(_digits(2 * int(c))) if i % 2 else int(c) for i, c in enumerate(reversed(s))) % 10
        == 0
    ),
    "digit_histogram": lambda s: dict(Counter(s)),
    "binary_or": lambda a, b: f"{int(a, 2) | int(b, 2):0{max(len(a), len(b))}b}",
    "flip_bits": lambda s: s.translate(str.maketrans("01", "10")),
    "zip_to_dictionary": lambda a, b: dict(zip(a, b, strict=False)),
    "repeat_each": lambda v, k: [w for w in v for _ in range(k)],
    "polynomial_value": lambda v, k: sum(c * k**i for i, c in enumerate(v)),
}
