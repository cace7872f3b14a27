"""What is known of a run's models before any is loaded, and what they must be.

Only what is on this machine is read, config.json above all; with none of them, torch is not
imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import BLOCK, FRESH, TOY_POSITIONS
from heads.config import check_depths
from recipes.config import PipelineConfig, absolute, named
from specdata.drafts import kind_of
from specdata.drafts.kind import DraftKind
from specdata.errors import ConfigError
from specdata.loading import check_vocabularies, reach
from specdata.processes import local_process_count
from specdata.sources import (
    WEIGHTS,
    base_of_adapters,
    hub_source,
    is_hub_id,
    template_beside,
    weight_files,
)
from specdata.storage.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from heads import BaseHead

# Beside a tokenizer; other versions keep it in tokenizer_config.json, or with a processor.
CHAT_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")


def is_made_here(config: PipelineConfig, model: str) -> bool:
    """True if a model is of the embedded pair, which this run trains."""
    return config.toy is not None and absolute(model).is_relative_to(
        absolute(config.folder("pair"))
    )


def is_without_weights(source: str) -> bool:
    """True if a folder describes a model and does not hold it."""
    path = Path(source)
    return (
        (path / "config.json").is_file()
        and not base_of_adapters(source)
        and not any((path / each).is_file() for each in WEIGHTS)
    )


def on_this_machine(model: str) -> Path | None:
    """The folder of a model: its own, or the one that the Hub's cache keeps of it."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache  # here: few plans need it

    source, revision = hub_source(model)
    try:
        path = try_to_load_from_cache(source, "config.json", revision=revision or "main")
    except ValueError:  # no Hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def json_of(model: str, name: str) -> Mapping[str, Any]:
    """A JSON file beside a model, or the base of adapters; empty if it is not on this machine."""
    folder = on_this_machine(base_of_adapters(model) or model)
    try:
        return read_object(folder / name) if folder else {}
    except (OSError, ValueError):
        return {}


def model_config(model: str) -> Mapping[str, Any]:
    """The language model's part of a model's config.json."""
    values = json_of(model, "config.json")
    values = values.get("text_config", values)
    return values if isinstance(values, dict) else {}


def generation_config_of(model: str) -> Mapping[str, Any]:
    """A model's generation_config.json."""
    return json_of(model, "generation_config.json")


def sizes_of(config: PipelineConfig, model: str) -> Mapping[str, Any]:
    """The config.json of a model, as it is or as this run will make it; empty if unknown."""
    if config.toy is None or not is_made_here(config, model):
        return model_config(model)
    is_target = absolute(model) == absolute(config.models.target)
    toy = config.toy
    return {
        "hidden_size": toy.target_width if is_target else toy.draft_width,
        "num_hidden_layers": toy.target_layers if is_target else toy.draft_layers,
        "vocab_size": toy.vocab_size,
        "max_position_embeddings": TOY_POSITIONS,
    }


def source_model(config: PipelineConfig) -> str:
    """The model that the draft has its hidden size from, if it is not a fresh one."""
    kind = config.draft.init.kind if config.draft else "model"
    if kind in ("target", "states", "mtp") or config.models.draft is None:
        return config.models.target
    return config.models.draft


def kind_in(config: PipelineConfig) -> DraftKind:
    """The kind of the draft, as it is or as this run will make it, but for masks."""
    if config.draft and config.draft.init.kind != "model":
        return config.draft.init.draft_kind
    return kind_of(model_config(config.models.draft) if config.models.draft else {})


def block_of(config: PipelineConfig) -> int | None:
    """Tokens of a block, if the draft drafts in blocks."""
    if not (kind := kind_in(config)).in_blocks:
        return None
    if config.draft and config.draft.init.kind != "model":
        return config.draft.init.block or BLOCK
    try:
        return int(kind.depths(model_config(str(config.models.draft))))
    except (KeyError, TypeError, ValueError):  # loading it says what is wrong
        return None


def draft_width(config: PipelineConfig) -> int | None:
    """The draft's hidden size, if it is known on this machine."""
    if config.draft and config.draft.init.kind == "fresh":
        return FRESH["hidden_size"]
    return width_of(sizes_of(config, source_model(config)))


def width_of(values: Mapping[str, Any]) -> int | None:
    """The hidden size, if config.json says it."""
    return next((values[name] for name in ("hidden_size", "n_embd") if name in values), None)


def positions_of(config: PipelineConfig, model: str) -> int | None:
    """A model's context in tokens, as its config.json on this machine has it; None if unknown."""
    return reach(sizes_of(config, model))


def has_chat_template(config: PipelineConfig) -> bool | None:
    """True if the target has a chat template; None if its tokenizer is not on this machine."""
    if is_made_here(config, config.models.target):
        return False
    target = config.models.target
    if not (Path(target) / "tokenizer_config.json").is_file():  # as `load_tokenizer` does
        target = base_of_adapters(target) or target
    folder = on_this_machine(target)
    if folder is None:
        return None
    if any((folder / name).exists() for name in CHAT_TEMPLATES):
        return True

    def beside(file: str) -> Mapping[str, Any]:
        try:
            return read_object(folder / file)
        except (OSError, ValueError):
            return {}

    if beside("tokenizer_config.json").get("chat_template") or template_beside(beside):
        return True
    described = (folder / name for name in ("tokenizer_config.json", "tokenizer.json"))
    return False if any(path.is_file() for path in described) else None


