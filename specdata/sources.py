"""Names of models: Hub ids, folders, and folders of PEFT adapters with the base they belong to."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specdata.errors import ConfigError, without_passwords
from specdata.storage.files import fingerprint, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
ADAPTER_CONFIG = "adapter_config.json"
WHOLE = ("model.safetensors.index.json", "model.safetensors")
WEIGHTS = (*WHOLE, "pytorch_model.bin.index.json", "pytorch_model.bin")
"""The index of weights in parts, or the file of all, by the names that transformers knows."""
FORMER_NAMES = {
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
}
"""Parts of wrappers as adapters of before transformers 4.52 name them: pattern -> now."""
NOT_MERGED = (
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY"),
    *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA"),
)
"""PEFT's methods (`peft_type`) that add tokens, states or choices, and no difference of weights."""


def hub_source(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME@REVISION; anything that exists here is a folder, whatever its name."""
    if without_passwords(name) != name:
        raise ConfigError(
            "a model's name must hold no password: give a folder or a Hub id, and log in with `hf "
            "auth login`"
        )
    source, at, revision = name.partition("@")
    return (source, revision) if at and not Path(name).exists() else (name, None)


def is_hub_id(name: str) -> bool:
    """True for what the Hub could call a model or data set, its revision aside: [OWNER/]NAME."""
    return bool(re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]{,95}", hub_source(name)[0]))


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json in a model's folder. Raises ConfigError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a folder with a config.json, and has none")
    return settings_in_file(path)


def settings_in_file(path: Path) -> dict[str, Any]:
    """The JSON object of a model's file. Raises ConfigError."""
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error


def weight_files(folder: str | Path, *, for_transformers: bool = False) -> list[Path]:
    """The files that hold a model's weights: what the index names, all of it, and nothing else.

    Without an index one file, and none if transformers would find none. Raises ConfigError if a
    file or a tensor is not where the index says, or a file holds more; and, `for_transformers`,
    which prefers the file to the index, if there are both.
    """
    name = _whole_weights(Path(folder))
    if not name.endswith(".index.json"):
        if name in WHOLE:
            _names_in(Path(folder) / name)
        return [Path(folder) / name] if name else []
    places = settings_in_file(Path(folder) / name).get("weight_map")
    if not (isinstance(places, dict) and places and all(type(p) is str for p in places.values())):
        raise ConfigError(f"weight_map in {Path(folder) / name} must name files: restore it")
    parts = {part: Path(folder) / part for part in sorted({*places.values()})}
    if missing := [part for part, path in parts.items() if not path.is_file()]:
        raise ConfigError(f"{folder} lacks {missing[0]}, which its {name} names: restore it")
    whole = name.removesuffix(".index.json")
    if for_transformers and (Path(folder) / whole).is_file() and whole not in parts:
        raise ConfigError(
            f"{folder} holds {whole}, which transformers reads, and {name}, which engines follow "
            "and which does not name it: remove the one that is not of this model"
        )
    for part, path in parts.items() if name in WHOLE else ():
        held = _names_in(path)
        if wrong := sorted(held ^ {key for key, place in places.items() if place == part}):
            raise ConfigError(
                f"{path} {'holds' if wrong[0] in held else 'lacks'} {wrong[0]}, and its {name} "
                f"says otherwise: one of them is of another model, restore both"
            )
    return [*parts.values()]


def _names_in(path: Path) -> set[str]:
    """The names of a file's tensors. Raises ConfigError."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {*file.keys()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error


def _whole_weights(folder: Path) -> str:
    """The file of a folder that holds, or names, all weights of a model; empty if there is none."""
    return next((each for each in WEIGHTS if (folder / each).is_file()), "")


def contents(source: str) -> str:
    """Identify a file, a folder or a Hub id by its content (`fingerprint`); adapters with a base.

    Raises ConfigError as `base_of_adapters`.
    """
    base = base_of_adapters(source)
    return f"{fingerprint(source)} in {contents(base)}" if base else fingerprint(source)


def base_of_adapters(folder: str) -> str | None:
    """The model that a folder's adapters were trained in: a folder, or OWNER/NAME@REVISION.

    None if this is no folder of adapters. Raises ConfigError where whole weights lie beside them:
    no file says whether the adapters are in those already.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    if whole := _whole_weights(path.parent):
        raise ConfigError(
            f"{folder} holds adapters ({ADAPTER_CONFIG}) and whole weights ({whole}), and nothing "
            "says whether these have the adapters merged in: if they have, remove adapter_*; if "
            "not, move the adapters to a folder of their own"
        )
    try:
        settings = read_object(path)
    except (OSError, ValueError):
        settings = {}
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    base_folder = Path(str(base))  # of adapters of adapters, perhaps of these
    if (base_folder / ADAPTER_CONFIG).is_file() and not _whole_weights(base_folder):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{folder} holds adapters, and its {ADAPTER_CONFIG} names no base model with weights "
            "of its own (base_model_name_or_path): merge them into their base (merge_and_unload of "
            "PEFT), and give the folder of the merged model"
        )
    changed = next(
        (key for key in ("alora_invocation_tokens", "layer_replication") if settings.get(key)), ""
    )
    if changed or settings.get("peft_type") in NOT_MERGED:
        raise ConfigError(
            f"{folder} holds adapters of {base} that cannot be merged into it ("
            f"{changed or settings['peft_type']} in {ADAPTER_CONFIG}), and nothing here reads them "
            "unmerged: give a model, or adapters that are differences of weights, such as LoRA's"
        )
    return f"{base}@{revision}" if revision and not Path(base).is_dir() else base


