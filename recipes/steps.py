"""What can be done next: commands of recipes, called as this one was, and lines for others."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.config import PipelineConfig

HUB_ID = "OWNER/NAME"
"""Stands for the Hub id that only the user knows."""
LAUNCHED = "DRAFTSMITH_LAUNCH"
"""Environment variable: the words before a recipe's name under `draftsmith launch`."""


class Step(NamedTuple):
    """One thing that can be done next: a word for it, and a file or a command."""

    purpose: str
    line: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The call of this recipe, so that the next one can be called alike.

    Attributes:
        program: "draftsmith RECIPE", or None for a script or a launched recipe.
    """

    arguments: Sequence[str]
    program: str | None

    def command(self, name: str, *arguments: str) -> str:
        """The command line of a recipe or tool ("train-head")."""
        launched = shlex.split(os.environ.get(LAUNCHED, ""))
        if launched and name != "publish":
            start = launched
        elif launched or self.program is not None:
            start = ["draftsmith"]
        else:  # where no environment is activated
            python, here = Path(sys.executable), Path.cwd()
            python = python.relative_to(here) if python.is_relative_to(here) else python
            start = [str(python), "-m", "recipes.command"]
        return shlex.join([*start, name, *arguments])

    def recipe(self, name: str, *more: str) -> str:
        """The command line of another recipe with the same configuration."""
        return self.command(name, *self.arguments, *more)


def next_recipe(config: PipelineConfig, recipe: str, line: CommandLine) -> list[Step]:
    """The first recipe after this one ("train_head") that the configuration asks for, if any."""
    draft, is_later = config.draft, False
    # Texts that are drawn in training have logits in no dataset.
    is_stored = config.logits and draft and draft.logits is None and draft.on_policy == 0
    logits = ["--draft.logits", str(config.folder("logits"))] if is_stored else []
    for name, purpose, is_asked, more in (
        ("make-rollouts", "complete", True, []),
        ("make-logits", "keep", config.logits, []),
        ("train-draft", "distil", draft, logits),
        ("train-head", "train", config.head, []),
        ("run-eval", "measure", True, []),
        ("publish", "publish", draft or config.head, []),
    ):
        if is_later and is_asked:
            return [Step(purpose, line.recipe(name, *more))]
        is_later |= name == recipe.replace("_", "-")
    return []
