"""All stages in order; each that is finished is skipped, so a killed run continues where it was.

python recipes/pipeline.py --config FILE.yaml [--method NAME ...]
draftsmith pipeline --config FILE.yaml [--method NAME ...]
"""

from __future__ import annotations

import sys

from recipes.initial_draft import Finetuned, Initial
from recipes.make_logits import Logits
from recipes.make_rollouts import Pair, Rollouts
from recipes.publish import Release
from recipes.recipe import Recipe
from recipes.run import Stage
from recipes.run_eval import Eval
from recipes.train_draft import Draft
from recipes.train_head import Head, Labels

TRAINING = (Pair, Rollouts, Logits, Initial, Finetuned, Draft, Labels, Head)
STAGES: tuple[type[Stage], ...] = (*TRAINING, Eval, Release)

RECIPE = Recipe("Rollouts, draft, head, evaluation, report.", STAGES)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
