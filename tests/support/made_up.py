"""A stage that no recipe has, which does as a test tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.config import PipelineConfig, parse
from recipes.run import Stage


@dataclass(frozen=True)
class Work(Stage):
    """Do `work`, of a `source`, with a seed."""

    work: Callable[[], dict[str, Any]] = dict
    source: str = "hub/model"
    name, recipe, sections = "work", "work", ("seed",)

    def stored_settings(self) -> dict[str, Any]:
        return {"seed": self.config.seed, "drafts": [self.source]}

    @property
    def inputs(self) -> dict[str, str]:
        return {"model": self.source, f"path draft {self.source}": self.source}

    @property
    def size(self) -> str:
        return "little"

    def run(self) -> dict[str, Any]:
        return self.work()


def at(output: Path, seed: int = 0) -> PipelineConfig:
    """The demo's configuration, in another folder."""
    here = [f"--models.target={output}/pair/target", f"--models.draft={output}/pair/draft"]
    return parse(["--output", str(output), "--seed", str(seed), *here]).config
