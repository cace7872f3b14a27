"""Names of models: Hub ids, folders, and folders of PEFT adapters with the base they belong to."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from specdata.errors import ConfigError, without_passwords
from specdata.storage.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
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


def base_of_adapters(folder: str) -> str | None:
    """The model that a folder's adapters were trained in: a folder, or OWNER/NAME@REVISION.

    None if this is no folder of adapters alone: one with config.json has weights of its own.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file() or path.with_name("config.json").is_file():
        return None
    try:
        settings = read_object(path)
    except (OSError, ValueError):
        settings = {}
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    base_config = Path(str(base)) / ADAPTER_CONFIG  # adapters of adapters, perhaps of these
    if base_config.is_file() and not base_config.with_name("config.json").is_file():
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


def merge_adapters(model: PreTrainedModel, folder: str, base: str) -> PreTrainedModel:
    """Merge a folder's adapters into the base that they were trained in, in place."""
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    try:
        with warnings.catch_warnings():
            # PEFT asks transformers by a name that it will drop; what is missing is checked here.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            adapted = peft.PeftModel.from_pretrained(model, folder)
        adapter_keys = set(peft.load_peft_weights(folder, device="cpu"))
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
    return merged


def _other_base(folder: str, base: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the adapters in {folder} do not fit their base, {base}: {reason}. Give the model that "
        f"they were trained in as base_model_name_or_path of {Path(folder) / ADAPTER_CONFIG}, or a "
        "folder with the merged model"
    )
