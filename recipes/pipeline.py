"""All stages in order; each that is finished is skipped, so a killed run continues where it was.

python recipes/pipeline.py --config FILE.yaml [--method NAME ...]
draftsmith pipeline --config FILE.yaml [--method NAME ...]
"""

from __future__ import annotations

import sys
import time

from recipes import make_logits, make_rollouts, publish, run_eval, train_draft, train_head
from recipes.checks import (
    check_draft_cache,
    check_evaluation,
    check_hub,
    check_labels,
    check_logits,
    check_rollouts,
    check_training_splits,
    check_weights,
)
from recipes.config import PipelineConfig
from recipes.layout import all_stages
from recipes.next_steps import after_pipeline
from recipes.recipe import Recipe
from recipes.run import Stage, made_as_asked, say
from specdata.processes import refuse_fsdp


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does."""
    return all_stages(config)


def main(config: PipelineConfig) -> None:
    """Run every stage that the configuration has a section for."""
    was_made = all(made_as_asked(stage) for stage in stages(config))
    if not was_made:
        check(config)
        check_weights(config)
        check_hub(config)
    begun = time.perf_counter()
    if config.toy or config.draft or config.head:
        make_rollouts.main(config)
    if config.logits:
        make_logits.main(config)
    if config.draft:
        train_draft.main(config)
    if config.head:
        train_head.main(config)
    run_eval.main(config)
    publish.main(config)
    if was_made:
        say(f"pipeline: everything was already made, in {config.output}")
    else:
        say(f"pipeline: {time.perf_counter() - begun:.0f} s in all")


def check(config: PipelineConfig) -> None:
    """Find before the first stage what would stop a later one. Raises ConfigError."""
    check_evaluation(config)
    publish.check(config)
    if config.head:
        refuse_fsdp("training a head")
    if config.toy or config.draft or config.head:
        check_rollouts(config)
        check_training_splits(config)
    if config.logits:
        check_logits(config)
    check_draft_cache(config)
    if config.head:
        check_labels(config)


RECIPE = Recipe(
    main,
    stages,
    "Rollouts, draft, head, evaluation, report.",
    ("toy", "rollouts", "logits", "draft", "labels", "head", "eval", "publish"),
    after_pipeline,
    check,
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
