"""What makes a report again, as a block to copy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from eval.measuring.environment import Environment

PINNED = ("torch", "transformers", "numpy", "accelerate", "huggingface_hub", "safetensors")
"""Packages whose versions are pinned, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Commands:
    """Lines for a shell, and what they rest on.

    Args:
        lines: from the checkout of the code on.
        basis: where the lines are from, and what they cannot bring back.
        configuration: the resolved configuration as YAML.
    """

    lines: tuple[str, ...]
    basis: str
    configuration: str


def commands(arguments: Sequence[str], where: Environment, configuration: str) -> Commands:
    """The commands of an evaluation.

    Args:
        arguments: the command line that ran it, its program first.
        where: what it was measured with.
        configuration: the resolved configuration as YAML.
    """
    lines = []
    if where.git_commit is not None:
        lines.append(f"git checkout {where.git_commit}")
    versions = [f"{name}=={version}" for name, version in _pinned(where.software).items()]
    lines.append("make .venv/installed")
    if versions:
        lines.append(f".venv/bin/pip install {shlex.join(versions)}")
    lines.append(_line(arguments))
    python = where.software.get("python")
    text = f"Measured with Python {python}. " if python else ""
    text += (
        "Counts are the same again on the same kind of machine with these versions; times are as"
        " the machine is. A model that is not made by these commands has to be there."
    )
    if where.git_commit is None:
        text = "The commit is not known: the code was an installed copy. " + text
    elif where.git_dirty:
        text = "There were changes that were not committed, which these lines leave out. " + text
    return Commands(tuple(lines), text, configuration)


def _pinned(software: Mapping[str, str]) -> dict[str, str]:
    """Package -> its version without the local part: "+cpu" is not on every index."""
    return {name: software[name].split("+")[0] for name in PINNED if name in software}


def _line(arguments: Sequence[str]) -> str:
    """The command in an environment of the checkout, wherever its program was."""
    program, *given = arguments
    path = PurePath(program)
    if path.suffix == ".py":
        # Recipes lie in one folder; where the checkout was is nobody's business.
        where = PurePath(*path.parts[-2:]) if path.parent.name else path
        return shlex.join([".venv/bin/python", str(where), *given])
    return shlex.join([f".venv/bin/{path.name}", *given])
