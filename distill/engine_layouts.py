"""Drafts in layouts that engines hold, EAGLE-3's and DSpark's: written to folders, and read.

A folder holds a config.json and safetensors in speculators' layout, or in that of the method's own
code (EAGLE's: `midlayer.` or `layers.0.`). Every tensor must be there and known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from specdata.config import Config, fields_of, read_stored
from specdata.draft_models.draft_vocabulary import SIZE
from specdata.draft_models.dspark import dspark_class
from specdata.draft_models.eagle import eagle3_class
from specdata.draft_models.states_draft import KEY, Blocks, Norms, TargetStates
from specdata.draft_models.taps import attach, record_of
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.loading import ROPES, SAME, contradictions
from specdata.models import load_model
from specdata.saving import copy_tokenizer
from specdata.sources import hub_source
from specdata.storage.files import read_object, write_json

METADATA = (
    *("architectures", "auto_map", "attention_dropout", "base_model_ep_plan", "base_model_pp_plan"),
    *("base_model_tp_plan", "draft_vocab_size", "dtype", "embed_requires_grad", "name_or_path"),
    *("confidence_head_alpha", "sliding_window_non_causal"),
    *("has_no_defaults_at_init", "initializer_range", "max_window_layers", "_name_or_path"),
    *("num_anchors", "num_eagle_features", "pretraining_tp", "sliding_window", "model_type"),
    *("modal_type", "output_router_logits", "router_aux_loss_coef", "use_mrope"),
    *("speculators_config", "speculators_version", "target_hidden_size", "target_model_type"),
    *("torch_dtype", "tie_word_embeddings", "vocab_size", *GenerationConfig().to_dict()),
)
"""Keys of published config.json files that change nothing of what is computed. Of Llama's layers
`sliding_window` is one: engines apply it where `layer_types` says so. Matrices are tied if one is
not stored."""
ONLY: Mapping[str, Any] = {
    **{"decoder_sparse_step": 1, "use_sliding_window": False},
    **{"partial_rotary_factor": 1.0, "embedding_multiplier": 1.0, "use_aux_hidden_state": True},
    **{"torchscript": False, "use_bfloat16": False, "is_decoder": False, "pruned_heads": {}},
}
"""Keys that would change it, with the one value that is computed here."""
PARTS = ("eagle_config", "dflash_config", "transformer_layer_config")
"""Sections of such files, whose keys are read as those beside them."""
IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "confidence_head.")
"""Tensors that are the target's, follow from others, or are a head's."""
TOKENS, LAYER, MAPS = "model.embed_tokens.tokens.weight", "model.layers.0.", ("d2t", "t2d")
FC, SCALE = "model.embed_tokens.states.weight", "model.embed_tokens.scale"
DRAFTED = 2
"""Tokens that speculators' config.json asks engines to draft: as in our own line for vLLM."""
ANCHORS = 512
"""Blocks of a text in DeepSpec's training, whose code refuses a config.json without it."""
ROUNDING = 0.01
"""Relative error up to which a matrix is the target's, rounded to half precision or not."""


class _Read(Config):
    """A part of a published config.json: what is read of it; more may be there."""

    model_config = ConfigDict(extra="ignore")


class _Roped(_Read):
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @field_validator(*ROPES)
    @classmethod
    def _of_text(cls, rope: dict[str, Any] | None) -> dict[str, Any] | None:
        if rope and (rope.get("rope_type") or rope.get("type")) == "mrope":
            return {**rope, "rope_type": SAME["mrope"]}
        return rope


class Layer(_Roped):
    """The one layer of a draft: its tensors are those of Llama's, its model_type may be any."""

    num_hidden_layers: Literal[1] = 1
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    logit_scale: PositiveFloat | None = None
    layer_types: list[Literal["full_attention"]] | None = Field(None, exclude=True)


class _Taps(_Read):
    eagle_aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None  # speculators' may be null


class BlockLayers(_Roped):
    """The layers of a draft in DSpark's layout, of Qwen3's kind."""

    model_type: Literal["qwen3"] = "qwen3"
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    hidden_act: str = "silu"
    attention_bias: Literal[False] = False
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat
    layer_types: list[Literal["full_attention"]] | None = None


