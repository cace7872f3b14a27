"""Checks of a configuration before a stage starts, without network.

A run checks this first, and so does `--plan`. Only what is on this machine is looked at: prompt
sets and configurations of models that are on the Hub are checked when a pipeline starts
(`check_whole_run`), before its first stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from eval.measuring.methods import path_drafts
from heads.config import check_depths
from recipes.config import PipelineConfig
from recipes.layout import absolute, is_within
from recipes.run import Stage
from recipes.sizes import (
    WEIGHTS,
    block_of,
    described,
    is_made_here,
    is_without_weights,
    on_this_machine,
    sizes_of,
)
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.loading import check_vocabularies
from specdata.processes import local_process_count, process_count
from specdata.storage.files import read_object

# Beside a tokenizer; other versions keep it in tokenizer_config.json.
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_paths(stages: Sequence[Stage]) -> None:
    """Refuse an output that cannot be written, and inputs that are nowhere. Raises ConfigError."""
    output = stages[0].config.output
    folder = next(path for path in (absolute(output), *absolute(output).parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written into" if folder.is_dir() else "is no folder"
        raise ConfigError(f"cannot write into {output} ({folder} {why}): choose another --output")
    for stage in stages:
        for name, source in stage.inputs.items():
            # A Hub id is OWNER/NAME or NAME, its revision aside; an address has "://".
            is_path = source.startswith((".", "/")) or source.partition("@")[0].count("/") > 1
            if "://" in source or not is_path or is_within(source, output):
                continue  # what is missing in the output may be made before the run
            if not Path(source).exists():
                raise ConfigError(
                    f"{stage.name} reads {name} from {source}, and there is no such file or "
                    "folder: mend the path, or give a Hub id (OWNER/NAME)"
                )


def check_shared(config: PipelineConfig, models: Iterable[str]) -> None:
    """Refuse models whose tokenizers differ from the first one's, of those on this machine.

    Files may lack tokens that transformers adds at the end: only ids that both name are compared.
    Raises VocabularyMismatchError.
    """
    vocabularies = []
    for model in models:
        folder = None if is_made_here(config, model) else on_this_machine(model)
        if folder and (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            with suppress(Exception):  # its own; the loading of the model says what is wrong
                stored = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
                vocabularies.append({index: token for token, index in stored.items()})
    for other in vocabularies[1:]:
        both = vocabularies[0].keys() & other.keys()
        check_vocabularies(*({i: each[i] for i in both} for each in (vocabularies[0], other)))


def check_training_splits(config: PipelineConfig) -> None:
    """Refuse rollouts of other splits than are trained on, or without them. Raises ConfigError."""
    splits, known = {dataset.split for dataset in config.rollouts.sets}, {"train", "dev"}
    if (config.draft or config.head) and not known <= splits <= {*known, "test"}:
        raise ConfigError(
            "rollouts.sets must hold splits train and dev to train on, and no others but test, got "
            f"{', '.join(sorted(splits))} (source_split is what the Hub calls a split)"
        )


def check_states(config: PipelineConfig) -> None:
    """Refuse a head of states that a draft with masks does not have. Raises ConfigError."""
    depths = block_of(config) or (config.draft.depths if config.draft else 1)
    if depths == 1 and config.models.draft:  # as many as it has learnt to
        depths = described(config.models.draft).get("depths", 1)
    if config.head:
        check_depths(config.head.kind, depths)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Have what is said of a value begin with its key."""
    try:
        yield
    except (ConfigError, CacheNotRewindableError) as error:
        raise ConfigError(f"{key}: {error}") from error


def is_shared(config: PipelineConfig, stage: str) -> bool:
    """True if a stage's processes hold the target in parts, and so work on everything together."""
    return _loads_target(config, stage) and config.models.load.target.tp_plan is not None


def _loads_target(config: PipelineConfig, stage: str) -> bool:
    """True if the weights of the target are loaded in this process."""
    if stage == "rollouts":
        return config.rollouts.backend != "vllm"
    if stage == "logits":
        return config.logits is not None and config.logits.backend == "transformers"
    if stage == "draft":
        return config.draft is None or config.draft.logits is None
    return stage != "labels" or config.labels.logits is None


def check_loading(
    config: PipelineConfig, stage: Literal["rollouts", "logits", "draft", "labels", "eval"]
) -> None:
    """Refuse to load models as a stage cannot use them; "labels" goes for the head, too."""
    load = config.models.load.target
    if _loads_target(config, stage) and load.is_spread and (local := local_process_count()) > 1:
        raise ConfigError(
            f"models.load.target: device_map: {load.device_map} spreads the model over all devices "
            f"of a machine, and {local} processes on this one would each do so: start one process "
            "a machine, or share the layers among them with tp_plan: auto"
        )
    if is_shared(config, stage):
        _check_tensor_parallel(config, stage)


