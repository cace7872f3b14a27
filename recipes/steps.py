"""What can be done next: commands of recipes, called as this one was, and lines of Python."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.config import PipelineConfig
from recipes.layout import folder

HUB_ID = "OWNER/NAME"
"""Stands for the Hub id that only the user knows."""
LAUNCHED = "DRAFTSMITH_LAUNCH"
"""Environment variable: the words before a recipe's name under `draftsmith launch`."""
ALONE = ("publish",)
"""Recipes that one process does."""


class Step(NamedTuple):
    """One thing that can be done next: a word for it, and a file, a command or a line of Python."""

    purpose: str
    line: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The call of this recipe, so that the next one can be called alike.

    Attributes:
        arguments: of the recipe.
        program: "draftsmith RECIPE", or None for a script or a launched recipe.
    """

    arguments: Sequence[str]
    program: str | None

    def recipe(self, name: str, *more: str) -> str:
        """The command of another recipe ("train-head") with the same configuration."""
        launched = shlex.split(os.environ.get(LAUNCHED, ""))
        if self.program is not None or launched:
            start = [*(launched if launched and name not in ALONE else ["draftsmith"]), name]
        else:
            start = [_python(), str(Path(sys.argv[0]).with_name(f"{name.replace('-', '_')}.py"))]
        return shlex.join([*start, *self.arguments, *more])

    def inspect(self, dataset: Path) -> str:
        """The command that shows a stored dataset."""
        is_command = self.program is not None or LAUNCHED in os.environ
        tool = "draftsmith inspect" if is_command else f"{_python()} -m recipes.command inspect"
        return f"{tool} {shlex.quote(str(dataset))}"


def _python() -> str:
    """The interpreter that runs this, so that the line works where no environment is activated."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def steps_to_draft(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """The steps after rollouts: train or measure; a draft learns from logits if there are some."""
    if config.draft is None:
        return [steps_to_head(config, line)]
    drawn = config.draft.on_policy.share > 0  # whose logits no dataset keeps
    has_logits = config.logits is not None and config.draft.cache is None and not drawn
    cache = ["--draft.cache", str(folder(config, "logits"))] if has_logits else []
    return [Step("distil", line.recipe("train-draft", *cache))]


def steps_to_head(config: PipelineConfig, line: CommandLine) -> Step:
    """The steps once there is a draft: a head, or a measurement."""
    if config.head:
        return Step("train", line.recipe("train-head"))
    return Step("measure", line.recipe("run-eval"))


def load_draft(source: str | Path) -> Step:
    """A line of Python that loads a draft."""
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(source), ensure_ascii=False)})"
    return Step("load", f"from transformers import AutoModelForCausalLM; draft = {load}")


def load_head(source: str | Path) -> Step:
    """A line of Python that loads a head."""
    load = f"AcceptanceHead.from_pretrained({json.dumps(str(source), ensure_ascii=False)})"
    return Step("load", f"from heads import AcceptanceHead; head = {load}")