class _Blocks(_Read):
    block_size: PositiveInt
    mask_token_id: NonNegativeInt
    markov_rank: PositiveInt
    markov_head_type: Literal["vanilla"]
    target_layer_ids: list[NonNegativeInt] | None = None
    aux_hidden_state_layer_ids: list[PositiveInt] | None = None  # speculators': one more each
    num_target_layers: PositiveInt | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What a layout calls things.

    Attributes:
        name: of `draft.init.layout`.
        tensors: how names begin, and ours.
        read: what is read of config.json.
        only: as `ONLY`, of this layout.
    """

    name: Literal["eagle3", "dspark"]
    tensors: Mapping[str, str]
    read: tuple[type, ...]
    only: Mapping[str, Any]

    def theirs(self, name: str) -> str:
        """The name of one of our tensors in this layout."""
        return _renamed(name, {ours: former for former, ours in self.tensors.items()})


EAGLE3 = Layout(
    "eagle3",
    {
        "layers.0.": LAYER,
        "midlayer.": LAYER,
        "fc.": "model.embed_tokens.states.",
        "fc_norm.": "model.embed_tokens.fc_norm.",
        "input_norm.": "model.embed_tokens.input_norm.",
        "embed_tokens.": "model.embed_tokens.tokens.",
    },
    (Layer, _Taps, Norms),
    {
        **{"next_layer_regular": True, "use_last_layernorm": True, "has_lm_head": True},
        **{"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False},
        **{"parallel_draft_step": 1, "speculators_model_type": "eagle3"},
    },
)
DSPARK = Layout(
    "dspark",
    {
        "layers.": "model.layers.",
        "fc.": "model.embed_tokens.states.",
        "hidden_norm.": "model.embed_tokens.hidden_norm.",
        "markov_head.markov_w1.": "model.embed_tokens.markov.",
        "markov_head.markov_w2.weight": "lm_head.markov",
        "embed_tokens.": "model.embed_tokens.tokens.",
        "norm.": "model.norm.norm.",
    },
    (BlockLayers, _Blocks),
    {
        **{"sample_from_anchor": True, "dspark_bonus_anchor": False, "causal": False},
        **{"is_causal": False, "use_swa": False, "speculators_model_type": "dspark"},
        **{"attention_mode": "gqa", "projector_type": "dspark"},
    },
)


def read_published(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft, in float32 and eval mode, of a published folder; it reads the given target."""
    name, settings = str(folder), config_of(folder)
    if found := not_computed(settings):
        raise ConfigError(
            f"config.json of {name} cannot be followed: {'; '.join(found)}. Give another draft, or "
            "take out what does not matter to it"
        )
    tensors = tensors_of(stored(folder), name, layout_of(settings))
    if (
        settings.get("tie_word_embeddings")
        and TOKENS in tensors
        and "lm_head.weight" not in tensors
    ):
        raise ConfigError(
            f"tie_word_embeddings in config.json of {name} ties its own embed_tokens to an lm_head "
            "that it does not hold, and engines take the target's: store lm_head, or say false"
        )
    taps, form = settings_of(settings, target)
    return built(settings, taps, form, tensors, ids_of(tensors, target, name), target, name)


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """The layout that a config.json describes."""
    return DSPARK if "DSpark" in str(settings.get("architectures")) else EAGLE3


