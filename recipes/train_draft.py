"""Stage 2: make or take a draft, fine-tune it, and distil it on the target's rollouts.

python recipes/train_draft.py --config FILE.yaml
draftsmith train-draft --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.caches import cached_rows, made_of
from recipes.checks import check_draft, check_draft_cache
from recipes.config import PipelineConfig
from recipes.layout import draft_stages, draft_to_distil, folder, initial_draft
from recipes.next_steps import after_draft
from recipes.recipe import Recipe
from recipes.run import Stage, check_begun, made_as_asked, need, run_stage, say
from specdata.errors import ConfigError
from specdata.loading import Loading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Dataset


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does. Raises ConfigError without a draft section."""
    if config.draft is None:
        raise ConfigError("this configuration has no draft section, so there is no draft to train")
    return draft_stages(config)


def main(config: PipelineConfig) -> dict[str, Any]:
    """Make, fine-tune and distil, as asked; print the acceptance before and after."""
    planned = stages(config)
    check_begun(planned)
    if not all(map(made_as_asked, planned)):
        check(config)
    need(folder(config, "rollouts"), "make_rollouts.py")
    work = {"initial": _make_initial, "finetuned": _finetune, "draft": _distil}
    for stage in planned:
        result = run_stage(stage, config, partial(work[stage.name], config, stage))
    before, after = result["acceptance_before"], result["acceptance_after"]
    if result["steps"] == 0:
        say(f"  acceptance on held-out rollouts: {after:.3f}; not distilled (draft.epochs 0)")
        return result
    say(f"  acceptance on held-out rollouts: {before:.3f} before, {after:.3f} after distillation")
    if result["is_bound"]:
        say("  (upper bounds: all tokens whose logits draft.cache does not keep count as one)")
    if result["kept_step"] is not None:
        say(f"  kept: the weights after step {result['kept_step']} of {result['steps']}")
    return result


def check(config: PipelineConfig) -> None:
    """Refuse a draft that cannot be made or trained. Raises ConfigError."""
    check_draft(config)
    check_draft_cache(config)


def _make_initial(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from distill.initial import make_initial

    assert config.draft is not None
    load = config.models.load.target
    return make_initial(
        target=config.models.target,
        draft=config.models.draft if config.draft.init.kind == "model" else None,
        rollouts=_rollouts(config, "train"),
        out=stage.folder / "model",
        config=config.draft.init,
        seed=config.seed,
        states_dtype=config.models.dtype_of("target"),
        # Layers are taken in full precision; where the target does not fit, in memory.
        target_load=Loading(device_map="cpu" if load.is_spread or load.bits else None),
    )


def _finetune(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from distill.finetune import finetune

    assert config.draft is not None
    assert config.draft.finetune is not None
    tuning = config.draft.finetune
    result = finetune(
        target=config.models.target,
        draft=initial_draft(config),
        rollouts=None if tuning.conversations else _rollouts(config, "train"),
        out=stage.folder / "model",
        config=tuning,
        lora=config.draft.lora,
        seed=config.seed,
    )
    _say_finetuned(result)
    return result


def _say_finetuned(result: Mapping[str, Any]) -> None:
    """What the draft was trained on."""
    split = f", {result['split']:,} of them split" if result["split"] else ""
    say(
        f"  fine-tuned on {result['used']:,} {result['texts']}{split}, in {result['rows']:,} rows: "
        f"{result['assistant_tokens']:,} of {result['tokens']:,} tokens are the assistant's"
    )
    for left_out in result["left_out"]:
        say(f"  left out of {left_out}")
    say(
        f"  loss a token: {result['loss_first']:.3f} in the first steps, "
        f"{result['loss_last']:.3f} in the last of {result['steps']:,}"
    )


def _distil(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from distill.distillation import distil
    from specdata.labels.top_logits import KeptLogits
    from specdata.models import load_tokenizer, vocabulary_fingerprint

    assert config.draft is not None
    train, dev = (_rollouts(config, split) for split in ("train", "dev"))
    kept = None
    if cache := config.draft.cache:
        tokenizer = vocabulary_fingerprint(load_tokenizer(config.models.target))
        source = made_of(config, tokenizer)
        train, dev = (
            cached_rows(config, cache, "draft.cache", source, rows) for rows in (train, dev)
        )
        kept = KeptLogits.of(Path(cache))
    result = distil(
        target=config.models.target,
        draft=draft_to_distil(config),
        train=train,
        dev=dev,
        kept=kept,
        out=stage.folder / "model",
        config=config.draft,
        sampling=config.sampling,
        seed=config.seed,
        teacher_load=config.models.loading("target"),
    )
    return asdict(result)


def _rollouts(config: PipelineConfig, split: str) -> Dataset:
    """The rollouts of a split that the draft is trained or measured on."""
    from specdata.prompts.reading import short_name
    from specdata.storage.dataset import load_stored, of_split

    assert config.draft is not None
    source, wanted = folder(config, "rollouts"), config.draft.sets
    sets = None if wanted is None else [short_name(name) for name in wanted]
    spared = config.draft.spared if split == "train" else 0.0
    return of_split(load_stored(source), split, source, sets=sets, spared=spared)


RECIPE = Recipe(
    main,
    stages,
    "Distil the draft on the target's rollouts.",
    ("draft",),
    after_draft,
    check,
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
