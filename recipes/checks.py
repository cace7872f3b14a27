"""What can be found wrong with a configuration before a stage starts, without torch or network.

A run checks this first, and so does `--plan`. Only what is on this machine is looked at: prompt
sets and configurations of models that are on the Hub are checked when a pipeline starts
(`check_hub`), before its first stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eval.measuring.methods import check_machine, check_methods, path_drafts
from recipes.config import PipelineConfig
from recipes.layout import folder
from recipes.run import absolute
from recipes.sizes import (
    WEIGHTS,
    draft_width,
    is_made_here,
    is_without_weights,
    on_this_machine,
    sizes_of,
    source_model,
)
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.loading import Loading, Role, check_bits, check_shardable, check_tp_plan
from specdata.processes import process_count
from specdata.prompts.config import PromptSet
from specdata.rollouts.config import check_samples

if TYPE_CHECKING:
    from specdata.labels.top_logits import KeptLogits

# Beside a tokenizer; other versions keep it in tokenizer_config.json.
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_rollouts(config: PipelineConfig) -> None:
    """Refuse rollouts that cannot be made. Raises ConfigError."""
    wanted = config.rollouts
    if not wanted.sets:
        raise ConfigError(
            "rollouts.sets must name at least one prompt set, such as "
            "{name: instruct, split: train, count: 512}; got []"
        )
    check_samples(wanted, config.sampling)
    check_loading(config, "rollouts")
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


def check_draft(config: PipelineConfig) -> None:
    """Refuse a draft that cannot be made or trained. Raises ConfigError."""
    check_draft_sets(config)
    if config.draft:
        check_loading(config, "draft")
    check_finetuning(config)
    check_initial(config)
    check_lora(config)
    if config.draft and config.draft.shard_teacher and not config.draft.cache:
        check_shardable(config.models.target, config.models.load.target)
    if config.draft and config.draft.report_to:
        from distill.callbacks import reporters  # here: it needs torch

        reporters(config.draft.report_to, Path())
    if config.draft and config.models.draft and config.draft.init.kind == "model":
        limit = positions_of(config, config.models.draft)
        if limit is None or limit < (config.draft.max_length or sys.maxsize):
            _check_room(config, "rollouts", config.rollouts.max_new_tokens, [config.models.draft])


def check_draft_cache(config: PipelineConfig) -> None:
    """Refuse kept logits that a draft cannot learn from, as far as is known. Raises ConfigError."""
    if config.draft and config.draft.cache:
        _check_cache(config, "draft.cache", config.draft.cache, bound=True)


def check_labels_cache(config: PipelineConfig) -> None:
    """Refuse kept logits that do not give labels, as far as is known. Raises ConfigError."""
    if config.head and config.labels.cache:
        _check_cache(config, "labels.cache", config.labels.cache, bound=config.labels.bound)


def _check_cache(config: PipelineConfig, key: str, cache: str, *, bound: bool) -> None:
    if (kept := _kept_logits(config, key, cache)) is not None:
        with _named(key):
            kept.distributions(config.sampling, bound=bound)


def _kept_logits(config: PipelineConfig, key: str, cache: str) -> KeptLogits | None:
    """What a cache keeps, or will keep if this run makes it; None if that is not known yet."""
    from specdata.labels.top_logits import KeptLogits  # here: it needs torch

    if config.logits and absolute(cache) == absolute(folder(config, "logits")):
        size = sizes_of(config, config.models.target).get("vocab_size")
        return None if size is None else KeptLogits(min(config.logits.top_logits, size), size)
    if not Path(cache).is_dir():
        raise ConfigError(
            f"{key} must be a folder with kept target logits, and {cache} is none: make it with "
            "draftsmith make-logits (section logits), or leave it out"
        )
    with _named(key):
        return KeptLogits.of(Path(cache))


def check_initial(config: PipelineConfig) -> None:
    """Refuse a draft that `draft.init` cannot make, as far as is known here. Raises ConfigError."""
    if config.draft is None:
        return
    init, target = config.draft.init, config.models.target
    if init.kind == "target":
        known = sizes_of(config, target)
        layers = known.get("num_hidden_layers", known.get("n_layer"))
        wanted = init.layers if isinstance(init.layers, int) else init.layers[-1] + 1
        if layers is not None and wanted > layers:
            numbers = f"0 to {layers - 1}" if isinstance(init.layers, list) else f"1 to {layers}"
            raise ConfigError(
                f"draft.init.layers must be {numbers}, because {target} has {layers} layers; got "
                f"{init.layers}"
            )
    if init.vocabulary is None:
        return
    source = config.models.draft if init.kind == "model" else target
    known = sizes_of(config, str(source))
    if (had := known.get("draft_vocab_size")) is not None:
        raise ConfigError(
            f"{source} can propose {had} tokens already: leave draft.init.vocabulary out, or give "
            "the draft that it was made of"
        )
    size = known.get("vocab_size")
    if size is not None and init.vocabulary > size:
        raise ConfigError(
            f"draft.init.vocabulary must be at most {size}, the vocabulary of {source}, got "
            f"{init.vocabulary}"
        )


def check_lora(config: PipelineConfig) -> None:
    """Refuse adapters that cannot be trained, or would train nothing. Raises ConfigError."""
    if config.draft is None or (lora := config.draft.lora) is None:
        return
    if config.draft.init.kind == "fresh":
        raise ConfigError(
            "draft.lora trains adapters beside frozen weights, and those of draft.init.kind fresh "
            "are random: leave out draft.lora, or start from a model or from layers of the target"
        )
    given = config.models.draft if config.draft.init.kind == "model" else None
    check_bits(lora.bits, "draft.lora.bits", given)
    width = draft_width(config)
    if width is not None and lora.rank > width:
        raise ConfigError(
            f"draft.lora.rank must not exceed the draft's hidden size, {width}, got {lora.rank}: "
            "lower it, or leave out draft.lora to train all weights"
        )


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


def check_finetuning(config: PipelineConfig) -> None:
    """Refuse conversations that cannot be trained on, and rows longer than a draft's context.

    Of conversations on the Hub only the names are checked. Raises ConfigError.
    """
    from specdata.prompts.conversations import check_conversations

    if config.draft is None or config.draft.finetune is None:
        return
    tuning = config.draft.finetune
    with _named("draft.finetune.conversations"):
        check_conversations(tuning.conversations, config.seed, here_alone=True)
    if tuning.conversations and has_chat_template(config) is False:
        raise ConfigError(
            f"draft.finetune.conversations are rendered with the target's chat template, and "
            f"{config.models.target} has none: save one beside its tokenizer (chat_template.jinja; "
            "recipes/configs/vicuna.jinja is Vicuna's), take a target that was tuned to chat, or "
            "leave conversations out to train on the target's rollouts"
        )
    # A draft that is made has the context of what it is made of, a fresh one its target's.
    source = config.models.target if config.draft.init.kind == "fresh" else source_model(config)
    limit = positions_of(config, source)
    if limit is not None and tuning.max_length > limit:
        raise ConfigError(
            f"draft.finetune.max_length must be at most {limit}, the positions of {source}, got "
            f"{tuning.max_length}: lower it, or take a draft with a longer context"
        )


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Have what is said of a value begin with its key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


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
    check_loading(config, "eval")
    models = [*given_models(config), *path_drafts(config.eval)]
    _check_room(config, "eval", config.eval.max_new_tokens, models)
    _check_sets(config, config.eval.sets)


def check_labels(config: PipelineConfig) -> None:
    """Refuse labels and a head that cannot be made. Raises ConfigError."""
    check_loading(config, "labels")
    check_labels_cache(config)


def check_logits(config: PipelineConfig) -> None:
    """Refuse logits that cannot be kept. Raises ConfigError."""
    check_loading(config, "logits")


def is_shared(config: PipelineConfig, stage: str) -> bool:
    """Whether a stage's processes hold the target in parts, and so work on everything together."""
    return _loads_target(config, stage) and config.models.load.target.tp_plan is not None


