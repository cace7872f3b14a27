"""EAGLE-3 drafts: begun here, written to folders that engines load, and read from such.

A folder holds a config.json and safetensors in speculators' layout, or in that of EAGLE's own code
(`midlayer.` or `layers.0.`), which vLLM and SGLang load, too. Every tensor must be there and known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from distill.config import check_layout
from distill.states import fit_rows, ridge
from specdata.config import Config, read_stored
from specdata.draft_models.draft_vocabulary import SIZE
from specdata.draft_models.eagle import eagle3_class
from specdata.draft_models.states_draft import KEY, Norms, TargetStates, unit
from specdata.draft_models.taps import attach, decoder_layers, read_taps, record_of
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.saving import copy_tokenizer
from specdata.storage.files import atomic_folder, read_object, write_json

METADATA = (
    *("architectures", "auto_map", "attention_dropout", "base_model_ep_plan", "base_model_pp_plan"),
    *("base_model_tp_plan", "draft_vocab_size", "dtype", "embed_requires_grad", "name_or_path"),
    *("has_no_defaults_at_init", "initializer_range", "max_window_layers", "_name_or_path"),
    *("num_eagle_features", "pretraining_tp", "sliding_window", "speculators_config"),
    *("speculators_version", "target_hidden_size", "target_model_type", "torch_dtype"),
    *("vocab_size", *GenerationConfig().to_dict()),
)
"""Keys of published config.json files that change nothing of what is computed. Of Llama's layers
`sliding_window` is one: engines apply it where `layer_types` says so."""
ONLY: Mapping[str, Any] = {
    **{"decoder_sparse_step": 1, "layer_types": ["full_attention"], "use_sliding_window": False},
    **{"partial_rotary_factor": 1.0, "embedding_multiplier": 1.0, "tie_word_embeddings": False},
    **{"next_layer_regular": True, "use_aux_hidden_state": True, "use_last_layernorm": True},
    **{"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False},
    **{"parallel_draft_step": 1, "has_lm_head": True, "speculators_model_type": "eagle3"},
    **{"torchscript": False, "use_bfloat16": False, "is_decoder": False, "pruned_heads": {}},
}
"""Keys that would change it, with the one value that is computed here."""
PARTS = ("eagle_config", "transformer_layer_config")
"""Sections of such files, whose keys are read as those beside them."""
IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Tensors that are the target's, or follow from others."""
RENAMED = {
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "fc.": "model.embed_tokens.states.",
    "fc_norm.": "model.embed_tokens.fc_norm.",
    "input_norm.": "model.embed_tokens.input_norm.",
    "embed_tokens.": "model.embed_tokens.tokens.",
    "lm_head.": "lm_head.",
}
TOKENS, LAYER = "model.embed_tokens.tokens.weight", "model.layers.0."
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What a new draft's config.json has of the target's."""
TURNED, AT_ITSELF = 8, 32.0
"""The share of a head's dimensions that a token knows itself by, and the score that this gives."""
DRAFTED = 3
"""Tokens that a released folder asks engines to draft."""
CARD = """# An EAGLE-3 draft for {target}

It proposes {tokens:,} tokens and reads the states that enter layers {taps}.
vLLM takes these numbers as they are. SGLang adds 1 to numbers in config.json: give it {sglang}.

    vllm serve {target} --speculative-config \\
      '{{"method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": {drafted}}}'
"""


class _Read(Config):
    """A part of a published config.json: what is read of it; more may be there."""

    model_config = ConfigDict(extra="ignore")


class Layer(_Read):
    """The one layer of a draft, of Llama's kind."""

    model_type: Literal["llama"] = "llama"
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
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    logit_scale: PositiveFloat | None = None


class _Taps(_Read):
    eagle_aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None  # speculators' may be null


