"""School maths word problems: stories in which the numbers make sense."""

from __future__ import annotations

import ast
import operator
import random
from functools import cache

from specdata.natural.writing import Writer, read_phrases, with_articles

_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_PRONOUNS = {
    "name_his": {"he": "he", "He": "He", "his": "his", "His": "His", "him": "him"},
    "name_her": {"he": "she", "He": "She", "his": "her", "His": "Her", "him": "her"},
}


def write(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt, and the story with its numbers, which decides the split."""
    phrases = read_phrases("maths.txt")
    writer = Writer(phrases, rng)
    numbers, _, story = rng.choice(phrases.sections["problem"]).partition(" :: ")
    values: dict[str, int] = {}
    for declaration in numbers.split():
        name, _, value = declaration.partition("=")
        values[name] = _number(value, values, rng)
    whose = rng.choice(sorted(_PRONOUNS))
    friends = rng.choice(sorted(_PRONOUNS))
    writer.bound |= _PRONOUNS[whose] | {name: f"{value:,}" for name, value in values.items()}
    name = writer.draw(whose)
    friend = next(drawn for drawn in iter(lambda: writer.draw(friends), "") if drawn != name)
    writer.bound |= {"NAME": name, "FRIEND": friend}
    writer.bound["PROBLEM"] = with_articles(writer.write(story))
    return writer.write("{prompt}"), [" ".join([story, *map(str, values.values())])]


def _number(value: str, values: dict[str, int], rng: random.Random) -> int:
    """A number of a range (`2..9`, `10..90:5`), of a choice (`10,20,25`), or computed (`a*b+2`)."""
    if ".." in value:
        bounds, _, step = value.partition(":")
        low, high = map(int, bounds.split(".."))
        return rng.randrange(low, high + 1, int(step or 1))
    if "," in value:
        return int(rng.choice(value.split(",")))
    return _computed(_parsed(value), values)


@cache
def _parsed(value: str) -> ast.expr:
    return ast.parse(value, mode="eval").body


def _computed(node: ast.expr, values: dict[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        sign = _SIGNS[type(node.op)]
        return int(sign(_computed(node.left, values), _computed(node.right, values)))
    raise ValueError(f"numbers may be added, subtracted and multiplied, got {ast.unparse(node)}")
