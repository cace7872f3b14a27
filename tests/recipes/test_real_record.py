"""What docs/real says was measured is what today's configurations make and measure."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.table import RECIPE, STAGES
from eval.measuring.results import columns, read_results
from recipes.config import parse

ROOT = Path(__file__).parents[2]
GEMMA = "docs/real/gemma-3-270m"
MEASURED = {
    "smollm2-135m": "docs/real",
    "smollm2-135m-t1": "docs/real/temperature-1",
    "gemma-3-270m": GEMMA,
    "gemma-3-270m-t1": f"{GEMMA}/temperature-1",
}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


CAME_SINCE = {"engine": "vllm", "start_share": 0.0}
"""Options with the value at which all is as before."""


def of_today(kept: Any, settings: Any) -> Any:
    """What was kept, without the options that have left since, and with those that have come."""
    if not isinstance(kept, dict) or not isinstance(settings, dict):
        return kept
    came = {key: CAME_SINCE[key] for key in settings.keys() & CAME_SINCE.keys() - kept.keys()}
    return {key: of_today(kept[key], settings[key]) for key in kept if key in settings} | came


def test_the_plain_draft_learns_from_the_rollouts_that_it_is_given() -> None:
    """Which `make real-more` copies: other settings would be refused."""
    configs = [
        parse(["--config", f"{ROOT}/recipes/configs/{name}.yaml"], "").config
        for name in ("smollm2-135m", "smollm2-135m-plain")
    ]
    ours, plain = ((each.models, each.sampling, each.rollouts, each.seed) for each in configs)
    assert ours == plain


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_is_what_the_configuration_says(name: str) -> None:
    folder, path = ROOT / MEASURED[name], f"{ROOT}/recipes/configs/{name}.yaml"
    config = parse(["--config", path], "").config
    settings, results = config.model_dump(mode="json"), read_results(folder / "results.json")
    runs, found = results.runs, []

    stages = STAGES if config.head else ("rollouts", "draft")
    kept = read(folder / RECIPE) if (folder / RECIPE).exists() else None
    if of_today(kept, settings) != {stage: settings[stage] for stage in stages}:
        found.append(RECIPE)
    if (folder / "history.json").exists():  # passes, which the optimizer's steps tell
        assert config.draft is not None
        sets = config.rollouts.sets
        learnt = sum(each.count for each in sets if each.split == "train")
        learnt *= 1 - config.draft.held_out_share
        steps = read(folder / "history.json")["after"]["step"]
        if round(steps * config.draft.batch_size / learnt) != config.draft.epochs:
            found.append("passes")
    if {run.draft for run in runs} != {None, f"{config.output}/draft/model"}:
        found.append("draft")
    if {run.head for run in runs} != {None, f"{config.output}/head/model" if config.head else None}:
        found.append("head")
    prompts = {run.dataset: run.prompts for run in runs}
    if prompts != {each.name: each.count for each in config.eval.sets}:
        found.append("prompts")
    sampling = {**settings["sampling"], "max_new_tokens": config.eval.max_new_tokens, "seed": 0}
    if any({"min_p": 0.0, **run.sampling} != sampling for run in runs):
        found.append("sampling")
    measured = {run.name: run.method for run in runs}
    asked = {method.name: method for method in config.eval.methods}
    for each in {**measured, **asked}:
        rows = [columns(of[each]) for of in (measured, asked) if each in of]
        for row in rows:
            row["parameters"].pop("calibration", None)  # of the cost rule, fitted on rollouts
        if len(rows) < 2 or rows[0] != rows[1]:
            found.append(f"method {each}")
    assert not found
