"""The folders of a run's stages and models, and what of their loading decides a result."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.config import PipelineConfig
from specdata.loading import Role

RESULTS, CERTIFICATE = "results.json", "certificate.json"
RECIPE_OF = {
    "pair": "make_rollouts",
    "rollouts": "make_rollouts",
    "logits": "make_logits",
    "initial": "train_draft",
    "finetuned": "train_draft",
    "draft": "train_draft",
    "labels": "train_head",
    "head": "train_head",
    "eval": "run_eval",
    "release": "publish",
}
"""Stage -> the recipe that does it, in order: what a stage makes is read by later ones only."""
# Stands, in what is stored, for the run's own output folder.
OUTPUT = "OUTPUT"


def folder(config: PipelineConfig, stage: str) -> Path:
    """output/STAGE."""
    return Path(config.output) / stage


def head_folder(config: PipelineConfig) -> Path:
    """Where this head is: output/head, unless head.folder says otherwise."""
    return folder(config, config.head.folder if config.head else "head")


def eval_folder(config: PipelineConfig) -> Path:
    """Where this evaluation is: eval.folder, else output/eval, and output/eval-2 of head-2."""
    of_head = head_folder(config).name.removeprefix("head")
    return folder(config, config.eval.folder or f"eval{of_head}")


def makes_initial_draft(config: PipelineConfig) -> bool:
    """True if this run makes the draft that its training starts from (`draft.init`)."""
    made = config.draft and (config.draft.init.kind != "model" or config.draft.init.vocabulary)
    return bool(made)


def initial_draft(config: PipelineConfig) -> str:
    """The draft before it is trained: made by this run, or given."""
    if makes_initial_draft(config):
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


def load_draft_in_use(config: PipelineConfig) -> Any:
    """The draft in use. If it reads a target's states, each process loads one, unless attached."""
    from specdata.models import load_model  # here: it needs torch

    models = config.models
    return load_model(
        draft_in_use(config),
        load=models.loading("draft"),
        target=models.target,
        target_load=models.loading("target").model_copy(update={"tp_plan": None}),
    )


def head_in_use(config: PipelineConfig) -> str | None:
    """The trained head, if this run trains one."""
    return str(head_folder(config) / "model") if config.head else None


def held_out_share(config: PipelineConfig) -> float:
    """Share of the training rollouts that the draft does not learn from."""
    return config.draft.held_out_share if config.draft else 0.0


def held_out_setting(config: PipelineConfig) -> dict[str, Any]:
    """The same as a setting of a stage; nothing where it is 0."""
    return {"held_out_share": share} if (share := held_out_share(config)) else {}


def template_setting(config: PipelineConfig) -> dict[str, Any]:
    """What chat templates are given as a setting of a stage; nothing where it is empty."""
    given = config.chat_template_kwargs
    return {"chat_template_kwargs": given} if given else {}


def sampled(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """The settings that decide the result of every stage that runs the models of these roles."""
    return {
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
        **template_setting(config),
        **loaded(config, *roles),
    }


def loaded(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """Other settings of loading that decide a result; nothing where models.dtype says all."""
    models = config.models
    dtypes = {role: models.dtype_of(role) for role in roles}
    other = {role: {"dtype": dtype} for role, dtype in dtypes.items() if dtype != models.dtype}
    return {"load": other} if other else {}


def portable(values: Any, output: str, place: str = OUTPUT) -> Any:
    """JSON values whose paths in the run's output are written relative to it: OUTPUT/...

    Or in another `place`, where the run lies now.

    So a run can be moved, or its output named in another way, and is still the same run. Keys are
    changed, too ("path draft PATH").
    """
    root = absolute(output)
    if Path.cwd().is_relative_to(root):
        return values  # there, every name would be a path in the output

    def text(value: str) -> str:
        kind, path = re.fullmatch(r"(path draft |prompts |)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]
        whole = absolute(path)
        is_inside = whole != root and whole.is_relative_to(root)
        return f"{kind}{place}/{whole.relative_to(root)}" if is_inside else value

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {text(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return text(value) if isinstance(value, str) else value

    return walk(values)


def is_within(path: str, output: str) -> bool:
    """True if a path lies in the run's output, however both are written."""
    return absolute(path).is_relative_to(absolute(output))


def absolute(path: str | Path) -> Path:
    """A path from the root, without "..", symbolic links as they are."""
    return Path(os.path.normpath(Path(path).absolute()))
