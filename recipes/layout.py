"""Where each stage of a run lives, and what it depends on: the one description that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.measuring.methods import needs_fit, path_drafts
from recipes.config import PipelineConfig
from recipes.run import Stage, absolute
from recipes.sizes import (
    LOGITS_TOKEN,
    PAIR,
    ROLLOUT_TOKEN,
    draft_size,
    eval_size,
    head_size,
    label_bytes,
    pair_size,
    rollout_bytes,
    rows_size,
)
from specdata.errors import ConfigError
from specdata.loading import Role
from specdata.prompts.conversations import conversation_inputs
from specdata.prompts.reading import prompt_inputs
from specdata.storage.resume import Settings

# Folders of a run's output; what a stage makes is read by later ones only.
ORDER = (
    "pair",
    "rollouts",
    "logits",
    "initial",
    "finetuned",
    "draft",
    "labels",
    "head",
    "eval",
    "release",
)


RESULTS = "results.json"


def folder(config: PipelineConfig, stage: str) -> Path:
    """output/STAGE."""
    return Path(config.output) / stage


def eval_folder(config: PipelineConfig) -> Path:
    """Where this evaluation is: output/eval, unless eval.folder says otherwise."""
    return folder(config, config.eval.folder)


def is_cut(config: PipelineConfig) -> bool:
    """Whether this run makes the draft that its training starts from (`draft.init`)."""
    made = config.draft and (config.draft.init.kind != "model" or config.draft.init.vocabulary)
    return bool(made)


def initial_draft(config: PipelineConfig) -> str:
    """The draft before it is trained: made by this run, or given."""
    if is_cut(config):
        return str(folder(config, "initial") / "model")
    assert config.models.draft is not None  # the configuration's own check
    return config.models.draft


def draft_to_distil(config: PipelineConfig) -> str:
    """The draft that distillation starts from: fine-tuned by this run, or as it was."""
    if config.draft and config.draft.finetune:
        return str(folder(config, "finetuned") / "model")
    return initial_draft(config)


def draft_in_use(config: PipelineConfig) -> str:
    """The distilled draft, or the given one if this run distils none."""
    return str(folder(config, "draft") / "model") if config.draft else initial_draft(config)


def head_in_use(config: PipelineConfig) -> str | None:
    """The trained head, if this run trains one."""
    return str(folder(config, "head") / "model") if config.head else None


def pair_stage(config: PipelineConfig) -> Stage:
    """Train the embedded pair. Raises ConfigError if `models` points elsewhere."""
    assert config.toy is not None
    here = folder(config, "pair")
    for name, path in (("target", config.models.target), ("draft", config.models.draft)):
        if path is None or absolute(path) != absolute(here / name):
            raise ConfigError(
                f"with a toy section, models.{name} must be {here / name}, got {path}: change it, "
                "or set toy to null and use your own pair"
            )
    values = {"toy": config.toy.model_dump(mode="json"), "seed": config.seed}
    return _stage(config, "pair", values, {}, pair_size(config))


def rollouts_stage(config: PipelineConfig) -> Stage:
    """Complete the prompts with the target."""
    values = {"rollouts": config.rollouts.decisive(), **_sampled(config, "target")}
    inputs = {"target": config.models.target, **prompt_inputs(config.rollouts.sets)}
    size = rows_size(config, partial(rollout_bytes, config))
    return _stage(config, "rollouts", values, inputs, size)


def logits_stage(config: PipelineConfig) -> Stage:
    """Keep the target's largest logits along the rollouts."""
    assert config.logits is not None
    values = {"logits": config.logits.decisive(), "dtype": config.models.dtype}
    values |= _loaded(config, "target")
    inputs = {"target": config.models.target, "rollouts": str(folder(config, "rollouts"))}
    token = ROLLOUT_TOKEN + PAIR * config.logits.top_logits + LOGITS_TOKEN
    return _stage(config, "logits", values, inputs, rows_size(config, lambda _split: token))


def initial_stage(config: PipelineConfig) -> Stage:
    """Make the draft that training starts from."""
    assert config.draft is not None
    values: dict[str, Any] = {"init": config.draft.init.model_dump(mode="json")}
    values |= _sampled(config, "target")
    values["sets"] = config.draft.sets
    values |= _spared(config)
    inputs = {"target": config.models.target, "rollouts": str(folder(config, "rollouts"))}
    if config.draft.init.kind == "model":
        assert config.models.draft is not None  # the configuration's own check
        inputs["draft"] = config.models.draft
    return _stage(config, "initial", values, inputs, draft_size(config))


def finetuned_stage(config: PipelineConfig) -> Stage:
    """Train the draft on texts."""
    assert config.draft is not None
    assert config.draft.finetune is not None
    tuning = config.draft.finetune
    lora = config.draft.lora.model_dump(mode="json") if config.draft.lora else None
    values: dict[str, Any] = {"finetune": tuning.model_dump(mode="json"), "lora": lora}
    values["seed"] = config.seed
    inputs = {"target": config.models.target, "draft": initial_draft(config)}
    if tuning.conversations:
        inputs |= conversation_inputs(tuning.conversations)
    else:
        values["sets"] = config.draft.sets
        values |= _spared(config)
        inputs["rollouts"] = str(folder(config, "rollouts"))
    return _stage(config, "finetuned", values, inputs, draft_size(config))


def draft_stages(config: PipelineConfig) -> list[Stage]:
    """Everything that makes the draft, in order."""
    if config.draft is None:
        return []
    stages = [initial_stage(config)] if is_cut(config) else []
    stages += [finetuned_stage(config)] if config.draft.finetune else []
    return [*stages, draft_stage(config)]