def check_room(section: str, new: int, model: str, limit: int | None) -> None:
    """Refuse completions longer than a context of so many tokens, less one token of prompt."""
    if limit is not None and new >= limit:
        raise ConfigError(
            f"{section}.max_new_tokens must leave room for a prompt: {model} has positions "
            f"for {limit} tokens, prompt included, got {new}; set it to {limit - 1} or less"
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


def check_depths_of(config: PipelineConfig) -> None:
    """Refuse a head of states that a draft with masks does not have. Raises ConfigError."""
    depths = block_of(config) or (config.draft.depths if config.draft else 1)
    if depths == 1 and config.models.draft:  # as many as it has learnt to
        depths = model_config(config.models.draft).get("depths", 1)
    if config.head:
        check_depths(config.head.kind, depths)


def loads_target(config: PipelineConfig, stage: str) -> bool:
    """True if a stage loads the target's weights in this process; "labels" goes for the head."""
    if stage == "rollouts":
        return config.rollouts.backend != "vllm"
    if stage == "logits":
        return config.logits is not None and config.logits.backend == "transformers"
    if stage == "draft":
        return config.draft is None or config.draft.logits is None
    return stage != "labels" or config.labels.logits is None


def check_loading(config: PipelineConfig, stage: str) -> None:
    """Refuse a target that every process of a stage would spread over the same devices."""
    load, local = config.models.load.target, local_process_count()
    if loads_target(config, stage) and load.is_spread and local > 1:
        raise ConfigError(
            f"models.load.target: device_map: {load.device_map} spreads the model over all devices "
            f"of a machine, and {local} processes on this one would each do so: start one process "
            "a machine"
        )


def check_models(config: PipelineConfig, *, here_alone: bool = False) -> None:
    """Refuse models without all of their weights, and tokenizers that differ, however stored.

    A plan takes them, and so does a target behind a server. With `here_alone` only of folders.
    """
    models = {name: base_of_adapters(name) or name for name in config.given_models}
    models = {name: base for name, base in models.items() if not is_made_here(config, name)}
    for name, base in models.items():
        if not Path(base).is_dir():
            if base != name and not is_hub_id(base):
                raise ConfigError(f"{name} holds adapters of {base}, and there is no such folder")
        elif not (Path(base) / "config.json").is_file():
            raise ConfigError(f"{base} has no config.json: give the folder of a saved model")
        elif is_without_weights(base):
            raise ConfigError(
                f"{base} has a config.json and no weights ({', '.join(WEIGHTS)}), which the "
                "evaluation reads: copy them there, or run the recipes before it one by one"
            )
        else:
            weight_files(base, for_transformers=True)
    looked = [name for name in models if not here_alone or Path(name).is_dir()]
    if config.models.target in looked:
        from specdata.models import prompt_limits

        prompt_limits(config.models.target, config.eval.max_new_tokens)
        shared_tokenizer(*looked)


def check_decodable(config: PipelineConfig) -> None:
    """Refuse models that an evaluation cannot decode with, and methods that they cannot do.

    By the configurations alone of models that are on this machine; with none of them, torch is not
    imported. Layers that a run cuts from its target are of the target's kind, and can be cut.
    """
    target, methods = config.models.target, config.eval.methods
    models = [
        name
        for name in config.given_models
        if not is_made_here(config, name) and "model_type" in model_config(name)
    ]
    if not models:
        return
    from distill.initial import new_draft
    from eval.runtime.transformers_models import (
        cached_layers,
        check_assisted,
        check_forward,
        check_trees,
    )
    from specdata.models import without_weights

    init = config.draft.init if config.draft else None
    for name in models:
        model = without_weights(name)
        if name == target and init is not None and init.kind in ("target", "states", "mtp"):
            with named("draft.init"):
                new_draft(model, init)
        with named(f"eval decodes with {name}, which is refused"):
            check_forward(model)
            cached_layers(model.config)
        for method in methods:
            with named(f"method {method.name!r} with {name}"):
                if method.branches:
                    check_trees(model)
                if method.decoder == "assisted" and name == target:
                    check_assisted(model)


def shared_tokenizer(target: str, *others: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises VocabularyMismatchError if another model's has other ids."""
    from specdata.models import check_shared_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(target)
    for name in others:
        check_shared_vocabulary(tokenizer, load_tokenizer(name))
    return tokenizer


def load_models(config: PipelineConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The target and the draft in use, which is attached to it if it reads its states."""
    from specdata.drafts.states_network import states_input
    from specdata.drafts.taps import attach
    from specdata.models import load_model

    models = config.models
    target = load_model(models.target, load=models.loading("target"))
    draft = load_model(config.draft_in_use, load=models.loading("draft"))
    if states_input(draft) is not None:
        attach(draft, target)
    return target, draft


def load_own_head(config: PipelineConfig, target: PreTrainedModel) -> PreTrainedModel:
    """The head that the target brings along, fed as by the engine that draft.init names."""
    from distill.drafts.mtp import own_head

    return own_head(target, config.draft.init.engine if config.draft else "vllm")


def load_draft_in_use(config: PipelineConfig) -> PreTrainedModel:
    """The draft in use. If it reads a target's states, each process loads one, unless attached."""
    from specdata.models import load_model  # here: it needs torch

    models = config.models
    return load_model(
        config.draft_in_use,
        load=models.loading("draft"),
        target=models.target,
        target_load=models.loading("target"),
    )


def load_head(source: str | Path, remedy: str = "") -> BaseHead:
    """A head from a folder or the Hub; if there is none, a ConfigError that ends in the remedy."""
    from heads import BaseHead

    try:
        return BaseHead.from_pretrained(source)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot load the head {str(source)!r}: {error}{remedy}") from error