def template_beside(read: Callable[[str], Mapping[str, Any]]) -> Any:
    """The chat template that a processor's files hold, as some models have it; None without one.

    `read` gives what a JSON file beside the tokenizer says, nothing if there is none.
    """
    files = ("chat_template.json", "processor_config.json")
    found = next((held for file in files if (held := read(file).get("chat_template"))), None)
    if not isinstance(found, list):
        return found
    try:
        return {each["name"]: each["template"] for each in found}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"a list of chat templates must give each a name and a template ({error!r}), which "
            f"that in {' or '.join(files)} does not: restore the file"
        ) from error


def merge_adapters(
    model: PreTrainedModel, folder: str, base: str, wrapper: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Merge a folder's adapters into the base that they were trained in, in place.

    If that is a language model out of a `wrapper` in which they were trained, PEFT finds its
    modules in there, by their names; what the adapters have of other parts is left out.
    """
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    try:
        with warnings.catch_warnings():
            # PEFT asks transformers by a name that it will drop; what is missing is checked here.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            # Nothing is computed with the other parts of a wrapper, which are on no device.
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta", UserWarning)
            is_former = wrapper and "language_model" not in dict(wrapper.named_children())
            names = FORMER_NAMES if is_former else None
            adapter_keys = set(peft.load_peft_weights(folder, device="cpu", key_mapping=names))
            within = _put_inside(model, wrapper, adapter_keys) if wrapper else ""
            trained = wrapper if wrapper and within else model
            adapted = peft.PeftModel.from_pretrained(trained, folder, key_mapping=names)
        model_keys = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        # PEFT writes matrices of the base that it adapts or resizes beside them, and reads them.
        adapter_keys -= adapted.state_dict().keys() - model_keys
    except Exception as error:
        # torch's first line only announces the mismatches that it lists.
        lines = (str(error).strip() or repr(error)).splitlines()
        raise _other_base(folder, base, " ".join(map(str.strip, lines[:2]))) from error
    if different := sorted(adapter_keys ^ model_keys):
        where = "adapters" if different[0] in adapter_keys else "base"
        only = f"{len(different)} names are in one alone (first: {different[0]}, in the {where})"
        raise _other_base(folder, base, only)
    ends = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    if any(isinstance(each, BaseTunerLayer) for each in ends):  # a tied matrix would get both
        last = ends[1].get_base_layer() if isinstance(ends[1], BaseTunerLayer) else ends[1]
        last.weight = nn.Parameter(last.weight.detach().clone())
    try:
        merged: PreTrainedModel = adapted.merge_and_unload()
    except Exception as error:  # of PEFT: each method has its own
        raise ConfigError(
            f"PEFT does not merge the adapters in {folder} into their base, {base}: {error}. Give "
            "a folder with the merged model, or other adapters"
        ) from error
    if not within:
        return merged
    others = {key for key in adapter_keys if within not in key and ".lm_head." not in key}
    if others:
        logger.warning(
            "%s: %s tensors of its adapters are left out, of parts of %s that no text passes "
            "(first: %s)",
            *(folder, len(others), base, min(others)),
        )
    model.set_output_embeddings(merged.get_output_embeddings())
    return model


def _put_inside(model: PreTrainedModel, wrapper: PreTrainedModel, keys: Set[str]) -> str:
    """Put a language model where its wrapper has it, if adapters name their modules there.

    The name of that place; empty if none of them is in the wrapper alone.
    """
    modules = [{name for name, _ in each.named_modules()} for each in (model, wrapper)]
    depths = []
    for key in keys:
        parts = key.removeprefix("base_model.model.").split(".")
        starts = [".".join(parts[:end]) for end in range(len(parts))]
        depths.append([max(map(len, names.intersection(starts))) for names in modules])
    if not any(inside > alone for alone, inside in depths):
        return ""
    kind = type(model.base_model)
    place: str = next(name for name, each in wrapper.named_modules() if type(each) is kind)
    wrapper.set_submodule(place, model.base_model)
    wrapper.set_output_embeddings(model.get_output_embeddings())
    return place


def _other_base(folder: str, base: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the adapters in {folder} do not fit their base, {base}: {reason}. Give the model that "
        f"they were trained in as base_model_name_or_path of {Path(folder) / ADAPTER_CONFIG}, or a "
        "folder with the merged model"
    )