def draft_stage(config: PipelineConfig) -> Stage:
    """Distil the draft on the rollouts."""
    assert config.draft is not None
    values = {"draft": config.draft.decisive(), **_sampled(config, "target")}
    inputs = {
        "target": config.models.target,
        "draft": draft_to_distil(config),
        "rollouts": str(folder(config, "rollouts")),
    }
    if config.draft.cache:
        inputs["cache"] = config.draft.cache
    return _stage(config, "draft", values, inputs, draft_size(config))


def spared(config: PipelineConfig) -> float:
    """Share of the training rollouts that the draft does not learn from."""
    return config.draft.spared if config.draft else 0.0


def _spared(config: PipelineConfig) -> dict[str, Any]:
    """The same as a setting of a stage; nothing where it is 0, as in runs that did not know it."""
    return {"spared": share} if (share := spared(config)) else {}


def labels_stage(config: PipelineConfig) -> Stage:
    """Label the rollouts with the draft in use."""
    values = {
        "labels": config.labels.model_dump(mode="json"),
        **_sampled(config, "target", "draft"),
    }
    values |= _spared(config)
    inputs = {
        "target": config.models.target,
        "draft": draft_in_use(config),
        "rollouts": str(folder(config, "rollouts")),
    }
    if config.labels.cache:
        inputs["cache"] = config.labels.cache
    size = rows_size(config, partial(label_bytes, config))
    return _stage(config, "labels", values, inputs, size)


def head_stage(config: PipelineConfig) -> Stage:
    """Train the acceptance head on the labels."""
    assert config.head is not None
    head = config.head
    values = {"head": head.decisive(), "seed": config.seed, "dtype": config.models.dtype}
    values |= _spared(config) | _loaded(config, "draft")
    inputs = {"draft": draft_in_use(config), "labels": str(folder(config, "labels"))}
    return _stage(config, "head", values, inputs, head_size(config))


def eval_stage(config: PipelineConfig) -> Stage:
    """Measure every method."""
    # By name, so that a refusal lists the methods that differ.
    methods = {method.name: method.model_dump(mode="json") for method in config.eval.methods}
    values = {
        "eval": {**config.eval.model_dump(mode="json"), "methods": methods},
        **_sampled(config, "target", "draft"),
    }
    inputs = {"target": config.models.target, "draft": draft_in_use(config)}
    inputs |= {f"path draft {name}": name for name in path_drafts(config.eval)}
    inputs |= prompt_inputs(config.eval.sets)
    if head := head_in_use(config):
        inputs["head"] = head
        if needs_fit(config.eval):
            inputs["labels"] = str(folder(config, "labels"))
    here = eval_folder(config)
    return Stage(
        "eval",
        here,
        Settings(
            values,
            "choose another folder for another list of methods with --eval.folder NAME, or remove "
            f"{here} to measure again",
        ),
        inputs,
        eval_size(config),
    )


def release_stage(config: PipelineConfig) -> Stage:
    """Assemble what would be published."""
    inputs = {
        "draft": draft_in_use(config),
        "results": str(eval_folder(config) / "results.json"),
    }
    parts = []
    if config.draft:
        parts.append(f"a copy of {draft_size(config)}")
    if head := head_in_use(config):
        inputs["head"] = head
        parts.append(f"a copy of {head_size(config)}")
    size = "; ".join([*parts, "with model cards"]) if parts else "nothing: nothing is trained"
    values = {"publish": config.publish.model_dump(mode="json")}
    return _stage(config, "release", values, inputs, size, "the copies are made again")


def all_stages(config: PipelineConfig) -> list[Stage]:
    """Every stage of a run, in order."""
    stages = [pair_stage(config)] if config.toy else []
    stages += [rollouts_stage(config)] if config.toy or config.draft or config.head else []
    stages += [logits_stage(config)] if config.logits else []
    stages += draft_stages(config)
    stages += [labels_stage(config), head_stage(config)] if config.head else []
    return [*stages, eval_stage(config), release_stage(config)]


def by_content(settings: Settings) -> Settings:
    """The settings of a dataset, compared by what its models hold and not by where they are."""
    return replace(settings, free=("target.name", "draft.name"))


def _stage(
    config: PipelineConfig,
    name: str,
    values: Mapping[str, Any],
    inputs: Mapping[str, str],
    size: str,
    remedy: str | None = None,
) -> Stage:
    """A stage in its own folder of the run's output."""
    here = folder(config, name)
    remedy = remedy or _remedy(config, name)
    return Stage(name, here, Settings(values, remedy), inputs, size)


def _remedy(config: PipelineConfig, name: str) -> str:
    """What to do about a stage's folder that was made with other settings."""
    elsewhere = "choose another --output"
    if config.toy:  # whose models must lie in the output
        elsewhere += " NEW, with --models.target NEW/pair/target and --models.draft NEW/pair/draft"
    later = ORDER[ORDER.index(name) + 1 :]
    # Of evaluations there may be several: eval.folder begins with "eval".
    made = [
        here
        for stage in later
        for here in sorted(Path(config.output).glob("eval*" if stage == "eval" else stage))
    ]
    return f"{elsewhere}, or remove {', '.join(map(str, [folder(config, name), *made]))}"


def _sampled(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """What decides the result of every stage that runs the models of these roles."""
    return {
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
        **_loaded(config, *roles),
    }


def _loaded(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """What else of the loading of models decides a result; nothing where models.dtype says all."""
    usual = {"dtype": config.models.dtype}
    decisive = {role: config.models.loading(role).decisive() for role in roles}
    other = {
        role: {key: value for key, value in values.items() if usual.get(key) != value}
        for role, values in decisive.items()
        if values != usual
    }
    return {"load": other} if other else {}
