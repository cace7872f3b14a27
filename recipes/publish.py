"""Stage 5: assemble draft and head as Hub repositories, with cards made of what was measured.

Nothing is uploaded unless publish.draft_id or publish.head_id is given.

python recipes/publish.py --config recipes/configs/toy.yaml
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.config import DistilConfig
from eval.analysis.head_verdict import VERDICT, HeadVerdict
from eval.measuring.results import Results, check_metrics, read_results
from recipes.config import PipelineConfig
from recipes.layout import (
    RESULTS,
    draft_in_use,
    eval_folder,
    folder,
    head_in_use,
    release_stage,
)
from recipes.next_steps import after_release
from recipes.recipe import Recipe
from recipes.run import (
    Stage,
    made_otherwise,
    need,
    remove_caches,
    run_stage,
    say,
    stage_record,
)
from recipes.sizes import source_model
from specdata.errors import ConfigError, ManifestError
from specdata.processes import is_main
from specdata.prompts.config import PromptSet
from specdata.prompts.reading import source_of
from specdata.storage.files import fingerprint

_TOO = " (--method leaves only the methods that it names: give it once more, for this one)"


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does."""
    return [release_stage(config)]


def check(config: PipelineConfig) -> None:
    """Find what could not be published before it is trained. Raises ConfigError."""
    from eval.reporting.metadata import About, check_repository

    methods, publish = config.eval.methods, config.publish
    About(license=publish.license, language=publish.language)
    for what, name, trained in (
        ("draft_id", publish.draft_id, config.draft),
        ("head_id", publish.head_id, config.head),
    ):
        check_repository(name)
        if name is not None and trained is None:
            raise ConfigError(f"publish.{what} is set, but this configuration trains none")
    if config.draft and not any(
        method.decoder != "plain" and method.drafter == "chain" and not method.stop.adaptive
        for method in methods
    ):
        raise ConfigError(
            "a draft's card needs a measured draft length: add a method with stop: fixed, such as "
            f"{{name: K=4, length: 4}}, to eval.methods{_TOO}"
        )
    if config.head and not any(method.stop.needs_head for method in methods):
        raise ConfigError(
            "a head's card needs a measurement: add a method with stop: head, such as "
            f"{{name: head, stop: head}}, to eval.methods{_TOO}"
        )


def main(config: PipelineConfig) -> dict[str, Any]:
    """Assemble, and upload what was asked for. One process does the work."""
    if not is_main():
        return {}
    (stage,) = stages(config)
    need(eval_folder(config), "run_eval.py")
    check(config)
    if made_otherwise(stage, config):  # a copy, of other models, results or names: made again
        shutil.rmtree(stage.folder)
    made = run_stage(stage, config, lambda: _release(config, stage, stage.folder))
    remove_caches(config)  # nothing is left to be made of the datasets
    # Of the folders as they are called now: the run may have been moved since it was made.
    places = {name: getattr(config.publish, f"{name}_id") or stage.folder / name for name in made}
    for name, place in places.items():
        say(f"  {name}: {place}")
    return places


def _release(config: PipelineConfig, stage: Stage, here: Path) -> dict[str, Any]:
    """Assemble and upload; `here` becomes the stage's folder when all of it is done."""
    from eval.reporting.metadata import About
    from eval.reporting.release import release_draft, release_head

    results = _results(config)
    publish, made = config.publish, {}
    shared = About(license=publish.license, language=publish.language)
    if config.draft:
        trained = stage_record(folder(config, "draft"))["results"]
        about = replace(
            shared,
            base_model=None if config.draft.init.kind == "fresh" else source_model(config),
            datasets=_texts_of_draft(config, config.draft),
            measures=_measures(trained),
        )
        out = here / "draft"
        if not out.exists():  # else an interrupted run has finished this one
            source = Path(draft_in_use(config))
            release_draft(source, out, results, about, push_to=publish.draft_id)
        made["draft"] = publish.draft_id or str(stage.folder / "draft")
    if head := head_in_use(config):
        measures = stage_record(folder(config, "head"))["results"]["after"]
        base = publish.draft_id or draft_in_use(config)
        sets = _training_sets(config)
        about = replace(shared, base_model=base, datasets=sets, measures=measures)
        out = here / "head"
        if not out.exists():
            release_head(
                Path(head),
                out,
                results,
                about,
                trained=_trained_on(config),
                verdict=HeadVerdict.read(eval_folder(config) / VERDICT),
                push_to=publish.head_id,
            )
        made["head"] = publish.head_id or str(stage.folder / "head")
    return made


def _measures(trained: Mapping[str, Any]) -> Mapping[str, float]:
    """Acceptance on held-out rollouts before and after training, for the card."""
    what = "acceptance (an upper bound)" if trained["is_bound"] else "acceptance"
    if trained["steps"] == 0:
        return {what: trained["acceptance_after"]}
    return {
        f"{what} before distillation": trained["acceptance_before"],
        f"{what} after distillation": trained["acceptance_after"],
    }


def _results(config: PipelineConfig) -> Results:
    """What was measured, with models named as this run names them now.

    Raises:
        ManifestError: if other models were measured.
    """
    here = eval_folder(config)
    results = read_results(here / RESULTS)
    check_metrics(results, here / RESULTS)
    measured = stage_record(here)["inputs"]
    names = {"target": config.models.target, "draft": draft_in_use(config)}
    if head := head_in_use(config):
        names["head"] = head
    for role, name in names.items():
        if measured.get(role) != fingerprint(name):
            raise ManifestError(
                f"the {role} {name} is not the one that {here} measured (its contents differ): "
                f"restore it, or remove {here} and run the evaluation again"
            )
    runs = [
        run.model_copy(update={role: name for role, name in names.items() if getattr(run, role)})
        for run in results.runs
    ]
    return results.model_copy(update={"runs": runs})


def _training_sets(config: PipelineConfig, names: Sequence[str] | None = None) -> list[str]:
    """The sources of the prompt sets that were trained on: of those named, by default all."""
    return [
        source_of(prompts) or prompts.name
        for prompts in config.rollouts.sets
        if prompts.split == "train" and (names is None or prompts.name in names)
    ]


def _texts_of_draft(config: PipelineConfig, draft: DistilConfig) -> list[str]:
    """The sources of what the draft was trained on: conversations, and prompt sets of rollouts."""
    talks = draft.finetune.conversations if draft.finetune else []
    sources = [source_of(PromptSet(name, "train", 0)) or name for name in talks]
    if draft.epochs or (draft.finetune and not talks):
        sources += _training_sets(config, draft.sets)
    return sources


def _trained_on(config: PipelineConfig) -> str:
    """On what this run's head was trained, in words."""
    from eval.reporting.metadata import public_name

    rollouts = stage_record(folder(config, "head"))["results"]["train_rows"]
    sets, draws = map(public_name, _training_sets(config)), config.labels.draws
    some = "1 drafted token" if draws == 1 else f"{draws} drafted tokens"
    return f"{rollouts} rollouts of {', '.join(sets)} with {some} a position"


RECIPE = Recipe(
    main, stages, "Assemble draft and head for the Hub.", ("publish", "eval"), after_release, check
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
