"""Requests for Python functions, with examples that were computed by running one."""

from __future__ import annotations

import random

from specdata.natural.functions import TASKS, Task
from specdata.natural.inputs import KINDS, Kind
from specdata.natural.writing import Writer, read_phrases, with_articles


def write(rng: random.Random) -> tuple[str, list[str]]:
    """A prompt, and the name of the function it asks for, which decides the split."""
    writer = Writer(read_phrases("code.txt"), rng)
    task = rng.choice(TASKS)
    kinds = [KINDS[kind] for kind in task.takes]
    names = _names(kinds, rng)
    what = task.what.format(*names)
    writer.bound |= {
        "NAME": task.name,
        "WHAT": with_articles(what),
        "TAKES": _takes(kinds, names),
        "CALL": f"{task.name}({', '.join(names)})",
    }
    writer.bound["STUB"] = _stub(task, kinds, names, writer)
    arguments, result = _example(task, kinds, rng)
    writer.bound["EXAMPLE"] = f"{task.name}({arguments})"
    writer.bound["RESULT"] = result
    return writer.write("{prompt}"), [task.name]


def _names(kinds: list[Kind], rng: random.Random) -> list[str]:
    """A name of each argument, all different."""
    names: list[str] = []
    for kind in kinds:
        names.append(rng.choice([name for name in kind.names if name not in names]))
    return names


def _takes(kinds: list[Kind], names: list[str]) -> str:
    """The arguments in words: "a string `text` and an integer `k`"."""
    each = [f"{kind.words} `{name}`" for kind, name in zip(kinds, names, strict=True)]
    return with_articles(" and ".join([", ".join(each[:-1]), each[-1]] if each[1:] else each))


def _stub(task: Task, kinds: list[Kind], names: list[str], writer: Writer) -> str:
    """A signature and documentation, with some examples or none."""
    rng = writer.rng
    typed = rng.random() < 0.6
    parameters = [
        f"{name}: {kind.hint}" if typed else name for kind, name in zip(kinds, names, strict=True)
    ]
    head = f"def {task.name}({', '.join(parameters)}){f' -> {task.gives}' if typed else ''}:"
    lines = [writer.write("{summary}")]
    form = writer.draw("example")
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        arguments, result = _example(task, kinds, rng)
        call = f"{task.name}({arguments})"
        shown = form.replace("CALL", call).replace("RESULT", result).split("\n")
        if shown[0] not in lines:
            lines += shown
    quotes = rng.choice(('"""', '"""', "'''"))
    if len(lines) == 1:
        return f"{head}\n    {quotes}{lines[0]}{quotes}\n"
    blank = rng.choice(("\n", ""))
    body = "\n    ".join([lines[0] + blank, *lines[1:]])
    return f"{head}\n    {quotes}{body}\n    {quotes}\n".replace("\n    \n", "\n\n")


def _example(task: Task, kinds: list[Kind], rng: random.Random) -> tuple[str, str]:
    """Arguments and the result of a call, as Python writes them."""
    arguments = [kind.draw(rng) for kind in kinds]
    shown = ", ".join(map(repr, arguments))
    return shown, repr(task.run(*arguments))
