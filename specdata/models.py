"""Causal language models and tokenizers: loaded, and compared."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from specdata.drafts import is_for_engines, kind_of
from specdata.drafts.draft_vocabulary import SIZE, is_reduced, reduced_class, settle
from specdata.drafts.kind import KEY
from specdata.drafts.states_network import MODEL_TYPE, TargetStates, reads_states, states_input
from specdata.drafts.taps import attach
from specdata.errors import ConfigError, trouble_outside
from specdata.loading import ONE_DEVICE, Loading, check_vocabularies, contradictions, reach, shorter
from specdata.sources import (
    base_of_adapters,
    contents,
    hub_source,
    merge_adapters,
    settings_in_file,
    template_beside,
    weight_files,
)

T = TypeVar("T")
LARGEST_SIZES = {"num_hidden_layers": 4096, "vocab_size": 2**31, "max_position_embeddings": 2**31}
"""Sizes that every model has; more layers would be made one by one before any weight is missed."""
LANGUAGE_MODEL = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
"""What wrappers call the weights of their language model: pattern -> its beginning there."""
OUTPUTS = {
    **{"output_router_logits": False, "output_attentions": False, "output_hidden_states": False},
    "return_dict": True,
}
"""What a forward returns, whatever config.json says: training leaves other words there."""
FORMER = re.compile(r"rotary_emb\.|inv_freq$|masked_bias$|causal_mask$|(attn|attention)\.bias$")
"""Tensors that follow from others, which earlier versions of transformers stored."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    load: Loading = ONE_DEVICE,
    target: str | None = None,
    target_load: Loading = ONE_DEVICE,
) -> Any:
    """Load a causal LM from a folder or the Hub, in eval mode.

    Code that comes with a model is never run: see `from_hub`. A draft with a reduced vocabulary
    (`specdata.drafts.draft_vocabulary`) gets logits as wide as its vocabulary all the same.
    `device` of a model that is spread over several places is the one that token ids go to.

    Args:
        name: a folder, or a Hub id OWNER/NAME[@REVISION]. Adapters in a folder (PEFT's) are merged
            into the base that they name.
        dtype: precision of the weights, one of `DTYPES`, unless `load` has one.
        load: where they lie; by default all on `device()`.
        target: where the target is whose states a draft reads; by default where it was when the
            draft was made. It is loaded when the draft first reads a text, unless one was attached
            (`specdata.drafts.taps.attach`).
        target_load: how that is loaded; by default in the draft's precision.
    """
    dtype = load.dtype or dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if base := base_of_adapters(name):
        if load.is_spread:
            raise ConfigError(
                f"device_map: {load.device_map} needs whole weights, and {name} holds adapters: "
                "merge them first (merge_and_unload of PEFT) and give the merged model, or leave "
                "it out"
            )
        alone = Loading(device_map=load.device_map)
        model = _of_base(name, base, lambda: load_model(base, dtype=dtype, load=alone))
        merged = merge_adapters(model, name, base, _wrapper(base))
        return _named(_tied_as_stored(merged).eval(), name)
    source, revision = hub_source(name)
    files = weight_files(source, for_transformers=True) if Path(source).is_dir() else []
    model, info = from_hub("model", name, lambda: read_model(source, revision, DTYPES[dtype], load))
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"{name} holds adapters beside whole weights, and transformers loads their base "
            f"instead of these: hf download {name} --local-dir FOLDER, remove there adapter_* if "
            "the weights have them merged in, else config.json and the weights, and give FOLDER"
        )
    if reads_states(model.config) and (unknown := sorted(info["unexpected_keys"])):
        raise ConfigError(
            f"{KEY} in the config.json of {name!r} must be as it was written: the weights hold "
            f"{unknown[0]}, of which it says nothing; restore it"
        )
    _check_weights(name, model, info)
    if getattr(model.config, "quantization_config", None) is None:
        _check_numbers(name, files)
    model = _named(_placed(model, name, load).eval(), name)
    if reads_states(model.config):
        reader, place = states_input(model), target or TargetStates.of(model.config).target
        assert reader is not None

        def read(ids: Tensor) -> Tensor:
            if reader.read_target is read:  # else a copy of the draft asks
                try:
                    target_model = load_model(place, dtype=dtype, load=target_load)
                except ConfigError as error:
                    raise ConfigError(
                        f"{name} reads the states of its target, which is looked for at {place}: "
                        "put it there, or say in target_states of its config.json where it is. "
                        f"{error}"
                    ) from error
                attach(model, target_model)
            return reader.read_target(ids)

        reader.read_target = read
    return model


