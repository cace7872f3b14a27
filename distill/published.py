"""Drafts in layouts that engines hold: written to folders, and read.

A folder holds a config.json and safetensors in speculators' layout, or in that of the method's own
code, which is in the file of each kind. Every tensor must be there and known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict, Field, PositiveFloat, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from specdata.config import Config, fields_of, read_stored
from specdata.drafts import DRAFT_KINDS, kind_of
from specdata.drafts.draft_vocabulary import SIZE
from specdata.drafts.kind import KEY
from specdata.drafts.states_network import TargetStates
from specdata.drafts.taps import attach
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.loading import ROPES, SAME, contradictions
from specdata.saving import copy_tokenizer
from specdata.sources import WHOLE, config_of, weight_files
from specdata.storage.files import write_json

METADATA = (
    *("architectures", "auto_map", "attention_dropout", "base_model_ep_plan", "base_model_pp_plan"),
    *("base_model_tp_plan", "draft_vocab_size", "dtype", "embed_requires_grad", "name_or_path"),
    *("confidence_head_alpha", "sliding_window_non_causal"),
    *("has_no_defaults_at_init", "initializer_range", "max_window_layers", "_name_or_path"),
    *("num_anchors", "pretraining_tp", "sliding_window", "model_type"),
    *("modal_type", "output_router_logits", "router_aux_loss_coef", "use_mrope"),
    *("speculators_config", "speculators_version", "target_hidden_size", "target_model_type"),
    *("torch_dtype", "tie_word_embeddings", "vocab_size", *GenerationConfig().to_dict()),
)
"""Keys of published config.json files that change nothing of what is computed. Of Llama's layers
`sliding_window` is one: engines apply it where `layer_types` says so. Matrices are tied if one is
not stored."""
FIXED_VALUES: Mapping[str, Any] = {
    **{"decoder_sparse_step": 1, "use_sliding_window": False},
    **{"partial_rotary_factor": 1.0, "embedding_multiplier": 1.0, "use_aux_hidden_state": True},
    **{"torchscript": False, "use_bfloat16": False, "is_decoder": False, "pruned_heads": {}},
}
"""Keys that would change it, with the one value that is computed here."""
LAYERS = "transformer_layer_config"
"""A section of such files whose keys are read as those beside it, as those of a method's are."""
UNREAD_TENSORS = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "confidence_head.")
"""Tensors that are the target's, follow from others, or are a head's."""
TOKEN_ROWS, FC = "model.embed_tokens.tokens.weight", "model.embed_tokens.states.weight"
MAPS = ("d2t", "t2d")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
IN_PARTS = re.compile(r"-of-\d+\.safetensors$")


class PublishedConfig(Config):
    """A part of a published config.json: what is read of it; more may be there."""

    model_config = ConfigDict(extra="ignore")


class Roped(PublishedConfig):
    """A part of a published config.json that says how positions turn."""

    model_type: str = Field("llama", exclude=True)
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @field_validator(*ROPES)
    @classmethod
    def _of_text(cls, rope: dict[str, Any] | None) -> dict[str, Any] | None:
        if rope and any(isinstance(each, dict) for each in rope.values()):
            raise ValueError("must be one rope for all layers, and has one for each kind of them")
        if rope and (rope.get("rope_type") or rope.get("type")) == "mrope":
            return {**rope, "rope_type": SAME["mrope"]}
        return rope

    @model_validator(mode="after")
    def _says_its_base(self) -> Roped:
        """Refuse silence where it means another base to engines than to Llama's layers."""
        base = usual = LlamaConfig.default_theta
        if self.model_type in CONFIG_MAPPING:  # whose `get` finds nothing
            base = getattr(CONFIG_MAPPING[self.model_type], "default_theta", usual)
        said = self.rope_theta or (self.rope_parameters or {}).get("rope_theta")
        if said is None and base != usual:
            raise ValueError(f"rope_theta is not said, which means {base} to {self.model_type}")
        return self


