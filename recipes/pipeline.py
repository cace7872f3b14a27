"""All stages in order; each that is finished is skipped, so a killed run continues where it was.

python recipes/pipeline.py --config FILE.yaml [--method NAME ...]
draftsmith pipeline --config FILE.yaml [--method NAME ...]
"""

from __future__ import annotations

import sys

from recipes.publish import Release
from recipes.recipe import Recipe
from recipes.run import Stage
from recipes.run_eval import BEFORE, Eval

STAGES: tuple[type[Stage], ...] = (*BEFORE, Eval, Release)

RECIPE = Recipe("Rollouts, draft, head, evaluation, report.", STAGES)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
