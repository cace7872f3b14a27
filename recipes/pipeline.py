"""All stages in order; each that is finished is skipped, so a killed run continues where it was.

python recipes/pipeline.py --config FILE.yaml [--method NAME ...]
draftsmith pipeline --config FILE.yaml [--method NAME ...]
"""

from __future__ import annotations

import sys

from recipes.recipe import Recipe
from recipes.stages import STAGES

RECIPE = Recipe("Rollouts, draft, head, evaluation, report.", STAGES)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
