"""Stage 3: label the rollouts with the draft, then train an acceptance head.

python recipes/train_head.py --config FILE.yaml
draftsmith train-head --config FILE.yaml        # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from recipes.caches import cached_rows, identity, made_of
from recipes.checks import check_labels, is_shared
from recipes.config import PipelineConfig
from recipes.layout import (
    by_content,
    draft_in_use,
    folder,
    head_stage,
    labels_stage,
    spared,
)
from recipes.next_steps import after_head
from recipes.recipe import Recipe
from recipes.run import Stage, made_as_asked, need, run_stage, say
from specdata.errors import ConfigError
from specdata.processes import is_main, refuse_fsdp
from specdata.terminal import TokenProgress, progress

# Width of the AUROC's 95 % interval above which good settings of one head, some of which differ by
# .02, cannot be told apart.
WIDEST = 0.02


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does. Raises ConfigError without a head section."""
    if config.head is None:
        raise ConfigError("this configuration has no head section, so there is no head to train")
    return [labels_stage(config), head_stage(config)]


def main(config: PipelineConfig) -> dict[str, Any]:
    """Label, train, and print how well the head predicts held-out labels."""
    labels, head = stages(config)
    if not all(map(made_as_asked, (labels, head))):
        check_labels(config)
    if not made_as_asked(head):
        refuse_fsdp("training a head")
    need(folder(config, "rollouts"), "make_rollouts.py")
    if config.draft:
        need(folder(config, "draft"), "train_draft.py")
    shares = run_stage(labels, config, lambda: _label(config, labels))["acceptance"]
    for name, share in shares.items():
        say(f"  acceptance of the draft along {name}: {share:.3f}")
    result = run_stage(head, config, lambda: _train(config, head))
    after = result["after"]
    shown = ", ".join(
        f"{name} {after[name]:.3f}"
        for name in ("kl", "kl_constant", "auroc", "ece")
        if after[name] is not None  # AUROC needs accepted and rejected tokens
    )
    say(f"  on {after['tokens']} held-out labels: {shown}")
    by_moment = result["by_moment"]
    if len(by_moment) > 1:
        areas = ", ".join(
            f"{name} {metrics['auroc']:.3f}"
            for name, metrics in by_moment.items()
            if metrics["auroc"] is not None
        )
        say(f"  AUROC by what is known of the token: {areas}")
    if note := _precision(after):
        say(f"  note: {note}")
    return result


def _precision(after: Mapping[str, Any]) -> str | None:
    """What to say of too few held-out labels; None if there are enough to tell heads apart."""
    width = after["auroc_width"]
    if width is None or width <= WIDEST:
        return None
    enough = after["tokens"] * (width / WIDEST) ** 2
    return (
        f"{after['tokens']} held-out labels leave the AUROC uncertain by about +-{width / 2:.3f}; "
        f"some {enough:,.0f} would bring that to +-{WIDEST / 2:.3f}: raise the count of split dev "
        "in rollouts.sets before judging heads by it"
    )


def _label(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from specdata.labels.make import labels_from_cache, load_labels, make_labels, mean_overlap
    from specdata.models import (
        check_shared_vocabulary,
        load_model,
        load_tokenizer,
        vocabulary_fingerprint,
    )
    from specdata.storage.dataset import is_spared, load_stored
    from specdata.storage.manifest import read_manifest

    models, draft_name = config.models, draft_in_use(config)
    tokenizer = load_tokenizer(models.target)
    check_shared_vocabulary(tokenizer, load_tokenizer(draft_name))
    draft = load_model(draft_name, load=models.loading("draft"))
    rollouts = load_stored(folder(config, "rollouts"))
    if share := spared(config):
        splits = zip(rollouts["split"], rollouts["example_id"], strict=True)
        rollouts = rollouts.select(
            [
                index
                for index, (split, example) in enumerate(splits)
                if split != "train" or is_spared(example, share)
            ]
        )
    source = made_of(config, vocabulary_fingerprint(tokenizer))
    make: Callable[..., int]
    if cache := config.labels.cache:
        rows = cached_rows(config, cache, "labels.cache", source, rollouts)
        make = partial(labels_from_cache, Path(cache), draft, rows=rows)
    else:
        target = load_model(models.target, load=models.loading("target"))
        together = is_shared(config, "labels")
        make = partial(make_labels, target, draft, rollouts, together=together)
    with progress(len(rollouts), "labels", "rollout", is_shown=is_main()) as bar:
        shown = TokenProgress(bar)
        rows = make(
            stage.folder,
            config.labels,
            sampling=config.sampling,
            seed=config.seed,
            settings=by_content(stage.settings.extended({**source, "draft": identity(draft_name)})),
            report=shown.update,
            part_done=shown.part,
        )
    undecided = 0
    if cache:
        positions = sum(map(len, rollouts["completion_ids"]))
        undecided = positions - read_manifest(stage.folder)["counts"]["tokens"]
    acceptance = mean_overlap(load_labels(stage.folder, config.sampling))
    return {"rows": rows, "acceptance": acceptance, "undecided": undecided}


def _train(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from heads.train import train_head
    from specdata.labels.make import load_labels
    from specdata.models import load_model
    from specdata.storage.dataset import of_split

    assert config.head is not None
    labels = load_labels(folder(config, "labels"), config.sampling)
    draft_name = draft_in_use(config)
    result = train_head(
        draft=load_model(draft_name, load=config.models.loading("draft")),
        train=of_split(
            labels,
            "train",
            folder(config, "labels"),
            spared=spared(config),
            wants_spared=True,
        ),
        dev=of_split(labels, "dev", folder(config, "labels")),
        out=stage.folder / "model",
        config=config.head,
        seed=config.seed,
        sampling=config.sampling,
    )
    return asdict(result)


RECIPE = Recipe(
    main, stages, "Train an acceptance head.", ("labels", "head"), after_head, check_labels
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
