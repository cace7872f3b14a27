"""Where each stage of a run lives, and what it depends on: the one description that all share."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from eval.measuring.methods import calibrates, path_drafts
from recipes.config import PipelineConfig
from recipes.run import Stage
from specdata.errors import ConfigError
from specdata.prompts.sources import prompt_inputs


def folder(config: PipelineConfig, stage: str) -> Path:
    """output/STAGE."""
    return Path(config.output) / stage


def draft_in_use(config: PipelineConfig) -> str:
    """The distilled draft, or the given one if this run distils none."""
    return str(folder(config, "draft") / "model") if config.draft else config.models.draft


def head_in_use(config: PipelineConfig) -> str | None:
    """The trained head, if this run trains one."""
    return str(folder(config, "head") / "model") if config.head else None


def pair_stage(config: PipelineConfig) -> Stage:
    """Train the embedded pair. Raises ConfigError if `models` points elsewhere."""
    assert config.toy is not None
    here = folder(config, "pair")
    for name, path in (("target", config.models.target), ("draft", config.models.draft)):
        if Path(path) != here / name:
            raise ConfigError(
                f"with a toy section, models.{name} must be {here / name}, got {path}: change it, "
                "or set toy to null and use your own pair"
            )
    settings = {"toy": asdict(config.toy), "seed": config.seed}
    return Stage("pair", here, settings, {}, "two model folders, about 45 MB")


def rollouts_stage(config: PipelineConfig) -> Stage:
    """Complete the prompts with the target."""
    rollouts = config.rollouts
    settings = {
        "rollouts": rollouts.decisive(),
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
    }
    if all(entry.count for entry in rollouts.sets):
        rows = rollouts.samples * sum(entry.count for entry in rollouts.sets)
        size = f"{rows} completions (more with later turns), at most "
        size += f"{rows * rollouts.max_new_tokens:,} tokens"
    else:
        size = (
            f"{rollouts.samples} completions of at most {rollouts.max_new_tokens} tokens a prompt"
        )
    return Stage(
        "rollouts",
        folder(config, "rollouts"),
        settings,
        {"target": config.models.target, **prompt_inputs(config.rollouts.sets)},
        size,
    )


def draft_stage(config: PipelineConfig) -> Stage:
    """Distil the draft on the rollouts."""
    assert config.draft is not None
    settings = {
        "draft": asdict(config.draft),
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
    }
    inputs = {
        "target": config.models.target,
        "draft": config.models.draft,
        "rollouts": str(folder(config, "rollouts")),
    }
    return Stage("draft", folder(config, "draft"), settings, inputs, "a model of the draft's size")


def labels_stage(config: PipelineConfig) -> Stage:
    """Label the rollouts with the draft in use."""
    settings = {
        "labels": asdict(config.labels),
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
    }
    inputs = {
        "target": config.models.target,
        "draft": draft_in_use(config),
        "rollouts": str(folder(config, "rollouts")),
    }
    if config.labels.cache:
        inputs["cache"] = config.labels.cache
    a_token = 28 + 8 * config.labels.top_logits
    size = f"as many rows as there are rollouts, at most {a_token} bytes a token"
    return Stage("labels", folder(config, "labels"), settings, inputs, size)


def head_stage(config: PipelineConfig) -> Stage:
    """Train the acceptance head on the labels."""
    assert config.head is not None
    settings = {"head": asdict(config.head), "seed": config.seed, "dtype": config.models.dtype}
    inputs = {"draft": draft_in_use(config), "labels": str(folder(config, "labels"))}
    size = f"a head of depth {config.head.depth}, 4 x depth x H x H bytes"
    return Stage("head", folder(config, "head"), settings, inputs, size)


def eval_folder(config: PipelineConfig) -> Path:
    """Where the evaluation writes."""
    return folder(config, config.eval.folder)


def eval_stage(config: PipelineConfig) -> Stage:
    """Measure every method."""
    # By name, so that a refusal lists the methods that differ.
    methods = {method.name: asdict(method) for method in config.eval.methods}
    settings = {
        "eval": {**asdict(config.eval), "methods": methods},
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
    }
    inputs = {"target": config.models.target, "draft": draft_in_use(config)}
    inputs |= {f"path draft {name}": name for name in path_drafts(config.eval)}
    inputs |= prompt_inputs(config.eval.sets)
    if head := head_in_use(config):
        inputs["head"] = head
        if calibrates(config.eval):
            inputs["labels"] = str(folder(config, "labels"))
    prompts = sum(entry.count for entry in config.eval.sets)
    size = f"results.json, report.html and plots of {prompts} prompts x {len(config.eval.methods)}"
    return Stage("eval", eval_folder(config), settings, inputs, f"{size} methods")


def release_stage(config: PipelineConfig) -> Stage:
    """Assemble what would be published."""
    inputs = {
        "draft": draft_in_use(config),
        "results": str(eval_folder(config) / "results.json"),
    }
    if head := head_in_use(config):
        inputs["head"] = head
    return Stage(
        "release",
        folder(config, "release"),
        {"publish": asdict(config.publish)},
        inputs,
        "copies of the draft and the head, each with a model card",
    )


def all_stages(config: PipelineConfig) -> list[Stage]:
    """Every stage of a run, in order."""
    stages = [pair_stage(config)] if config.toy else []
    stages += [rollouts_stage(config)] if config.toy or config.draft or config.head else []
    stages += [draft_stage(config)] if config.draft else []
    stages += [labels_stage(config), head_stage(config)] if config.head else []
    return [*stages, eval_stage(config), release_stage(config)]