class Finding(NamedTuple):
    """One finding of an examination of a draft."""

    kind: str
    about: str
    text: str


class Published(NamedTuple):
    """The content of a folder: config.json, tensors by our names, the (N,) ids of its tokens."""

    settings: dict[str, Any]
    tensors: Mapping[str, Tensor]
    ids: Tensor
    target: PreTrainedModel
    name: str

    def layers(self, kind: type[PublishedConfig]) -> dict[str, Any]:
        """The sizes of its layers. Raises ConfigError."""
        layer = self.settings.get(LAYERS, self.settings)
        if isinstance(layer, dict):
            beside = {key: each for key, each in self.settings.items() if key != "model_type"}
            layer = {**beside, **layer}
        where = f"the layer of {self.name}'s config.json"
        return read_stored(kind, layer, where).model_dump(exclude_none=True)

    def with_target_matrices(self) -> Published:
        """Fill in the target's matrices where none is stored, and leave out the maps."""
        head = self.target.get_output_embeddings().weight.detach()[self.ids]
        shared = {TOKEN_ROWS: self.target.get_input_embeddings().weight, "lm_head.weight": head}
        tensors = {key: each for key, each in {**shared, **self.tensors}.items() if key not in MAPS}
        return self._replace(tensors=tensors)


@dataclass(frozen=True, slots=True)
class Layout:
    """The form in which engines hold a kind of draft."""

    tensors: Mapping[str, str]  # how names begin, and ours
    section: str  # of config.json, whose keys are read as those beside it
    config_classes: tuple[type, ...]  # of config.json
    # As `FIXED_VALUES`, of this layout; functions of config.json where it says the same elsewhere.
    fixed_values: Mapping[str, Any]
    # Of a config.json and a target, the taps and the flags that decide what is computed.
    taps_of: Callable[[dict[str, Any], PreTrainedModel], tuple[list[int], dict[str, bool]]]
    # The draft of a folder, taps and flags.
    build: Callable[[Published, Sequence[int], Mapping[str, bool]], PreTrainedModel]
    # The tensors and the config.json of a folder for engines. Of a draft of ours: its config.json,
    # what that says of the target, and its tensors; and weight and bias of a linear acceptance head
    # whose sigmoid is a probability, if one is asked.
    to_engine_files: Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]
    doubtful_flags: tuple[str, ...] = ()  # may be wrong in a config.json whose tensors are right
    # Of a config.json, why its ids may mean the taps one layer behind those read; "" if nothing is.
    doubtful_taps: Callable[[Mapping[str, Any]], str] = lambda _: ""
    ignored: tuple[str, ...] = ()  # as `METADATA`, of this layout
    # Keys that config.json must have, since engines differ in what silence means, and why.
    required_keys: Mapping[str, str] = field(default_factory=dict)
    # Of a config.json, tensors' names and a target, what engines take otherwise than was meant.
    traps: Callable[..., Iterator[Finding]] = lambda *_: iter(())

    def theirs(self, name: str) -> str:
        """The name of one of our tensors in this layout."""
        return renamed(name, {ours: former for former, ours in self.tensors.items()})