def read_eagle3(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft, in float32 and eval mode, of a published folder; it reads the given target."""
    name, settings = str(folder), config_of(folder)
    if found := not_computed(settings):
        raise ConfigError(
            f"config.json of {name} cannot be followed: {'; '.join(found)}. Give another draft, or "
            "take out what does not matter to it"
        )
    tensors = tensors_of(stored(folder), name)
    taps, norms = settings_of(settings, target)
    ids = ids_of(tensors, target, name)
    return built(settings, taps, norms, tensors, ids, target, name)


def config_of(folder: Path) -> dict[str, Any]:
    """A draft's config.json, `eagle_config` beside the rest; ConfigError if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a folder with a config.json, and has none")
    try:
        settings = read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error
    eagle = settings.get("eagle_config")
    return {**eagle, **settings} if isinstance(eagle, dict) else settings


def not_computed(settings: dict[str, Any]) -> list[str]:
    """What a config.json asks that is not computed here, is not known, or contradicts itself."""
    flags = {*_Taps.model_fields, *(each.name for each in fields(Norms))}
    known = {*METADATA, *PARTS, *Layer.model_fields, *flags}
    defaults, found = PreTrainedConfig().to_dict(), []
    parts = [part for name in PARTS if isinstance(part := settings.get(name), dict)]
    twice = {*flags, *Layer.model_fields} - {"model_type"}
    for key, value in (pair for part in (settings, *parts) for pair in part.items()):
        if key in twice and settings.get(key, value) != value:
            found.append(f"{key} is said twice, {settings[key]!r} and {value!r}")
        if isinstance(value, dict) and value.get("partial_rotary_factor", 1.0) != 1.0:
            found.append(f"partial_rotary_factor in {key} must be 1.0, the one computed here")
        if value is None or key in known or (key in defaults and value == defaults[key]):
            continue
        if key not in ONLY:
            found.append(f"{key} ({value!r}) is not known here, and may change what is computed")
        elif value != ONLY[key]:
            found.append(f"{key} must be {ONLY[key]!r}, the one computed here, it is {value!r}")
    return list(dict.fromkeys(found))


def settings_of(settings: dict[str, Any], target: PreTrainedModel) -> tuple[list[int], Norms]:
    """The taps and the norm flags of a config.json, or what engines take where it is silent."""
    layers = target.config.get_text_config().num_hidden_layers
    read_stored(_Taps, settings.get("eagle_config", {}), "config.json")
    eagle = read_stored(_Taps, settings, "config.json")
    flags = {each.name: settings[each.name] for each in fields(Norms) if each.name in settings}
    taps = eagle.eagle_aux_hidden_state_layer_ids or [2, layers // 2, layers - 3]
    return taps, read_stored(Norms, flags, "config.json")


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
    norms: Norms,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
) -> PreTrainedModel:
    """A draft of a config.json and its tensors, with these taps and flags."""
    layer = read_stored(
        Layer,
        settings.get("transformer_layer_config", settings),
        f"the layer of {name}'s config.json",
    )
    head = target.get_output_embeddings().weight.detach()[ids]  # meant where there is no lm_head
    tensors = {TOKENS: target.get_input_embeddings().weight, "lm_head.weight": head, **tensors}
    for maps in ("d2t", "t2d"):
        tensors.pop(maps, None)
    sizes = layer.model_dump(exclude_none=True)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * sizes.pop("logit_scale", 1.0)
    return _made(sizes, taps, norms, tensors, ids, target, name)


def first_eagle3(
    target: PreTrainedModel, taps: Sequence[int], rollouts: Dataset
) -> PreTrainedModel:
    """A new draft of the target's last layer, all of whose norm flags are off.

    `fc` predicts the target's last state from the taps at the token before (ridge regression), and
    the target's final norm and output matrix make tokens of it. The token itself enters by
    attention alone, so that begins by looking at itself (`_attention_to_itself`), and adds what is
    left of that state. The target is of Llama's or Qwen's kind.
    """
    layer, last = _layer_of(target, "eagle3"), decoder_layers(target)[1]
    text = target.config.get_text_config()
    inputs, outputs, tokens = [], [], []
    for row in fit_rows(rollouts):
        if len(row["completion_ids"]) < 2:
            continue
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
        read, first = read_taps(target, [*taps, len(last)], ids)[0], len(row["prompt_ids"])
        inputs.append(read[first - 1 : -2, : -text.hidden_size])
        outputs.append(read[first:-1, -text.hidden_size :])
        tokens.append(ids[0, first:-1])
    embedding = target.get_input_embeddings()
    norm = last[-1].get_parameter("input_layernorm.weight")
    fc = ridge(zip(inputs, outputs, strict=True)).to(norm)
    tensors = {TOKENS: embedding.weight, "model.embed_tokens.states.weight": fc.T}
    states = [each @ fc for each in inputs]
    reads = [
        torch.cat([unit(embedding(ids), 1), unit(each, 1) * norm], dim=-1)
        for ids, each in zip(tokens, states, strict=True)
    ]
    rests = [all_of_it - each for all_of_it, each in zip(outputs, states, strict=True)]
    for name, weight in _attention_to_itself(reads, rests, text).items():
        tensors[f"{LAYER}self_attn.{name}_proj.weight"] = weight.to(norm)
    for key, weight in last[-1].state_dict().items():
        name = key.removesuffix(".weight")
        if name == "mlp.down_proj":
            tensors[f"{LAYER}{key}"] = torch.zeros_like(weight)
        elif name == "input_layernorm":  # that of the state, which is what it read
            tensors[f"{LAYER}hidden_norm.weight"] = weight
            tensors[f"{LAYER}{key}"] = torch.ones_like(weight)
        elif name.endswith(("gate_proj", "up_proj")) or name == "post_attention_layernorm":
            tensors[f"{LAYER}{key}"] = weight
    tensors["norm.weight"] = target.base_model.norm.weight
    tensors["lm_head.weight"] = target.get_output_embeddings().weight
    ids = torch.arange(text.vocab_size)
    return _made(layer, taps, Norms(), tensors, ids, target, "the new draft")


def _attention_to_itself(
    reads: Sequence[Tensor], rests: Sequence[Tensor], text: Any
) -> dict[str, Tensor]:
    """Matrices of an attention that gives each token a linear map of what it reads itself.

    Queries and keys are one constant vector, nearly: what best predicts 1. In pairs of dimensions
    that are turned by different angles from token to token it is most like itself at distance 0.
    Values are the map of least squares, of the rank that they have, from the (n, 2 H) that are read
    of each text to the (n, H) that are to be added there.
    """
    width, heads = text.hidden_size, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or width // heads
    ones = (torch.cat([each, each.new_ones(len(each), 1)], dim=-1) for each in rests)
    fitted = ridge(zip(reads, ones, strict=True))
    added, constant = fitted[:, :width], fitted[:, width]
    made = sum(((each.double() @ added).T @ (each.double() @ added) for each in reads), 0.0)
    kept = torch.linalg.eigh(made).eigenvectors[:, -groups * size :]  # (H, rank)
    kept = nn.functional.pad(kept, (groups * size - kept.shape[1], 0))
    turned = max(1, size // TURNED)
    scale = (AT_ITSELF * size**0.5 / turned) ** 0.5
    of_head = torch.zeros(size, len(constant), dtype=torch.float64, device=constant.device)
    of_head[:turned] = scale * constant
    of_group = (kept / (heads // groups)).view(width, groups, 1, size)
    return {
        "q": of_head.repeat(heads, 1),
        "k": of_head.repeat(groups, 1),
        "v": (added @ kept).T,
        "o": of_group.expand(-1, -1, heads // groups, -1).reshape(width, heads * size),
    }


def _layer_of(target: PreTrainedModel, layout: str) -> dict[str, Any]:
    """The sizes of a draft's layer that begins as a target's last. Raises ConfigError."""
    text = target.config.get_text_config()
    check_layout(layout, text.model_type, target.name_or_path)
    layer = {key: getattr(text, key) for key in SIZES if hasattr(text, key)}
    return {**layer, "num_hidden_layers": 1, "tie_word_embeddings": False}


def _made(
    layer: Mapping[str, Any],
    taps: Sequence[int],
    norms: Norms,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
) -> PreTrainedModel:
    """A draft with these tensors, and the (N,) ids of its tokens."""
    tensors, record = dict(tensors), {**record_of(target, taps), "layout": asdict(norms)}
    final = "model.norm.weight" if norms.norm_output else "lm_head.norm.weight"
    tensors[final] = tensors.pop("norm.weight")
    size = {"vocab_size": target.config.get_text_config().vocab_size, SIZE: len(ids)}
    try:
        config = LlamaConfig.from_dict({**layer, **size, "tie_word_embeddings": False, KEY: record})
        with torch.device("meta"):  # sizes may be any until they are those of the tensors
            shapes = eagle3_class(LlamaForCausalLM)(config).state_dict()
    except Exception as error:  # of transformers and torch: whatever they make of these values
        raise ConfigError(f"config.json of {name} describes no layer: {error!r}") from error
    shapes = {key: each.shape for key, each in shapes.items()}
    del shapes["d2t"], shapes["t2d"]
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
                f"{len(wrong)} tensors of {name} {what} (as {first}, {got}): norm flags or "
                "taps in config.json are others, or it is of another target or layout"
            )
    draft = eagle3_class(LlamaForCausalLM)(config)
    draft.load_state_dict(tensors, strict=False)
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.d2t, draft.t2d = ids - torch.arange(len(ids)), t2d
    draft.get_output_embeddings().vocabulary_ids = ids
    draft.__class__ = LlamaForCausalLM
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    attach(draft, target)
    return draft


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


def tensors_of(stored_tensors: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """What a folder holds by our names, but `d2t`, `t2d` and `norm.weight`, which keep theirs."""
    tensors: dict[str, Tensor] = {}
    for name, each in stored_tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith(IGNORED):
            continue
        former = next((each for each in RENAMED if plain.startswith(each)), "")
        tensors[plain.replace(former, RENAMED[former], 1) if former else plain] = each
    for name in ("norm.weight", "model.embed_tokens.states.weight"):
        if name not in tensors:
            raise ConfigError(
                f"{folder} has no tensor {'fc' if 'states' in name else 'norm'}, "
                "which every EAGLE-3 draft has: it is of another kind, or incomplete"
            )
    for name, each in tensors.items():
        is_whole = not (each.is_floating_point() or each.is_complex())
        is_map = name in ("d2t", "t2d")
        if each.dim() == 0 or len(each) == 0 or is_whole != is_map:
            raise ConfigError(
                f"{name} in {folder} must have rows of {'integers' if is_map else 'floats'},"
                f" it is {str(each.dtype).removeprefix('torch.')} of shape {[*each.shape]}"
            )
    return tensors


def write_eagle(
    draft: Path, out: Path, layout: Literal["eagle", "speculators"]
) -> tuple[int, list[int], str]:
    """Write a draft of `draft.init.layout: eagle3`, or of `read_eagle3`, for engines.

    In the layout of EAGLE's own code, which vLLM and SGLang load, or speculators'.
    Returns how many tokens it proposes, the taps that it reads, and its target.
    """
    settings = config_of(draft)
    record = TargetStates.of(settings) if KEY in settings else None
    if record is None or record.layout is None:
        raise ConfigError(
            f"{draft} must be a draft of draft.init.layout eagle3, or one that import wrote: "
            "engines cannot hold any other, train one with this layout"
        )
    first = "midlayer." if layout == "eagle" else "layers.0."
    names = {"lm_head.norm.": "norm.", "model.norm.": "norm."}
    names |= {ours: first if ours == LAYER else former for former, ours in RENAMED.items()}
    tensors = {}
    for name, each in stored(draft).items():
        ours = next((each for each in names if name.startswith(each)), "")
        tensors[name.replace(ours, names[ours], 1) if ours else name] = each
    norms = asdict(record.layout)
    taps, target = record.taps, record.target
    vocabulary = settings["vocab_size"]
    size = {SIZE: settings.get(SIZE, vocabulary)}
    layer = {key: each for key, each in settings.items() if key not in (KEY, SIZE, *norms)}
    layer["model_type"] = "llama"
    ids = {"eagle_aux_hidden_state_layer_ids": taps}
    if size[SIZE] == vocabulary:  # vLLM has no map then, and refuses one
        tensors = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}
    config: dict[str, Any]
    if layout == "eagle":
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
                "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
            },
        }
    with atomic_folder(out) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "config.json", config)
        copy_tokenizer(str(draft), temporary)
        card = CARD.format(
            target=target,
            tokens=size[SIZE],
            taps=taps,
            sglang=[tap - 1 for tap in taps],
            drafted=DRAFTED,
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return size[SIZE], taps, target