def _check_tensor_parallel(config: PipelineConfig, stage: str) -> None:
    """Refuse a target that is split over processes where they cannot work in step."""
    key = "models.load.target.tp_plan"
    if stage == "draft":
        raise ConfigError(
            f"{key}: processes that distil have rollouts of their own, and a target that is split "
            "in every layer needs them in step: leave it out, spread the "
            "target with device_map: auto, or distil on top logits (draft.logits)"
        )
    if stage == "eval":
        raise ConfigError(
            f"{key}: an evaluation decides by the clock of one process, so several cannot decode "
            "in step: leave it out, and spread the target over the devices of one process with "
            "models.load.target.device_map: auto"
        )
    sizes = sizes_of(config, config.models.target)
    heads = sizes.get("num_attention_heads")
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", heads)):
        size = sizes.get(name, count)
        if isinstance(size, int) and size % process_count():
            raise ConfigError(
                f"{key} gives each process as many attention heads as any other: "
                f"{config.models.target} has {name} {size}, which {process_count()} processes "
                "cannot share evenly; start another number of them"
            )


def check_decodable(config: PipelineConfig) -> None:
    """Refuse models that an evaluation cannot decode with, and methods that they cannot do.

    By the configurations alone of models that are on this machine; with none of them, torch is not
    imported. Layers that a run cuts from its target are of the target's kind.
    """
    target, methods = config.models.target, config.eval.methods
    models = [
        name
        for name in dict.fromkeys((*given_models(config), *path_drafts(config.eval)))
        if not is_made_here(config, name) and "model_type" in described(name)
    ]
    if not models:
        return
    from eval.runtime.transformers_models import (
        cached_layers,
        check_assisted,
        check_forward,
        check_trees,
    )
    from specdata.models import without_weights

    for name in models:
        model = without_weights(name)
        with named(f"eval decodes with {name}, which is refused"):
            check_forward(model)
            cached_layers(model.config)
        for method in methods:
            with named(f"method {method.name!r} with {name}"):
                if method.drafter != "chain":
                    check_trees(model, by_mask=method.tree_attention or name != target)
                if method.decoder == "assisted" and name == target:
                    check_assisted(model)


def check_whole_run(config: PipelineConfig) -> None:
    """Refuse what only a run that ends in an evaluation needs, and what only the Hub tells.

    That is models without weights (enough for `--plan`, and for a target behind a server), prompt
    sets of the Hub, the contexts of models, and whether they share a vocabulary. Downloads the sets
    (conversations, too), and of models config.json and the tokenizer. Raises ConfigError.
    """
    from specdata.models import check_shared_vocabulary, load_tokenizer, prompt_limits
    from specdata.prompts.chat_templates import require_template
    from specdata.prompts.conversations import check_conversations
    from specdata.prompts.loading import check_sets
    from specdata.prompts.reading import is_remote

    for name in given_models(config):
        if is_without_weights(name) and not is_made_here(config, name):
            raise ConfigError(
                f"{name} has a config.json and no weights ({', '.join(WEIGHTS)}), which the "
                "evaluation reads: copy them there, or run the recipes before it one by one"
            )
    if not is_made_here(config, config.models.target):
        prompt_limits(config.models.target, config.eval.max_new_tokens)
        tokenizer = load_tokenizer(config.models.target)
        for name in (*given_models(config)[1:], *path_drafts(config.eval)):
            if not is_made_here(config, name):
                check_shared_vocabulary(tokenizer, load_tokenizer(name))
    check_decodable(config)
    if config.draft and config.draft.finetune and config.draft.finetune.conversations:
        tokenizer = load_tokenizer(config.models.target)
        require_template(tokenizer)
        with named("draft.finetune.conversations"):
            check_conversations(
                config.draft.finetune.conversations,
                config.seed,
                tokenizer=tokenizer,
                variables=config.chat_template_kwargs,
            )
    trained = config.rollouts.sets if config.draft or config.head or config.toy else []
    for sets in (trained, config.eval.sets):
        remote = [dataset for dataset in sets if is_remote(dataset)]
        check_sets(remote, config.seed, has_template=has_chat_template(config))


def check_room(config: PipelineConfig, section: str, new: int) -> None:
    """Refuse completions that are longer than the target's context, less one token of prompt."""
    if (limit := positions_of(config, config.models.target)) is not None:
        check_positions(section, new, config.models.target, limit)


def check_positions(section: str, new: int, model: str, limit: int) -> None:
    """The same for a model whose context is known."""
    if new >= limit:
        raise ConfigError(
            f"{section}.max_new_tokens must leave room for a prompt: {model} has positions "
            f"for {limit} tokens, prompt included, got {new}; set it to {limit - 1} or less"
        )


def given_models(config: PipelineConfig) -> list[str]:
    """The target, and the draft unless this run makes it."""
    return [model for model in (config.models.target, config.models.draft) if model is not None]


def has_chat_template(config: PipelineConfig) -> bool | None:
    """True if the target has a chat template; None if its tokenizer is not on this machine."""
    if is_made_here(config, config.models.target):
        return False
    folder = on_this_machine(config.models.target)
    if folder is None:
        return None
    if any((folder / name).exists() for name in CHAT_TEMPLATES):
        return True
    try:
        settings = read_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template"))


def positions_of(config: PipelineConfig, model: str) -> int | None:
    """A model's context in tokens, as its config.json on this machine has it; None if unknown."""
    sizes = sizes_of(config, model)
    # GPT-2 and its kin call it n_positions.
    limit = sizes.get("max_position_embeddings", sizes.get("n_positions"))
    return limit if isinstance(limit, int) else None