def not_computed(settings: dict[str, Any], layout: Layout) -> list[str]:
    """List what a config.json asks that is not computed or known here, or contradicts itself."""
    read = {key for each in layout.config_classes for key in fields_of(each)}
    fixed = {
        key: value(settings) if callable(value) else value
        for key, value in {**FIXED_VALUES, **layout.fixed_values}.items()
    }
    known = {*METADATA, *layout.ignored, layout.section, LAYERS, *read}
    defaults = PreTrainedConfig().to_dict()
    found = [
        f"{key} is not said, and engines differ in what that means: {what}"
        for key, what in layout.required_keys.items()
        if key not in settings
    ]
    sections = (settings.get(name) for name in (layout.section, LAYERS))
    parts = [part for part in sections if isinstance(part, dict)]
    twice = {*read, *layout.fixed_values} - {"model_type"}
    for key, value in (pair for part in (settings, *parts) for pair in part.items()):
        if key in twice and settings.get(key, value) != value:
            found.append(f"{key} is said twice, {settings[key]!r} and {value!r}")
        if isinstance(value, dict) and value.get("partial_rotary_factor", 1.0) != 1.0:
            found.append(f"partial_rotary_factor in {key} must be 1.0, the one computed here")
        if value is None or key in known or (key in defaults and value == defaults[key]):
            continue
        if key.endswith("_token_id"):  # of images, sounds and the like, which no draft reads here
            continue
        if key not in fixed:
            found.append(f"{key} ({value!r}) is not known here, and may change what is computed")
        elif value != fixed[key]:
            found.append(f"{key} must be {fixed[key]!r}, the one computed here, it is {value!r}")
    found += [each for part in (settings, *parts) for each in contradictions(part)]
    return list(dict.fromkeys(found))


def ids_of(tensors: Mapping[str, Tensor], target: PreTrainedModel, name: str) -> Tensor:
    """(N,) the ids of the tokens that a draft proposes."""
    vocabulary = target.config.get_text_config().vocab_size
    head = tensors.get("lm_head.weight", tensors.get("d2t"))
    rows = vocabulary if head is None else len(head)
    if "d2t" not in tensors and rows < vocabulary:
        raise ConfigError(
            f"{name} has no d2t: it must say which of the target's {vocabulary} tokens the "
            f"{rows} rows of lm_head are"
        )
    added = tensors.get("d2t", torch.zeros(rows, dtype=torch.long))
    if added.shape != (rows,):
        raise ConfigError(
            f"d2t in {name} must have a number for each of the {rows} rows of lm_head, it has "
            f"the shape {[*added.shape]}"
        )
    ids = torch.arange(rows) + added
    if not (int(ids[0]) >= 0 and bool((ids.diff() > 0).all()) and int(ids[-1]) < vocabulary):
        raise ConfigError(
            f"d2t in {name} must give ids below {vocabulary}, the target's vocabulary, in "
            "order and each once: it holds what is added to 0, 1, 2, ..., no ids"
        )
    if (t2d := tensors.get("t2d")) is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise ConfigError(
            f"t2d marks other tokens than d2t names in {name}: one of them is of another draft"
        )
    return ids


def filled(
    layout: Layout,
    architecture: type[PreTrainedModel],
    network: Callable[[type[PreTrainedModel]], type[PreTrainedModel]],
    given: Published,
) -> PreTrainedModel:
    """A draft of a configuration of ours and its tensors."""
    settings, tensors, ids, target, name = given
    text = target.config.get_text_config()
    size = {"vocab_size": text.vocab_size, SIZE: len(ids)}
    special = {key: getattr(text, key, None) for key in SPECIAL}  # else those of Llama's own
    try:
        config = architecture.config_class.from_dict(
            {**special, **settings, **size, "tie_word_embeddings": False}
        )
        with torch.device("meta"):  # sizes may be any until they are those of the tensors
            expected = network(architecture)(config).state_dict()
    except Exception as error:  # of transformers and torch: whatever they make of these values
        raise ConfigError(f"config.json of {name} describes no layer: {error!r}") from error
    shapes = {key: each.shape for key, each in expected.items() if key not in MAPS}
    found = {key: each.shape for key, each in tensors.items()}
    for what, wrong in (
        ("are missing", shapes.keys() - found.keys()),
        ("are not known", found.keys() - shapes.keys()),
        ("have another shape", {key for key in shapes.keys() & found if shapes[key] != found[key]}),
    ):
        if wrong:
            first = min(wrong)
            got = f"{[*found.get(first, ())]}, expected {[*shapes.get(first, ())]}"
            raise ConfigError(
                f"{len(wrong)} tensors of {name} {what} (as {layout.theirs(first)}, {got}): flags "
                "or taps in config.json are others, or it is of another target or layout"
            )
    draft: Any = network(architecture)(config)
    draft.load_state_dict(tensors, strict=False)
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.d2t, draft.t2d = ids - torch.arange(len(ids)), t2d
    draft.get_output_embeddings().vocabulary_ids = ids
    draft.__class__ = architecture
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    attach(draft, target)
    made: PreTrainedModel = draft
    return made


