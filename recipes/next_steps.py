"""What to do with what a recipe made: lines to copy, with this run's paths in them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.config import PipelineConfig
from recipes.layout import eval_folder, folder
from recipes.sizes import described

HUB_ID = "OWNER/NAME"
"""Stands for the Hub id that only the user knows."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that can be done next.

    Attributes:
        purpose: a word for it.
        line: a file to open, a line of Python, or a command.
    """

    purpose: str
    line: str


TP_PLAN = "--models.load.target.tp_plan"
LAUNCHED = "DRAFTSMITH_LAUNCH"
"""Environment variable: the words before a recipe's name under `draftsmith launch`."""
ALONE = ("publish",)
"""Recipes that one process does."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How this recipe was called, so that the next one can be called alike.

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
        return shlex.join([*start, *_placeless(self.arguments), *more])

    def inspect(self, dataset: Path) -> str:
        """The command that shows a stored dataset."""
        is_command = self.program is not None or LAUNCHED in os.environ
        tool = "draftsmith inspect" if is_command else f"{_python()} -m specdata.inspect"
        return f"{tool} {shlex.quote(str(dataset))}"


def _placeless(arguments: Sequence[str]) -> list[str]:
    """Arguments without tp_plan, which the next recipe may refuse, or one process."""
    kept, words = [], iter(arguments)
    for word in words:
        if word.startswith(TP_PLAN):
            if "=" not in word:
                next(words, None)
        else:
            kept.append(word)
    return kept


def _python() -> str:
    """The interpreter that runs this, so that the line works where no environment is activated."""
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def after_rollouts(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Look at the completions, then train or measure."""
    step = Step("look", line.inspect(folder(config, "rollouts")))
    if config.logits:
        return [step, Step("keep", line.recipe("make-logits"))]
    return [step, *after_logits(config, line)]


def after_logits(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Train or measure; a draft learns from the logits that were kept."""
    if config.draft is None:
        return [_then(config, line)]
    drawn = config.draft.on_policy.share > 0  # whose logits no dataset keeps
    is_kept = config.logits is not None and config.draft.cache is None and not drawn
    cache = ["--draft.cache", str(folder(config, "logits"))] if is_kept else []
    return [Step("distil", line.recipe("train-draft", *cache))]


def after_draft(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Use the draft as it is, or go on."""
    draft = folder(config, "draft") / "model"
    if described(str(draft)).get("draft_vocab_size") is None:
        return [_load_draft(draft), _then(config, line)]
    load = f"load_model({json.dumps(str(draft), ensure_ascii=False)})"
    step = Step("load", f"from specdata.models import load_model; draft = {load}")
    return [step, _then(config, line)]


def after_head(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Use the head as it is, or measure it."""
    load = _load_head(folder(config, "head") / "model")
    return [load, Step("measure", line.recipe("run-eval"))]


def after_eval(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Read the report; assemble what was trained, if anything was."""
    publish = [Step("publish", line.recipe("publish"))] if config.draft or config.head else []
    return [_report(config), *publish]


def after_release(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Load, serve and upload what was assembled."""
    steps, unnamed = [], []
    if config.draft:
        draft = config.publish.draft_id or str(folder(config, "release") / "draft")
        unnamed += [] if config.publish.draft_id else ["--publish.draft_id", HUB_ID]
        steps += [_load_draft(draft), *_serve(config, draft)]
    if config.head:
        steps.append(_load_head(config.publish.head_id or folder(config, "release") / "head"))
        unnamed += [] if config.publish.head_id else ["--publish.head_id", HUB_ID]
    if unnamed:
        steps.append(Step("upload", line.recipe("publish", *unnamed)))
    return steps


def after_pipeline(config: PipelineConfig, line: CommandLine) -> list[Step]:
    """Everything that can be done with a whole run."""
    return [_report(config), *after_release(config, line)]


def _then(config: PipelineConfig, line: CommandLine) -> Step:
    """What follows once there is a draft to use."""
    if config.head:
        return Step("train", line.recipe("train-head"))
    return Step("measure", line.recipe("run-eval"))


def _report(config: PipelineConfig) -> Step:
    return Step("look", str(eval_folder(config) / "report.html"))


def _load_draft(source: str | Path) -> Step:
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(source), ensure_ascii=False)})"
    return Step("load", f"from transformers import AutoModelForCausalLM; draft = {load}")


def _load_head(source: str | Path) -> Step:
    load = f"AcceptanceHead.from_pretrained({json.dumps(str(source), ensure_ascii=False)})"
    return Step("load", f"from heads import AcceptanceHead; head = {load}")


def _serve(config: PipelineConfig, draft: str) -> list[Step]:
    """Serve with vLLM at its own draft length, which no evaluation here measures.

    Nothing if the models' output sizes are known and differ, because vLLM refuses such a pair.
    """
    from eval.reporting.serving import vllm_line

    target = config.models.target
    sizes = {
        described(model).get("vocab_size")
        for model in (target, str(folder(config, "release") / "draft"))
    }
    if len(sizes - {None}) > 1:
        return []
    return [Step("serve", vllm_line(draft, target))]
