"""Every stage of a run, in order: what a stage makes is read by later ones only."""

from __future__ import annotations

from recipes.make_logits import Logits
from recipes.make_rollouts import Pair, Rollouts
from recipes.publish import Release
from recipes.run import Stage
from recipes.run_eval import Eval
from recipes.train_draft import Draft, Finetuned, Initial
from recipes.train_head import Head, Labels

STAGES: tuple[type[Stage], ...] = (
    Pair,
    Rollouts,
    Logits,
    Initial,
    Finetuned,
    Draft,
    Labels,
    Head,
    Eval,
    Release,
)
