"""School maths word problems: stories in which the numbers make sense."""

from __future__ import annotations

import ast
import operator
import random
from functools import cache

from specdata.natural.splits import split_of
from specdata.natural.writing import Phrases, Writer, read_phrases, with_articles

_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_PRONOUNS = {
    "name_his": {"he": "he", "He": "He", "his": "his", "His": "His", "him": "him"},
    "name_her": {"he": "she", "He": "She", "his": "her", "His": "Her", "him": "her"},
}


def write(rng: random.Random, split: str) -> str:
    """A prompt; its story and numbers belong to the split, whoever it is told of."""
    phrases = read_phrases("maths.txt")
    story, values = _problem(phrases, rng)
    while split_of(f"{story} {values}") != split:
        story, values = _problem(phrases, rng)
    writer = Writer(phrases, rng, split)
    whose = rng.choice(sorted(_PRONOUNS))
    friends = rng.choice(sorted(_PRONOUNS))
    writer.bound |= _PRONOUNS[whose] | {name: f"{value:,}" for name, value in values.items()}
    name = writer.draw(whose)
    friend = next(drawn for drawn in iter(lambda: writer.draw(friends), "") if drawn != name)
    writer.bound |= {"NAME": name, "FRIEND": friend}
    writer.bound["PROBLEM"] = with_articles(writer.write(story))
    return writer.write("{prompt}").strip()


def _problem(phrases: Phrases, rng: random.Random) -> tuple[str, dict[str, int]]:
    numbers, _, story = rng.choice(phrases.sections["problem"]).partition(" :: ")
    values: dict[str, int] = {}
    for declaration in numbers.split():
        name, _, value = declaration.partition("=")
        values[name] = draw_number(value, values, rng)
    return story, values


def draw_number(value: str, values: dict[str, int], rng: random.Random) -> int:
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