def _loads_target(config: PipelineConfig, stage: str) -> bool:
    """Whether the weights of the target are loaded in this process."""
    if stage == "rollouts":
        return config.rollouts.backend != "vllm"
    if stage == "logits":
        return config.logits is not None and config.logits.backend == "transformers"
    if stage == "draft":
        return config.draft is None or config.draft.cache is None
    return stage != "labels" or config.labels.cache is None


def check_loading(
    config: PipelineConfig, stage: Literal["rollouts", "logits", "draft", "labels", "eval"]
) -> None:
    """Refuse to load models as a stage cannot use them.

    Args:
        config: the run's.
        stage: whose models are looked at; "labels" goes for the head that learns from them.

    Raises:
        ConfigError: with the reason and the remedy, before weights are loaded.
    """
    models = config.models
    given = models.draft if config.draft is None else None  # else it is made by this run
    names: dict[Role, str | None] = {}
    if _loads_target(config, stage):
        names["target"] = models.target
    if stage in ("labels", "eval"):
        names["draft"] = given
    for role, name in names.items():
        with _named(f"models.load.{role}"):
            _check_one_loading(models.loading(role), name)
    if is_shared(config, stage):
        _check_tensor_parallel(config, stage)
    if "draft" in names and models.load.draft.tp_plan:
        raise ConfigError(
            "models.load.draft.tp_plan: a draft is small, and each process holds it whole beside "
            "its part of the target: leave it out"
        )
    if stage == "labels" and models.load.draft.is_spread:
        raise ConfigError(
            f"models.load.draft.device_map: {models.load.draft.device_map} spreads the draft, and "
            "a head is trained beside it on each process's own device: leave it out"
        )
    if stage == "eval":
        _check_decoding(config)