def stored(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder. Raises ConfigError if there are none, or a file is damaged."""
    files, there = weight_files(folder), sorted(folder.glob("*.safetensors"))
    if not files and len(there) == 1 and not IN_PARTS.search(there[0].name):
        files = there
    if not files and there:
        raise ConfigError(
            f"{folder} must hold model.safetensors, or the index of its parts, {WHOLE[0]}, and "
            f"holds {there[0].name} alone or with others: restore the file that is missing"
        )
    if not files or files[0].suffix != ".safetensors":
        raise ConfigError(
            f"{folder} must hold its weights in safetensors, and does not: convert a .bin where "
            "you trust its origin, with torch.load(FILE, weights_only=True) and "
            "safetensors.torch.save_file"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged ({error}): restore it") from error
    return tensors


def tensors_of(
    stored_tensors: Mapping[str, Tensor], folder: str, layout: Layout
) -> dict[str, Tensor]:
    """Name tensors of a folder as we do; `MAPS` keep their names."""
    tensors: dict[str, Tensor] = {}
    for name, each in stored_tensors.items():
        plain = name.removeprefix("model.")
        if not plain.startswith(UNREAD_TENSORS):
            if (ours := renamed(plain, layout.tensors)) in tensors:
                raise ConfigError(f"{folder} holds two tensors {name}, by two names: remove one")
            tensors[ours] = each
    for name in ("norm.weight", "fc.weight"):
        if renamed(name, layout.tensors) not in tensors:
            raise ConfigError(
                f"{folder} has no tensor {name.removesuffix('.weight')}, which every draft in this "
                "layout has: it is of another kind, or incomplete"
            )
    for name, each in tensors.items():
        is_whole = not (each.is_floating_point() or each.is_complex())
        is_map = name in MAPS
        if each.dim() == 0 or len(each) == 0 or is_whole != is_map:
            raise ConfigError(
                f"{layout.theirs(name)} in {folder} must have rows of "
                f"{'integers' if is_map else 'floats'}, it is "
                f"{str(each.dtype).removeprefix('torch.')} of shape {[*each.shape]}"
            )
    return tensors


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name with another beginning, if it has one of these."""
    former = next((each for each in names if name.startswith(each)), "")
    return names[former] + name.removeprefix(former) if former else name


def read_engine_draft(
    folder: Path, target: str | None = None
) -> tuple[dict[str, Any], TargetStates]:
    """The config.json of a draft of ours that engines can hold, and what it says of the target.

    By default that lies where it was when the draft was made.
    """
    settings = config_of(folder)
    record = TargetStates.of(settings) if KEY in settings else None
    if record is None or not kind_of(settings).layouts:
        those = " or ".join(kind.name for kind in DRAFT_KINDS.values() if kind.layouts)
        raise ConfigError(
            f"{folder} must be a draft of draft.init.layout {those}, or one that import "
            "wrote: engines cannot hold any other, train one with this layout"
        )
    return settings, record.model_copy(update={"target": target}) if target else record


def write(
    layout: Layout,
    draft: Path,
    folder: Path,
    *,
    target: str | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write a draft of ours for engines, with its tokenizer; see `Layout.to_engine_files`."""
    settings, record = read_engine_draft(draft, target)
    tensors, config = layout.to_engine_files(settings, record, stored(draft), confidence)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    copy_tokenizer(str(draft), folder)
