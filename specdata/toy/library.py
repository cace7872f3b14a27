"""Real text that ships with every CPython: functions of the standard library, up to their body.

A prompt is the signature and the documentation of one function or method, to be completed with its
code. The set depends on the installed Python's version alone (a distribution that leaves modules
out has fewer). No module that the embedded pair is trained on is used.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specdata.toy.corpus import SPLITS, TRAINING_MODULES, split_of

LIBRARY = "library"
_SHORTEST, _LONGEST = 60, 1500  # characters of documentation, and of a prompt


def library_prompts(split: str, count: int, *, seed: int) -> list[str]:
    """Prompts of one split (80 % train, 10 % dev, 10 % test by a hash of the text), seeded order.

    Args:
        split: train, dev or test.
        count: how many; 0 for all.
        seed: decides the order.

    Raises:
        ValueError: for an unknown split, or if there are fewer.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    texts = [text for text in _functions() if split_of(text) == split]
    random.Random(f"{LIBRARY}:{split}:{seed}").shuffle(texts)
    if len(texts) < count:
        raise ValueError(
            f"the {split} split of {LIBRARY!r} has {len(texts)} prompts in this Python, {count} "
            "were asked for: lower `count`"
        )
    return texts[: count or None]


@cache
def _functions() -> tuple[str, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    packages = ("", "asyncio", "concurrent/futures", "email", "http", "importlib", "urllib")
    files = sorted(path for name in packages for path in (folder / name).glob("*.py"))
    chosen = [path for path in files if path.relative_to(folder).as_posix() not in TRAINING_MODULES]
    return tuple(dict.fromkeys(text for path in chosen for text in _of_module(path)))


def _of_module(path: Path) -> Iterator[str]:
    source = path.read_text("utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file that is there to be broken
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if len(ast.get_docstring(node) or "") >= _SHORTEST and len(node.body) > 1:
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            if len(text) <= _LONGEST:
                yield text