def _check_weights(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Refuse weights that are missing, and those of a module that exists which nothing would read.

    transformers would only log both. A tensor belongs to the innermost module around it: scales of
    quantised weights and biases to one that has weights, what an architecture lacks to a layer.
    Other heads, vision towers and layers that predict further tokens belong to none.
    """
    modules, buffers = dict(model.named_modules()), {name for name, _ in model.named_buffers()}
    layers = [key for key, module in modules.items() if isinstance(module, nn.ModuleList)]
    further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    predicting = {key.rpartition(".eh_proj.")[0] for key in info["unexpected_keys"]}
    unread = []
    for key in sorted({*info["unexpected_keys"]} - buffers):
        inside = key
        while (inside := inside.rpartition(".")[0]) not in modules:
            pass
        module, index = modules[inside], key.removeprefix(f"{inside}.").partition(".")[0]
        if isinstance(module, nn.ModuleList) and index.isdecimal():
            is_own = int(index) - len(module) >= further and f"{inside}.{index}" not in predicting
        else:
            is_leaf = not [*module.children()]
            is_own = is_leaf or any(inside.startswith(f"{each}.") for each in layers)
        if is_own and not FORMER.search(key):
            unread.append(key)
    if unread:
        raise ConfigError(
            f"the weights of {name!r} hold {len(unread)} tensors that nothing would read (first: "
            f"{unread[0]}), so it would compute something else: config.json is of another model "
            "(restore it), or they are quantised in a form that transformers does not load (give "
            "the model in 16 bits)"
        )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"the weights of {name!r} do not fit its configuration: {len(missing)} are missing "
            f"(first: {missing[0]}); save it again with save_pretrained"
        )


def _check_numbers(name: str, files: Sequence[Path]) -> None:
    """Refuse weights of 8-bit whole numbers, which transformers would take as they stand."""
    for path in (each for each in files if each.suffix == ".safetensors"):
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118, not a dict
                if key.endswith("weight") and file.get_slice(key).get_dtype() in ("I8", "U8"):
                    raise ConfigError(
                        f"{key} of {name!r} is in 8-bit whole numbers, and its config.json has no "
                        "quantization_config to say what they mean: restore it, or give the model "
                        "in 16 bits"
                    )


def _named(model: Any, name: str) -> Any:
    """A model that is called as it was asked for, its adapters or revision included."""
    model.name_or_path = model.config.name_or_path = name
    return model


def read_model(
    source: str, revision: str | None, dtype: torch.dtype | str, load: Loading = ONE_DEVICE
) -> tuple[Any, dict[str, Any]]:
    """Load as transformers does, drafts with a reduced vocabulary, too.

    Of a wrapper (`...ForConditionalGeneration`) only the language model is loaded. With one device
    it lies on the CPU at first. Also returns what transformers says of keys that are missing,
    unexpected or misfit; raises its OSError and ValueError.
    """
    whole, options = _config(source, revision), _options(load)
    config, loader_class = _language_model(whole)
    if config is not whole:
        options |= {"config": config, "key_mapping": LANGUAGE_MODEL}
    loader_class, architecture = _class_of(config, loader_class)
    if architecture is not None:
        options["config"] = config
    model, info = loader_class.from_pretrained(
        source,
        dtype=dtype,
        revision=revision,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
    if config is not whole:
        model._weight_conversions = None  # it is saved as a language model, not as the wrapper
    if architecture is not None:
        model.__class__ = architecture
    for each in (model.config, model.config.get_text_config()):
        each.update({key: value for key, value in OUTPUTS.items() if hasattr(each, key)})
    return _tied_as_stored(settle(model) if is_reduced(config) else model), info


def _tied_as_stored(model: Any) -> Any:
    """A model whose `tie_word_embeddings` says no more than its matrices do.

    transformers 5 ties no two that are stored and differ, and saves the flag as it was; earlier
    ones and engines would tie them then. Inkling's configurations have no such key.
    """
    text, output = model.config.get_text_config(), model.get_output_embeddings()
    if getattr(text, "tie_word_embeddings", False) and output is not None:
        weight = model.get_input_embeddings().weight
        if output.weight is not weight and not output.weight.is_meta:
            model.config.tie_word_embeddings = text.tie_word_embeddings = False
    return model


def _class_of(config: PreTrainedConfig, loader_class: Any) -> tuple[Any, Any]:
    """The class that a language model is loaded with, and the one that it then becomes, if other.

    `loader_class` is the one that loads a model of transformers as it is.
    """
    kind = kind_of(config)
    if not is_reduced(config) and not kind.reads_states:
        return loader_class, None
    with torch.device("meta"):
        loader_class = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    architecture = loader_class
    if kind.reads_states:
        from specdata.drafts.networks import NETWORKS  # here: the code of several families

        loader_class = NETWORKS[kind.name](loader_class)
    # The output of kinds that have layouts is as engines have it, whatever they hold of this one.
    if is_reduced(config) and not kind.layouts:
        loader_class = reduced_class(loader_class, getattr(config, SIZE))
    # By these transformers looks up under which names an architecture stores its weights.
    loader_class.__name__, loader_class.__module__ = architecture.__name__, architecture.__module__
    return loader_class, architecture


def _config(source: str, revision: str | None) -> PreTrainedConfig:
    """A model's configuration; of a draft on its target's states, that of its layers."""
    values, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    if is_for_engines(values):
        raise ConfigError(
            "it is in a layout of engines, and is read once: draftsmith import FOLDER --target "
            "TARGET --out DRAFT. Give DRAFT"
        )
    if (beside := Path(source) / "generation_config.json").is_file():
        settings_in_file(beside)  # transformers takes a damaged one for none: other end tokens
    for size, most in LARGEST_SIZES.items():
        if isinstance(found := values.get(size), int) and not 0 < found <= most:
            raise ConfigError(f"{size} in config.json must be from 1 to {most}, it is {found}")
    for part in (values, values.get("text_config")):
        if wrong := contradictions(part) if isinstance(part, Mapping) else []:
            raise ConfigError(f"config.json must say one thing once: {wrong[0]}; mend it")
    if values.get("model_type") == MODEL_TYPE:
        values |= {"model_type": TargetStates.of(values).model_type, "name_or_path": source}
        config = AutoConfig.for_model(**values)
    else:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    return config


def _language_model(config: PreTrainedConfig) -> tuple[PreTrainedConfig, Any]:
    """The configuration of the language model in a wrapper's, and the class that reads it.

    Any other configuration is its own.
    """
    text = getattr(config, "text_config", None)
    if not isinstance(text, PreTrainedConfig):
        return config, AutoModelForCausalLM
    loader_classes: list[Any] = [
        MODEL_FOR_CAUSAL_LM_MAPPING[each]
        for each in (type(text), type(config))
        if each in MODEL_FOR_CAUSAL_LM_MAPPING
    ]
    loader_class = next((each for each in loader_classes if each.config_class is type(text)), None)
    if loader_class is None:
        return config, AutoModelForCausalLM
    text.name_or_path = config.name_or_path
    # The wrapper's own words; transformers ties no matrices that are both stored.
    ties = (getattr(each, "tie_word_embeddings", False) for each in (text, config))
    text.tie_word_embeddings = any(ties)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantized
    text.dtype = text.dtype or config.dtype
    return text, loader_class


def _wrapper(name: str) -> PreTrainedModel | None:
    """The wrapper that a language model is loaded out of, its weights on no device, if any."""
    source, revision = hub_source(name)
    config = _config(source, revision)
    if _language_model(config)[0] is config:
        return None
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        return None
    with torch.device("meta"):
        wrapper: PreTrainedModel = architecture(config)
    return wrapper


def _options(load: Loading) -> dict[str, Any]:
    """A loading as arguments of transformers' `from_pretrained`."""
    options: dict[str, Any] = {}
    if load.attn_implementation:
        options["attn_implementation"] = load.attn_implementation
    if load.device_map:
        options |= {"device_map": load.device_map, "offload_folder": load.offload_folder}
    if load.max_memory is not None:  # accelerate takes GPUs by number
        count = torch.cuda.device_count()
        if absent := [key for key in load.max_memory if key.isdecimal() and int(key) >= count]:
            raise ConfigError(
                f"max_memory names GPU {absent[0]}, and this machine has {count or 'no'} "
                f"GPU{'' if count == 1 else 's'} (numbered from 0): name those that it has, and cpu"
            )
        options["max_memory"] = {
            int(key) if key.isdecimal() else key: size for key, size in load.max_memory.items()
        }
    return options


def _placed(model: Any, name: str, load: Loading) -> Any:
    """A model where it belongs, if transformers has not put it there yet."""
    if load.device_map is None:
        return model.to(device())
    if model.device.type == "meta":
        raise ConfigError(
            f"no layer of {name} lies in memory: device_map: {load.device_map} put its first on "
            "the disk already; allow more in max_memory, or leave that out"
        )
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, without running code that comes with it."""
    if not (Path(name) / "tokenizer_config.json").is_file() and (base := base_of_adapters(name)):
        return _of_base(name, base, lambda: load_tokenizer(base))
    source, revision = hub_source(name)
    options: dict[str, Any] = {"revision": revision}

    def load() -> PreTrainedTokenizerBase:
        with suppress(OSError, ValueError):  # a tokenizer alone, or what is refused below
            options["config"] = _config(*hub_source(base_of_adapters(name) or name))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        # Mistral published tokenizers that split by another rule than its models learned with; of
        # those that may be such transformers warns alone.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_doubtful = getattr(backend, "fix_mistral_regex", None) is False
        if is_doubtful and "[INST]" in tokenizer.get_vocab():
            options["fix_mistral_regex"] = True
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        if type(tokenizer).__name__ == "MistralCommonBackend":
            raise ConfigError(
                f"transformers reads tekken.json of {name} with mistral-common, which is installed"
                " (by vLLM, say) and renders no chat template: give a folder without that file,"
                " with its tokenizer.json (hf download NAME --exclude tekken.json), or uninstall"
                " mistral-common"
            )
        special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        if not tokenizer.get_vocab().keys() - special:
            raise ConfigError(
                f"{name} holds no vocabulary (tokenizer.json, or the files of its kind), of which "
                "transformers makes a tokenizer without words: put the tokenizer's files there"
            )
        if not tokenizer.chat_template:
            tokenizer.chat_template = template_beside(beside)
        return tokenizer

    def beside(file: str) -> Mapping[str, Any]:
        path = None
        with suppress(OSError):  # it is not there, or the Hub not reached
            path = cached_file(source, file, revision=revision)
        return settings_in_file(Path(path)) if path else {}

    return from_hub("tokenizer", name, load)


def revision_of(name: str) -> str:
    """The identity of a loaded model: its commit on the Hub, or what its folder holds."""
    source, revision = hub_source(name)
    if not Path(source).exists():
        # Only the cache tells which commit a branch was when it was loaded.
        path = try_to_load_from_cache(source, "config.json", revision=revision or "main")
        if isinstance(path, str):
            return Path(path).parent.name
    return contents(name)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_configs(name: str) -> tuple[PreTrainedConfig, GenerationConfig]:
    """A model's configuration and its generation configuration, without its weights."""
    if base := base_of_adapters(name):
        return _of_base(name, base, lambda: load_configs(base))
    source, revision = hub_source(name)

    def load() -> tuple[PreTrainedConfig, GenerationConfig]:
        config, _ = _language_model(_config(source, revision))
        try:
            return config, GenerationConfig.from_pretrained(source, revision=revision)
        except OSError:  # it has no generation_config.json; of a wrapper, its own words count
            options = {"config_file_name": "config.json", "_from_model_config": True}
            return config, GenerationConfig.from_pretrained(source, revision=revision, **options)

    return from_hub("model configuration", name, load)


def without_weights(name: str) -> Any:
    """A model as its configuration describes it, its weights on no device."""
    config, _ = load_configs(name)

    def make() -> Any:
        kind, architecture = _class_of(config, AutoModelForCausalLM)
        if architecture is None:
            return kind.from_config(config, trust_remote_code=False)
        model = kind(config)
        model.__class__ = architecture
        return model

    with torch.device("meta"):
        return from_hub("model", name, make)


def positions(config: PreTrainedConfig) -> int:
    """The longest sequence that a model has positions for, in tokens; sys.maxsize if unlimited."""
    text = config.get_text_config()
    # Not all have these in their own dictionary: GPT-2 and its kin have other names.
    named = {key: getattr(text, key, None) for key in ("max_position_embeddings", "model_type")}
    return reach({**vars(text), **named}) or sys.maxsize


def ends_first(draft: PreTrainedModel, target: PreTrainedModel, name: str = "") -> str:
    """That a draft ends before its target (`shorter`); `name` is the draft's if it has none."""
    return shorter(name or draft.name_or_path, positions(draft.config), positions(target.config))


def length_dependent_rope(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """The parameters of a rope whose frequencies depend on the sequence's length, if any."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Some models have one for each kind of layer.
    ropes = [parameters, *(rope for rope in parameters.values() if isinstance(rope, Mapping))]
    return next((rope for rope in ropes if rope.get("rope_type") in ("dynamic", "longrope")), None)


def check_length(config: PreTrainedConfig, longest: int) -> None:
    """Raise ConfigError if a model has fewer than `longest` positions (tokens)."""
    limit = positions(config)
    if longest > limit:
        raise ConfigError(
            f"the longest prompt and max_new_tokens make {longest} tokens, but "
            f"{config.name_or_path or 'the model'} has positions for {limit}: lower "
            "max_new_tokens or leave out long prompts"
        )


def check_ids(vocabulary: int, least: int, largest: int) -> None:
    """Raise ConfigError if the least or largest id of texts is none of a model's vocabulary."""
    if not 0 <= least <= largest < vocabulary:
        raise ConfigError(
            f"token ids must be from 0 to {vocabulary - 1}, for which the model has rows, and a "
            f"text has {least} to {largest}: it is another model's, or damaged, or its tokenizer "
            "has ids that the model has not; leave it out, or make the rollouts again"
        )


def prompt_limits(name: str, max_new_tokens: int) -> dict[str, Any]:
    """What `load_prompts` asks of a model's prompts, without its weights.

    They leave it room for completions (`max_tokens`), and have ids in its `vocabulary`.
    """
    config, _ = load_configs(name)
    check_length(config, 1 + max_new_tokens)
    return {
        "max_tokens": positions(config) - max_new_tokens,
        "vocabulary": config.get_text_config().vocab_size,
    }


def known_ids(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """Token ids that a model can read, same shape.

    Embedding matrices of one family are padded to different sizes. An id that only the other
    model has gets a stand-in: a worse guess follows, never another distribution of the target.
    """
    return torch.where(ids < model.config.get_text_config().vocab_size, ids, 0)


def end_ids(generation: GenerationConfig) -> frozenset[int]:
    """Token ids that end a sequence. Raises ConfigError if they are none."""
    ids = generation.eos_token_id
    if ids is None:
        return frozenset()
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list | tuple) or not all(
        type(token) is int and token >= 0 for token in ids
    ):
        raise ConfigError(
            f"eos_token_id in a model's generation_config.json must be token ids, got {ids!r}"
        )
    return frozenset(ids)


def _of_base(name: str, base: str, load: Callable[[], T]) -> T:
    """Load something of the model that the adapters in a folder belong to."""
    try:
        return load()
    except ConfigError as error:
        raise ConfigError(
            f"{name} holds adapters of {base}, and that cannot be used: {error}"
        ) from error


def from_hub(what: str, name: str, load: Callable[[], T]) -> T:
    """Load something (`what`) that transformers reads, with errors that say what to do."""
    try:
        return load()
    except Exception as error:
        if outside := trouble_outside(error):  # the cache of the Hub is on a disk
            raise outside from error
        if name.lower().endswith(".gguf"):
            raise ConfigError(
                f"{name} is a GGUF file: read it once with transformers' from_pretrained(FOLDER, "
                "gguf_file=...), save model and tokenizer as benchmarks/real_target.py does, "
                "and give that folder"
            ) from error
        # Every from_pretrained here passes trust_remote_code=False. Without it transformers asks on
        # the terminal, and whatever answers "y" there runs the code.
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise ConfigError(
                f"the {what} {name!r} needs code that comes with it (auto_map in its config.json "
                "or tokenizer_config.json), and such code is never run here: give one whose "
                "architecture transformers itself has"
            ) from error
        reason, *more = (str(error).strip() or repr(error)).splitlines()
        reason += more[0] if more and reason.endswith(":") else ""  # of a config.json's field
        advice = (
            "transformers has no causal language model of this kind"
            if "Unrecognized configuration class" in str(error)
            else f"check the files of the {what} there"
            if Path(name).exists()
            else f"give a folder with a saved {what} or a Hub id that can be reached (gated ones "
            "need `hf auth login`)"
        )
        raise ConfigError(f"cannot load the {what} {name!r}: {advice}. {reason}") from error


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of a tokenizer's vocabulary, stored with everything made with it."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()[:16]


def check_shared_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> None:
    """Compare two tokenizers id by id. Sizes of embedding matrices may differ by padding."""
    check_vocabularies(
        *({index: token for token, index in each.get_vocab().items()} for each in (target, draft))
    )