def config_of(folder: Path) -> dict[str, Any]:
    """A draft's config.json, what its method's section says beside the rest. Raises ConfigError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a folder with a config.json, and has none")
    try:
        settings = read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error
    for part in PARTS[:2]:
        if isinstance(said := settings.get(part), dict):
            settings = {**said, **settings}
    return settings


def not_computed(settings: dict[str, Any]) -> list[str]:
    """What a config.json asks that is not computed here, is not known, or contradicts itself."""
    layout = layout_of(settings)
    read, only = {key for each in layout.read for key in fields_of(each)}, {**ONLY, **layout.only}
    known = {*METADATA, *PARTS, *read}
    defaults, found = PreTrainedConfig().to_dict(), []
    if layout is DSPARK and "sample_from_anchor" not in settings:
        found.append(
            "sample_from_anchor is not said, and engines differ in what that means: write true if "
            "the anchor's slot proposes the token behind it, as here"
        )
    parts = [part for name in PARTS if isinstance(part := settings.get(name), dict)]
    twice = {*read, *layout.only} - {"model_type"}
    for key, value in (pair for part in (settings, *parts) for pair in part.items()):
        if key in twice and settings.get(key, value) != value:
            found.append(f"{key} is said twice, {settings[key]!r} and {value!r}")
        if isinstance(value, dict) and value.get("partial_rotary_factor", 1.0) != 1.0:
            found.append(f"partial_rotary_factor in {key} must be 1.0, the one computed here")
        if value is None or key in known or (key in defaults and value == defaults[key]):
            continue
        if key.endswith("_token_id"):  # of images, sounds and the like, which no draft reads here
            continue
        if key not in only:
            found.append(f"{key} ({value!r}) is not known here, and may change what is computed")
        elif value != only[key]:
            found.append(f"{key} must be {only[key]!r}, the one computed here, it is {value!r}")
    found += [each for part in (settings, *parts) for each in contradictions(part)]
    return list(dict.fromkeys(found))


def settings_of(
    settings: dict[str, Any], target: PreTrainedModel
) -> tuple[list[int], Norms | Blocks]:
    """The taps and the norm flags of a config.json, or the blocks of one in DSpark's layout.

    Of EAGLE-3 what engines take where it is silent. Raises ConfigError.
    """
    if layout_of(settings) is DSPARK:
        return _blocks_of(settings, target)
    layers = target.config.get_text_config().num_hidden_layers
    read_stored(_Taps, settings.get("eagle_config", {}), "config.json")
    eagle = read_stored(_Taps, settings, "config.json")
    flags = {each.name: settings[each.name] for each in fields(Norms) if each.name in settings}
    taps = eagle.eagle_aux_hidden_state_layer_ids or [2, layers // 2, layers - 3]
    return taps, read_stored(Norms, flags, "config.json")


def _blocks_of(settings: dict[str, Any], target: PreTrainedModel) -> tuple[list[int], Blocks]:
    said, text = read_stored(_Blocks, settings, "config.json"), target.config.get_text_config()
    layers, vocabulary = text.num_hidden_layers, text.vocab_size
    taps = said.aux_hidden_state_layer_ids or [each + 1 for each in said.target_layer_ids or ()]
    if not taps or taps[-1] >= layers:
        raise ConfigError(
            f"target_layer_ids in config.json must be layers whose output enters another, of the "
            f"target's {layers} those from 0 to {layers - 2}, got {[tap - 1 for tap in taps]}: "
            "llama.cpp hands out nothing of the last one's"
        )
    if (said.num_target_layers or layers) != layers or said.mask_token_id >= vocabulary:
        raise ConfigError(
            f"config.json describes a target of {said.num_target_layers or layers} layers and mask "
            f"{said.mask_token_id}, and the target has {layers} layers and {vocabulary} tokens: "
            "give the one that the draft was trained for"
        )
    return taps, Blocks(said.block_size, said.mask_token_id, said.markov_rank)


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
            "order and each once"
        )
    if (t2d := tensors.get("t2d")) is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise ConfigError(
            f"t2d marks other tokens than d2t names in {name}: one of them is of another draft"
        )
    return ids


def built(
    settings: Mapping[str, Any],
    taps: Sequence[int],
    form: Norms | Blocks,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
) -> PreTrainedModel:
    """A draft of a config.json and its tensors, with these taps, and flags or blocks."""
    # Matrices that are not stored are the target's.
    head = target.get_output_embeddings().weight.detach()[ids]
    shared = {TOKENS: target.get_input_embeddings().weight, "lm_head.weight": head}
    tensors = {key: each for key, each in {**shared, **tensors}.items() if key not in MAPS}
    if isinstance(form, Norms):
        sizes = _layers(Layer, settings, name)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * sizes.pop("logit_scale", 1.0)
        return made_eagle3(sizes, taps, form, tensors, ids, target, name)
    record = record_of(target, taps)
    tensors[SCALE] = torch.ones(record["width"])
    layers = _layers(BlockLayers, settings, name)
    config = {**layers, KEY: {**record, "blocks": asdict(form)}}
    return _filled(Qwen3ForCausalLM, dspark_class, DSPARK, config, tensors, ids, target, name)


def _layers(kind: type[_Read], settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The sizes of a draft's layers. Raises ConfigError."""
    said = settings.get("transformer_layer_config", settings)
    return read_stored(kind, said, f"the layer of {name}'s config.json").model_dump(
        exclude_none=True
    )