def _check_one_loading(load: Loading, name: str | None) -> None:
    """Refuse what no stage can do with a model; `name` is None for one that is made later."""
    check_bits(load.bits, "bits", name)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", process_count()))
    if load.is_spread and local > 1:
        raise ConfigError(
            f"device_map: {load.device_map} spreads the model over all devices of a machine, and "
            f"{local} processes on this one would each do so: start one process a machine, or "
            "share the layers among the processes with tp_plan: auto"
        )
    if load.attn_implementation and "flash" in load.attn_implementation and load.dtype == "float32":
        raise ConfigError(
            f"attn_implementation: {load.attn_implementation} computes in half precision and the "
            "model is loaded in float32: add dtype: bfloat16, or take sdpa"
        )


def _check_tensor_parallel(config: PipelineConfig, stage: str) -> None:
    """Refuse a target that is split over processes where they cannot work in step."""
    key = "models.load.target.tp_plan"
    if stage == "draft":
        raise ConfigError(
            f"{key}: processes that distil have rollouts of their own, and a target that is split "
            "in every layer needs them in step: leave it out; draft.shard_teacher divides the "
            "target among processes that train"
        )
    if stage == "eval":
        raise ConfigError(
            f"{key}: an evaluation decides by the clock of one process, so several cannot decode "
            "in step: leave it out, and spread the target over the devices of one process with "
            "models.load.target.device_map: auto"
        )
    check_tp_plan(config.models.load.target.tp_plan, key, config.models.target)
    known = sizes_of(config, config.models.target)
    heads = known.get("num_attention_heads")
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", heads)):
        found = known.get(name, count)
        if isinstance(found, int) and found % process_count():
            raise ConfigError(
                f"{key} gives each process as many attention heads as any other: "
                f"{config.models.target} has {name} {found}, which {process_count()} processes "
                "cannot share evenly; start another number of them"
            )


def _check_decoding(config: PipelineConfig) -> None:
    """Refuse engines and drafts that a model cannot be decoded with as it is loaded."""
    for role in ("target", "draft"):
        load = config.models.load.of(role)
        if load.is_spread and config.eval.engine != "eager":
            raise ConfigError(
                f"eval.engine {config.eval.engine!r} captures the forward of a model on one "
                f"device, and models.load.{role}.device_map: {load.device_map} spreads it over "
                "several: set eval.engine to eager, or leave device_map out"
            )
        if load.bits and config.eval.engine != "eager":
            raise ConfigError(
                f"eval.engine {config.eval.engine!r} captures products of plain matrices, and "
                f"models.load.{role}.bits: {load.bits} packs them: set eval.engine to eager"
            )
        if "flash" not in (load.attn_implementation or ""):
            continue
        flash = f"models.load.{role}.attn_implementation: {load.attn_implementation}"
        if config.eval.batch > 1:
            raise ConfigError(
                f"{flash} takes no mask, which sequences of a batch need: set eval.batch to 1, or "
                "take sdpa"
            )
        for method in config.eval.methods:
            if method.drafter != "chain" and (role == "draft" or method.tree_attention):
                raise ConfigError(
                    f"{flash} takes no tree mask, which the method {method.name!r} needs (drafter: "
                    f"{method.drafter}): take sdpa, or draft chains"
                )


def check_weights(config: PipelineConfig) -> None:
    """Refuse, for an evaluation, folders that describe a model without holding it.

    A target behind a server may be such a folder, and `--plan` needs no more. Raises ConfigError.
    """
    for name in given_models(config):
        if is_without_weights(name) and not is_made_here(config, name):
            raise ConfigError(
                f"{name} has a config.json and no weights ({', '.join(WEIGHTS)}), which the "
                "evaluation reads: copy them there, or run the recipes before it one by one"
            )


def check_hub(config: PipelineConfig) -> None:
    """Refuse what only the Hub tells: prompt sets there, and the contexts of models.

    Downloads the sets (conversations, too), and of models config.json alone. Raises ConfigError.
    """
    from specdata.models import load_tokenizer, longest_prompt
    from specdata.prompts.chat_templates import require_template
    from specdata.prompts.conversations import check_conversations
    from specdata.prompts.loading import check_sets
    from specdata.prompts.reading import is_remote

    names = [*given_models(config), *path_drafts(config.eval)]
    for name in names:
        if not is_made_here(config, name):
            longest_prompt(name, config.eval.max_new_tokens)
    if config.draft and config.draft.finetune and config.draft.finetune.conversations:
        with _named("draft.finetune.conversations"):
            check_conversations(config.draft.finetune.conversations, config.seed)
        if has_chat_template(config) is None:
            require_template(load_tokenizer(config.models.target))
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


def has_chat_template(config: PipelineConfig) -> bool | None:
    """Whether the target has a chat template; None if its tokenizer is not on this machine."""
    if is_made_here(config, config.models.target):
        return False
    here = on_this_machine(config.models.target)
    if here is None:
        return None
    if any((here / name).exists() for name in CHAT_TEMPLATES):
        return True
    try:
        settings = json.loads((here / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template"))


def positions_of(config: PipelineConfig, model: str) -> int | None:
    """A model's context in tokens, as its config.json on this machine has it; None if unknown."""
    known = sizes_of(config, model)
    # GPT-2 and its kin call it n_positions.
    found = known.get("max_position_embeddings", known.get("n_positions"))
    return found if isinstance(found, int) else None
