"""EAGLE-3 drafts: how they begin and learn, and how engines hold them.

They learn as all drafts on their target's states do (`distill.drafts.states`). Engines hold them in
EAGLE's own layout (`midlayer.` or `layers.0.`), which is written, or in speculators'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

import torch
from datasets import Dataset
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill import published
from distill.config import check_layout
from distill.drafts import plain, states
from specdata.config import read_stored
from specdata.drafts.draft_vocabulary import SIZE
from specdata.drafts.eagle3 import Norms
from specdata.drafts.eagle3_network import eagle3_class
from specdata.drafts.kind import KEY
from specdata.drafts.states_network import TargetStates, unit
from specdata.drafts.taps import decoder_layers, read_taps, record_of
from specdata.least_squares import fit_rows, ridge

states_by_place = states.states_by_place
FIRST_LAYER = "model.layers.0."
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""What a new draft's config.json has of the target's."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
OF_MODELOPT = ("use_input_layernorm_in_first_layer", "use_mtp_layernorm", "next_layer_regular")
"""Keys that NVIDIA's ModelOpt writes, whose ids are of layers whose outputs it trained on."""
TURNED, AT_ITSELF = 8, 32.0
"""The share of a head's dimensions that a token knows itself by, and the score that this gives."""


@torch.no_grad()
def begin(
    target: PreTrainedModel, source: plain.Source, rollouts: Dataset, _seed: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A new draft of the target's last layer, all of whose norm flags are off.

    `fc` predicts the target's last state from the taps at the token before (ridge regression), and
    the target's final norm and output matrix make tokens of it. The token itself enters by
    attention alone, so that begins by looking at itself (`_attention_to_itself`), and adds what is
    left of that state. The target is of Llama's or Qwen's kind.
    """
    layer, last = _layer_of(target), decoder_layers(target)[1]
    text = target.config.get_text_config()
    inputs, outputs, tokens = [], [], []
    for _, ids, first in fit_rows(rollouts, target.device, least=2):
        read = read_taps(target, [*source.taps, len(last)], ids)[0]
        inputs.append(read[first - 1 : -2, : -text.hidden_size])
        outputs.append(read[first:-1, -text.hidden_size :])
        tokens.append(ids[0, first:-1])
    embedding = target.get_input_embeddings()
    norm = last[-1].get_parameter("input_layernorm.weight")
    fc = ridge(zip(inputs, outputs, strict=True)).to(norm)
    tensors = {published.TOKEN_ROWS: embedding.weight, "model.embed_tokens.states.weight": fc.T}
    predicted = [each @ fc for each in inputs]
    reads = [
        torch.cat([unit(embedding(ids), 1), unit(each, 1) * norm], dim=-1)
        for ids, each in zip(tokens, predicted, strict=True)
    ]
    rests = [all_of_it - each for all_of_it, each in zip(outputs, predicted, strict=True)]
    for name, weight in _attention_to_itself(reads, rests, text).items():
        tensors[f"{FIRST_LAYER}self_attn.{name}_proj.weight"] = weight.to(norm)
    for key, weight in last[-1].state_dict().items():
        name = key.removesuffix(".weight")
        if name == "mlp.down_proj":
            tensors[f"{FIRST_LAYER}{key}"] = torch.zeros_like(weight)
        elif name == "input_layernorm":  # that of the state, which is what it read
            tensors[f"{FIRST_LAYER}hidden_norm.weight"] = weight
            tensors[f"{FIRST_LAYER}{key}"] = torch.ones_like(weight)
        elif name.endswith(("gate_proj", "up_proj")) or name == "post_attention_layernorm":
            tensors[f"{FIRST_LAYER}{key}"] = weight
    tensors["norm.weight"] = target.base_model.norm.weight
    tensors["lm_head.weight"] = target.get_output_embeddings().weight
    ids = torch.arange(text.vocab_size)
    given = published.Published(layer, tensors, ids, target, "the new draft")
    return _made(given, source.taps, Norms()), {}


def of_shapes(target: PreTrainedModel, source: plain.Source) -> PreTrainedModel:
    """The draft that `begin` makes of a target on no device, there, too."""
    record = {**record_of(target, source.taps), "layout": asdict(Norms())}
    size = {SIZE: target.config.get_text_config().vocab_size}
    return eagle3_class(LlamaForCausalLM)(LlamaConfig(**_layer_of(target), **{KEY: record}, **size))


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


def _layer_of(target: PreTrainedModel) -> dict[str, Any]:
    """The sizes of a draft's layer that begins as a target's last. Raises ConfigError."""
    text = target.config.get_text_config()
    check_layout("eagle3", text.model_type, target.name_or_path)
    layer = {key: getattr(text, key) for key in SIZES if hasattr(text, key)}
    return {**layer, "num_hidden_layers": 1, "tie_word_embeddings": False}


class Layer(published.Roped):
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


class _Taps(published.PublishedConfig):
    eagle_aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None  # speculators' may be null


def _taps_of(
    settings: dict[str, Any], target: PreTrainedModel
) -> tuple[list[int], dict[str, bool]]:
    """The taps and the norm flags of a config.json: what engines take where it is silent."""
    layers = target.config.get_text_config().num_hidden_layers
    read_stored(_Taps, settings.get("eagle_config", {}), "config.json")
    eagle = read_stored(_Taps, settings, "config.json")
    flags = {each.name: settings[each.name] for each in fields(Norms) if each.name in settings}
    taps = eagle.eagle_aux_hidden_state_layer_ids or [2, layers // 2, layers - 3]
    return taps, asdict(read_stored(Norms, flags, "config.json"))


def _doubtful_taps(settings: Mapping[str, Any]) -> str:
    """Why ids may mean the outputs of layers, where we and vLLM read their inputs; "" if not."""
    if not (ids := settings.get(AUX_LAYERS)):
        return ""
    if keys := [key for key in OF_MODELOPT if key in settings]:
        sign = f"{keys[0]} beside them is of NVIDIA's ModelOpt, which means those"
    elif ids[0] == 1 and not {each.name for each in fields(Norms)} & settings.keys():
        sign = "SGLang reads ids that begin with 1 so"
    else:
        return ""
    return (
        f"{AUX_LAYERS} {ids} may name layers whose outputs the draft reads ({sign}); here and in "
        f"vLLM they name layers whose inputs are read; the former are {[each + 1 for each in ids]}"
    )


def _build(
    given: published.Published, taps: Sequence[int], flags: Mapping[str, bool]
) -> PreTrainedModel:
    given, sizes = given.with_target_matrices(), given.layers(Layer)
    scale = sizes.pop("logit_scale", 1.0)
    tensors = {**given.tensors, "lm_head.weight": given.tensors["lm_head.weight"] * scale}
    return _made(given._replace(settings=sizes, tensors=tensors), taps, Norms(**flags))


def _made(given: published.Published, taps: Sequence[int], norms: Norms) -> PreTrainedModel:
    """A draft of a layer's sizes."""
    tensors = dict(given.tensors)
    record = {**record_of(given.target, taps), "layout": asdict(norms)}
    final = "model.norm.weight" if norms.norm_output else "lm_head.norm.weight"
    tensors[final] = tensors.pop("norm.weight")
    given = given._replace(settings={**given.settings, KEY: record}, tensors=tensors)
    return published.filled(LAYOUT, LlamaForCausalLM, eagle3_class, given)


def _to_engine_files(
    settings: dict[str, Any],
    record: TargetStates,
    given: dict[str, Tensor],
    _confidence: None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = {"lm_head.norm.": "norm.", "model.norm.": "norm."}
    names |= {ours: former for former, ours in LAYOUT.tensors.items()}
    tensors = {published.renamed(key, names): each for key, each in given.items()}
    norms, vocabulary = asdict(record.kind_record), settings["vocab_size"]
    size = {SIZE: settings.get(SIZE, vocabulary)}
    layer = {key: each for key, each in settings.items() if key not in (KEY, SIZE, *norms)}
    layer |= {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    ids = {AUX_LAYERS: record.taps}
    if size[SIZE] == vocabulary:  # vLLM has no map then, and refuses one
        tensors = {key: each for key, each in tensors.items() if key not in published.MAPS}
    # Where vLLM and SGLang look for them, then where llama.cpp's converter does.
    section = {"eagle_config": {**ids, "use_aux_hidden_state": True}}
    return tensors, {**layer, **size, **norms, **section, **ids}


LAYOUT: published.Layout = published.Layout(
    {
        "layers.0.": FIRST_LAYER,
        "midlayer.": FIRST_LAYER,
        "fc.": "model.embed_tokens.states.",
        "fc_norm.": "model.embed_tokens.fc_norm.",
        "input_norm.": "model.embed_tokens.input_norm.",
        "embed_tokens.": "model.embed_tokens.tokens.",
    },
    "eagle_config",
    (Layer, _Taps, Norms),
    {
        **{"next_layer_regular": True, "use_last_layernorm": True, "has_lm_head": True},
        **{"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False},
        **{"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1},
        **{"parallel_drafting": False, "speculators_model_type": "eagle3"},
        "num_aux_hidden_states": lambda settings: len(settings.get(AUX_LAYERS) or range(3)),
    },
    taps_of=_taps_of,
    build=_build,
    to_engine_files=_to_engine_files,
    ignored=("num_eagle_features",),
    doubtful_flags=("norm_before_residual", "norm_output"),  # the others have tensors of their own
    doubtful_taps=_doubtful_taps,
)