def made_eagle3(
    layer: Mapping[str, Any],
    taps: Sequence[int],
    norms: Norms,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
) -> PreTrainedModel:
    """A draft in EAGLE-3's layout with these tensors, and the (N,) ids of its tokens."""
    tensors, record = dict(tensors), {**record_of(target, taps), "layout": asdict(norms)}
    final = "model.norm.weight" if norms.norm_output else "lm_head.norm.weight"
    tensors[final] = tensors.pop("norm.weight")
    config = {**layer, KEY: record}
    return _filled(LlamaForCausalLM, eagle3_class, EAGLE3, config, tensors, ids, target, name)


def _filled(
    architecture: type[PreTrainedModel],
    kind: Callable[[type[PreTrainedModel]], type[PreTrainedModel]],
    layout: Layout,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
) -> PreTrainedModel:
    """A draft of these settings and tensors, and the (N,) ids of its tokens."""
    size = {"vocab_size": target.config.get_text_config().vocab_size, SIZE: len(ids)}
    try:
        config = architecture.config_class.from_dict(
            {**settings, **size, "tie_word_embeddings": False}
        )
        with torch.device("meta"):  # sizes may be any until they are those of the tensors
            expected = kind(architecture)(config).state_dict()
    except Exception as error:  # of transformers and torch: whatever they make of these values
        raise ConfigError(f"config.json of {name} describes no layer: {error!r}") from error
    shapes = {key: each.shape for key, each in expected.items() if key not in MAPS}
    given = {key: each.shape for key, each in tensors.items()}
    for what, wrong in (
        ("are missing", shapes.keys() - given.keys()),
        ("are not known", given.keys() - shapes.keys()),
        ("have another shape", {key for key in shapes.keys() & given if shapes[key] != given[key]}),
    ):
        if wrong:
            first = min(wrong)
            got = f"{[*given.get(first, ())]}, expected {[*shapes.get(first, ())]}"
            raise ConfigError(
                f"{len(wrong)} tensors of {name} {what} (as {layout.theirs(first)}, {got}): flags "
                "or taps in config.json are others, or it is of another target or layout"
            )
    draft: Any = kind(architecture)(config)
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
    """All tensors of a folder. Raises ConfigError if there are none, or a file is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} must hold safetensors, and there are none: convert a .bin where you trust "
            "its origin, with torch.load(FILE, weights_only=True) and safetensors.torch.save_file"
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
    """What a folder holds by our names, but `MAPS` and EAGLE-3's norm, which keep theirs."""
    tensors: dict[str, Tensor] = {}
    for name, each in stored_tensors.items():
        plain = name.removeprefix("model.")
        if not plain.startswith(IGNORED):
            tensors[_renamed(plain, layout.tensors)] = each
    for name in ("norm.weight", "fc.weight"):
        if _renamed(name, layout.tensors) not in tensors:
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


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name with another beginning, if it has one of these."""
    former = next((each for each in names if name.startswith(each)), "")
    return names[former] + name.removeprefix(former) if former else name


def of_layout(folder: Path, target: str | None = None) -> tuple[dict[str, Any], TargetStates]:
    """The config.json of a draft of ours that engines can hold, and what it says of the target.

    By default that lies where it was when the draft was made.
    """
    settings = config_of(folder)
    record = TargetStates.of(settings) if KEY in settings else None
    if record is None or (record.layout is None and record.blocks is None):
        raise ConfigError(
            f"{folder} must be a draft of draft.init.layout eagle3 or dspark, or one that import "
            "wrote: engines cannot hold any other, train one with this layout"
        )
    return settings, record.model_copy(update={"target": target}) if target else record


def write_dspark(
    draft: Path,
    folder: Path,
    confidence: tuple[Tensor, Tensor] | None = None,
    target: str | None = None,
) -> None:
    """Write a draft of `draft.init.layout: dspark`, or of `read_published`, for engines.

    The acceptance head is a linear map of its states, (1, H + r) and (1,), whose sigmoid is a
    probability.
    """
    settings, record = of_layout(draft, target)
    assert record.blocks is not None
    if not record.taps[0]:
        raise ConfigError(
            f"{draft} reads what enters its target's first layer, and engines call a tap by the "
            "layer before it: train a draft with draft.init.taps of 1 and more"
        )
    model, blocks, given = load_model(record.target), record.blocks, stored(draft)
    given[FC] = given[FC] * given.pop(SCALE)
    vocabulary, tokens = settings["vocab_size"], settings[SIZE]
    shared = {TOKENS: model.get_input_embeddings()}
    if tokens == vocabulary:
        shared["lm_head.weight"] = model.get_output_embeddings()
        given = {name: each for name, each in given.items() if name not in MAPS}
    for name, module in shared.items():
        own, theirs = given.pop(name).float(), module.weight.detach().float().cpu()
        if not (own - theirs).norm() <= ROUNDING * theirs.norm():
            raise ConfigError(
                f"{DSPARK.theirs(name)} of {draft} must be the target's, {record.target}, whose "
                "own engines take: train a draft with this target"
            )
    tensors = {DSPARK.theirs(name): each for name, each in given.items()}
    if confidence is not None:
        tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"] = confidence
    ids = {"mask_token_id": blocks.mask, "target_layer_ids": [tap - 1 for tap in record.taps]}
    layer = {key: each for key, each in settings.items() if key != KEY}
    config = {
        **layer,
        **ids,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": record.model_type,
        "block_size": blocks.size,
        "num_target_layers": model.config.get_text_config().num_hidden_layers,
        "num_anchors": ANCHORS,
        "markov_rank": blocks.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "dflash_config": {**ids, "causal": False},
    }
    _write(draft, folder, tensors, config)


def _write(draft: Path, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    copy_tokenizer(str(draft), folder)


def write_eagle(
    draft: Path,
    folder: Path,
    layout: Literal["eagle3", "speculators"] = "eagle3",
    target: str | None = None,
) -> None:
    """Write a draft of `draft.init.layout: eagle3`, or of `read_published`, for engines.

    In the layout of EAGLE's own code, which vLLM and SGLang load, or speculators'.
    """
    settings, record = of_layout(draft, target)
    assert record.layout is not None
    names = {"lm_head.norm.": "norm.", "model.norm.": "norm."}
    names |= {ours: former for former, ours in EAGLE3.tensors.items()}
    if layout == "speculators":
        names[LAYER] = "layers.0."
    tensors = {_renamed(name, names): each for name, each in stored(draft).items()}
    norms = asdict(record.layout)
    taps, target = record.taps, record.target
    vocabulary = settings["vocab_size"]
    size = {SIZE: settings.get(SIZE, vocabulary)}
    layer = {key: each for key, each in settings.items() if key not in (KEY, SIZE, *norms)}
    layer["model_type"] = "llama"
    ids = {"eagle_aux_hidden_state_layer_ids": taps}
    if size[SIZE] == vocabulary:  # vLLM has no map then, and refuses one
        tensors = {name: each for name, each in tensors.items() if name not in MAPS}
    config: dict[str, Any]
    if layout == "eagle3":
        layer["architectures"] = ["LlamaForCausalLMEagle3"]
        # Where vLLM and SGLang look for them, then where llama.cpp's converter does.
        config = {**layer, **size, **norms, "eagle_config": {**ids, "use_aux_hidden_state": True}}
        config |= ids
    else:
        proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTED}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            **size,
            **norms,
            **ids,
            "target_hidden_size": record.width // len(taps),
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {
                    "name_or_path": hub_source(target)[0],
                    "architectures": ["LlamaForCausalLM"],
                },
            },
        }
    _write(draft, folder, tensors, config)
