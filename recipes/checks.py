"""What can be found wrong with a configuration before a stage starts, without torch or network.

A run checks this first, and so does `--plan`. Only what is on this machine is looked at: prompt
sets and configurations of models that are on the Hub are checked when a pipeline starts
(`check_hub`), before its first stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from distill.config import TOY_POSITIONS
from eval.measuring.methods import check_machine, check_methods, path_drafts
from recipes.config import PipelineConfig
from recipes.layout import described, hidden_size, is_made_here
from specdata.adapter_folder import base_of_adapters
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.prompts.config import PromptSet
from specdata.rollouts.config import check_samples


def check_rollouts(config: PipelineConfig) -> None:
    """Refuse rollouts that cannot be made. Raises ConfigError."""
    wanted = config.rollouts
    if not wanted.sets:
        raise ConfigError(
            "rollouts.sets must name at least one prompt set, such as "
            "{name: instruct, split: train, count: 512}; got []"
        )
    check_samples(wanted, config.sampling)
    _check_room(config, "rollouts", wanted.max_new_tokens, [config.models.target])
    _check_sets(config, wanted.sets)


def check_training_splits(config: PipelineConfig) -> None:
    """Refuse rollouts without the splits that are trained on. Raises ConfigError."""
    splits = {wanted.split for wanted in config.rollouts.sets}
    if (config.draft or config.head) and not {"train", "dev"} <= splits:
        raise ConfigError(
            "rollouts.sets must hold splits train and dev to train on, got "
            f"{', '.join(sorted(splits))}"
        )
    check_draft(config)


def check_draft(config: PipelineConfig) -> None:
    """Refuse a draft that cannot be trained. Raises ConfigError."""
    check_draft_sets(config)
    check_lora(config)


def check_lora(config: PipelineConfig) -> None:
    """Refuse adapters that cannot be trained, or would train nothing. Raises ConfigError."""
    if config.draft is None or (lora := config.draft.lora) is None:
        return
    if config.draft.init.kind == "fresh":
        raise ConfigError(
            "draft.lora trains adapters beside frozen weights, and those of draft.init.kind fresh "
            "are random: leave out draft.lora, or start from a model or from layers of the target"
        )
    if lora.bits and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"draft.lora.bits: {lora.bits} needs bitsandbytes, which is not installed: pip install "
            "'draftsmith[qlora]' (CUDA GPUs; on the CPU it works too, slowly), or leave bits out "
            "to keep the frozen weights in full precision"
        )
    if lora.bits and config.draft.init.kind == "model" and _is_adapted(config.models.draft):
        raise ConfigError(
            f"draft.lora.bits: {lora.bits} needs whole weights to quantise, and models.draft "
            f"({config.models.draft}) holds adapters: leave bits out, or merge them first"
        )
    width = hidden_size(config)
    if width is not None and lora.rank > width:
        raise ConfigError(
            f"draft.lora.rank must not exceed the draft's hidden size, {width}, got {lora.rank}: "
            "lower it, or leave out draft.lora to train all weights"
        )


def _is_adapted(model: str | None) -> bool:
    return model is not None and base_of_adapters(model) is not None


def check_draft_sets(config: PipelineConfig) -> None:
    """Refuse prompt sets for the draft that no rollouts are made of. Raises ConfigError."""
    if config.draft is None or config.draft.sets is None:
        return
    chosen, known = config.draft.sets, [wanted.name for wanted in config.rollouts.sets]
    for name in chosen:
        if name not in known:
            raise ConfigError(
                f"draft.sets must name sets of rollouts.sets, got {name!r}: "
                f"{nearest(name, dict.fromkeys(known))}"
            )
    splits = {wanted.split for wanted in config.rollouts.sets if wanted.name in chosen}
    if missing := [split for split in ("train", "dev") if split not in splits]:
        raise ConfigError(
            f"draft.sets names no set of split {' or '.join(missing)} ({', '.join(chosen)}): the "
            "draft is trained on train and measured on dev; name a set of each"
        )


def check_kept(config: PipelineConfig, report: Sequence[Mapping[str, Any]]) -> None:
    """Refuse prompts of which none is left in a split that is trained on.

    Args:
        config: the run's.
        report: of the prompts that were loaded for the rollouts.

    Raises:
        ConfigError: naming the split's sets and why their prompts were dropped.
    """
    from specdata.prompts.loading import dropped

    for split in ("train", "dev") if config.draft or config.head else ():
        accounts = [account for account in report if account["split"] == split]
        if accounts and not any(account["kept"] for account in accounts):
            raise ConfigError(
                f"rollouts.sets must hold prompts of split {split} to train on, and all of them "
                f"were dropped: {'; '.join(dropped(accounts))} (a duplicate equals an earlier "
                "prompt, of any set). Give other prompts"
            )


def check_evaluation(config: PipelineConfig) -> None:
    """Refuse an evaluation that cannot be made. Raises ConfigError."""
    check_machine(config.eval)
    check_methods(config.eval, config.sampling, head=config.head is not None)
    models = [*given_models(config), *path_drafts(config.eval)]
    _check_room(config, "eval", config.eval.max_new_tokens, models)
    _check_sets(config, config.eval.sets)


def check_hub(config: PipelineConfig) -> None:
    """Refuse what only the Hub tells: prompt sets there, and the contexts of models.

    Downloads the sets, and of models config.json alone. Raises ConfigError.
    """
    from specdata.models import longest_prompt
    from specdata.prompts.loading import check_sets
    from specdata.prompts.reading import is_remote

    names = [*given_models(config), *path_drafts(config.eval)]
    for name in names:
        if not is_made_here(config, name):
            longest_prompt(name, config.eval.max_new_tokens)
    trained = config.rollouts.sets if config.draft or config.head or config.toy else []
    for sets in (trained, config.eval.sets):
        check_sets([wanted for wanted in sets if is_remote(wanted)], config.seed)


def _check_sets(config: PipelineConfig, sets: Iterable[PromptSet]) -> None:
    from specdata.prompts.loading import check_sets

    check_sets(list(sets), config.seed, here_alone=True)


def _check_room(config: PipelineConfig, section: str, new: int, models: Iterable[str]) -> None:
    """Refuse completions that are longer than a model's context, less one token of prompt."""
    for model in models:
        limit = positions_of(config, model)
        if limit is not None and new >= limit:
            raise ConfigError(
                f"{section}.max_new_tokens must leave room for a prompt: {model} has positions "
                f"for {limit} tokens, prompt included, got {new}; set it to {limit - 1} or less"
            )


def given_models(config: PipelineConfig) -> list[str]:
    """The target, and the draft unless this run makes it."""
    return [model for model in (config.models.target, config.models.draft) if model is not None]


def positions_of(config: PipelineConfig, model: str) -> int | None:
    """A model's context in tokens, as its config.json on this machine has it; None if unknown."""
    if is_made_here(config, model):
        return TOY_POSITIONS
    known = described(model)
    # GPT-2 and its kin call it n_positions.
    found = known.get("max_position_embeddings", known.get("n_positions"))
    return found if isinstance(found, int) else None
