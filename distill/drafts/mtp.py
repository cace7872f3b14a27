"""The heads that targets bring along (MTP): how they begin, which is trained, and are read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill.config import check_layout
from distill.drafts import plain, states
from specdata.drafts.kind import KEY
from specdata.drafts.mtp import FAMILIES, FIRST, PARTS, Convention, Family
from specdata.drafts.mtp_network import mtp_class
from specdata.drafts.state_store import StateStore
from specdata.drafts.taps import attach, record_of
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.models import from_hub
from specdata.target_heads import TargetHead, find_head

states_by_place = states.states_by_place
WINDOW = "sliding_attention"


def begin(
    target: PreTrainedModel, source: plain.Source, _rollouts: Dataset, _seed: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The head in the target's folder, as it is there."""
    return own_head(target, source.init.engine), {}


def own_head(target: PreTrainedModel, engine: str) -> PreTrainedModel:
    """The head in a target's folder, fed as by an engine. Raises ConfigError."""
    return read_head(target, find_head(target.name_or_path), _convention(target, engine))


def read_head(
    target: PreTrainedModel,
    head: TargetHead,
    convention: Convention,
    store: StateStore | None = None,
) -> PreTrainedModel:
    """A draft that is a target's head, fed in a given way; see `attach`. Raises ConfigError."""
    architecture, config = type(target), _config_of(target, convention)
    loader_class: Any = mtp_class(architecture)
    loader_class.__name__, loader_class.__module__ = architecture.__name__, architecture.__module__
    read = turned(head.tensors(), head.text, convention)
    tensors = {_place(ours, convention): each for ours, each in read.items()}
    load = partial(
        loader_class.from_pretrained,
        None,
        trust_remote_code=False,
        config=config,
        state_dict=tensors,
        dtype=target.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below
    )
    draft, info = from_hub("head", target.name_or_path, load)
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{key} is not known" for key in sorted(info["unexpected_keys"])]
    wrong += [f"{each[0]} has another shape" for each in info["mismatched_keys"]]
    if wrong:
        raise ConfigError(
            f"the head of {target.name_or_path} does not fit its target's layers: {wrong[0]}, by "
            f"our names, and {len(wrong) - 1} more: it is of another target, or quantised"
        )
    draft.__class__ = architecture
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.to(target.device).eval()
    attach(draft, target, store)
    made: PreTrainedModel = draft
    return made


def turned(
    tensors: Mapping[str, Tensor],
    text: Mapping[str, Any],
    convention: Convention,
    *,
    back: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a head, with the rows of queries and keys where the target's layer has them.

    That turns neighbours, so what an engine turns in halves lies in pairs. `back` undoes it.
    """
    if not convention.rotates_halves:
        return {**tensors}
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    order = torch.arange(width).view(2, -1).T.flatten()  # 0, D/2, 1, D/2 + 1, ...
    order = order.argsort() if back else order
    return {
        name: each.view(-1, width, *each.shape[1:])[:, order].view(each.shape)
        if ".q_proj." in name or ".k_proj." in name
        else each
        for name, each in tensors.items()
    }


def of_shapes(target: PreTrainedModel, source: plain.Source) -> PreTrainedModel:
    """The draft that `begin` makes of a target on no device, there, too."""
    config = _config_of(target, _convention(target, source.init.engine))
    draft: Any = mtp_class(type(target))(config)
    draft.__class__ = type(target)
    draft.get_input_embeddings().borrow(target)
    made: PreTrainedModel = draft
    return made


def _family(target: PreTrainedModel) -> Family:
    text = target.config.get_text_config()
    check_layout("mtp", text.model_type, target.name_or_path)
    return FAMILIES[text.model_type]


def _convention(target: PreTrainedModel, engine: str) -> Convention:
    engines = _family(target).engines
    if engine not in engines:
        raise ConfigError(
            f"draft.init.engine must be one that drafts with the heads of {target.name_or_path}, "
            f"{' or '.join(engines)}, got {engine}"
        )
    return engines[engine]


def _config_of(target: PreTrainedModel, convention: Convention) -> Any:
    """The configuration of a head's one layer."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for key, value in _family(target).settings.items():
        if value == FIRST:
            (kind, *_), value = getattr(text, f"mtp_{key}", None) or getattr(text, key), [WINDOW]
            if kind != WINDOW:  # one of all tokens: full layers beside windows know no positions
                text.sliding_window = text.max_position_embeddings
        if hasattr(text, key):
            setattr(text, key, value)
    text.num_hidden_layers = 1
    config.tie_word_embeddings = text.tie_word_embeddings = False
    config.name_or_path = ""
    record = record_of(target, [target.config.get_text_config().num_hidden_layers])
    setattr(config, KEY, {**record, "mtp": asdict(convention)})
    return config


def _place(name: str, convention: Convention) -> str:
    """Our name of a tensor in a draft's state."""
    part = name.partition(".")[0]
    if part not in PARTS:
        return name
    if part != "norm":
        return f"model.embed_tokens.{name}"
    return f"model.{name}" if convention.normed_own else f"lm_head.{name}"
