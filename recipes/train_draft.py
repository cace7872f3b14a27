"""Stage 2: distil the draft on the target's rollouts.

python recipes/train_draft.py --config FILE.yaml
draftsmith train-draft --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from recipes.checks import check_draft_sets
from recipes.config import PipelineConfig
from recipes.layout import draft_stage, folder
from recipes.next_steps import after_draft
from recipes.recipe import Recipe
from recipes.run import Stage, made_as_asked, need, run_stage, say
from specdata.errors import ConfigError


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does. Raises ConfigError without a draft section."""
    if config.draft is None:
        raise ConfigError("this configuration has no draft section, so there is no draft to train")
    return [draft_stage(config)]


def main(config: PipelineConfig) -> dict[str, Any]:
    """Distil, and print the acceptance before and after."""
    (stage,) = stages(config)
    if not made_as_asked(stage):
        check_draft_sets(config)
    need(folder(config, "rollouts"), "make_rollouts.py")
    result = run_stage(stage, config, lambda: _distil(config, stage))
    say(
        f"  acceptance on held-out rollouts: {result['acceptance_before']:.3f} before, "
        f"{result['acceptance_after']:.3f} after distillation"
    )
    return result


def _distil(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from distill.offline import distil
    from specdata.prompts.reading import short_name
    from specdata.storage.dataset import load_stored, of_split

    assert config.draft is not None
    source, wanted = folder(config, "rollouts"), config.draft.sets
    rollouts = load_stored(source)
    sets = None if wanted is None else [short_name(name) for name in wanted]
    result = distil(
        target=config.models.target,
        draft=config.models.draft,
        train=of_split(rollouts, "train", source, sets=sets),
        dev=of_split(rollouts, "dev", source, sets=sets),
        out=stage.folder / "model",
        config=config.draft,
        sampling=config.sampling,
        seed=config.seed,
        teacher_dtype=config.models.dtype,
    )
    return asdict(result)


RECIPE = Recipe(
    main,
    stages,
    "Distil the draft on the target's rollouts.",
    ("draft",),
    after_draft,
    check_draft_sets,
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
