"""Requests for Python functions, with examples that were computed by running one."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specdata.natural.composed import COMPOSED
from specdata.natural.functions import RUN
from specdata.natural.inputs import KINDS, Kind
from specdata.natural.splits import SPLITS, dealt
from specdata.natural.writing import Writer, read_phrases, with_articles

# So many of a hundred prompts ask for a function that was composed of two parts.
_COMPOSED_PERCENT = 30


@dataclass(frozen=True, slots=True)
class Task:
    """A function to ask for.

    Args:
        name: its name.
        kinds: what it takes.
        gives: its type of result.
        what: the result in words, with {0} and {1} for the names of the arguments.
        run: computes it.
    """

    name: str
    kinds: Sequence[Kind]
    gives: str
    what: str
    run: Callable[..., Any]


def write(rng: random.Random, split: str) -> str:
    """A prompt; the function that it asks for belongs to the split."""
    writer = Writer(read_phrases("code.txt"), rng, split)
    task = rng.choice(tasks(rng.random() * 100 < _COMPOSED_PERCENT)[split])
    names: list[str] = []
    for kind in task.kinds:
        names.append(rng.choice([name for name in kind.names if name not in names]))
    arguments = [f"{kind.words} `{name}`" for kind, name in zip(task.kinds, names, strict=True)]
    call, result = _example(task, rng)
    writer.bound |= {
        "NAME": task.name,
        "TAKES": with_articles(" and ".join(arguments)),
        "CALL": f"{task.name}({', '.join(names)})",
        "EXAMPLE": call,
        "RESULT": result,
        "SAID": _words(task, [f"`{name}`" for name in names], writer),
        "WHAT": _words(task, names, writer),
    }
    writer.bound["STUB"] = _stub(task, names, writer)
    return writer.write("{prompt}").strip()


@cache
def tasks(composed: bool) -> Mapping[str, Sequence[Task]]:
    """The functions of each split, either those written by hand or the composed ones."""
    if composed:
        every = {
            name: Task(name, [KINDS[kind] for kind in kinds], gives, what, run)
            for name, kinds, gives, what, run in COMPOSED
        }
    else:
        every = {}
        for line in read_phrases("code.txt").sections["task"]:
            name, kinds, gives, what = line.split(" :: ")
            every[name] = Task(
                name, [KINDS[kind] for kind in kinds.split(",")], gives, what, RUN[name]
            )
    return {split: [every[name] for name in dealt([*every], split)] for split in SPLITS}


def _words(task: Task, names: Sequence[str], writer: Writer) -> str:
    """What a function returns, in words."""
    writer.bound |= {str(place): name for place, name in enumerate(names)}
    return with_articles(writer.write(task.what))


def _stub(task: Task, names: Sequence[str], writer: Writer) -> str:
    """A signature and documentation, with some examples or none."""
    rng = writer.rng
    typed = rng.random() < 0.6
    parameters = [
        f"{name}: {kind.hint}" if typed else name
        for kind, name in zip(task.kinds, names, strict=True)
    ]
    head = f"def {task.name}({', '.join(parameters)}){f' -> {task.gives}' if typed else ''}:"
    summary = textwrap.fill(writer.write("{summary}"), 80, break_on_hyphens=False)
    form = writer.draw("example")
    examples: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        call, result = _example(task, rng)
        shown = form.replace("CALL", call).replace("RESULT", result)
        if shown not in examples:
            examples.append(shown)
    quotes = rng.choice(('"""', '"""', "'''"))
    if not examples and "\n" not in summary:
        return f"{head}\n    {quotes}{summary}{quotes}\n"
    lines = summary.split("\n")
    if examples:
        lines += [*rng.choice(([""], [])), *"\n".join(examples).split("\n")]
    lines.append(quotes)
    return f"{head}\n    {quotes}" + "\n    ".join(lines).replace("\n    \n", "\n\n") + "\n"


def _example(task: Task, rng: random.Random) -> tuple[str, str]:
    """A call and its result, as Python writes them."""
    arguments = [kind.draw(rng) for kind in task.kinds]
    result = repr(task.run(*arguments))
    return f"{task.name}({', '.join(map(repr, arguments))})", result
