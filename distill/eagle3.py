"""EAGLE-3 drafts: begun here, read from the folders that engines load, and written to such.

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
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.states import SILENCED, fit_rows, ridge
from distill.training import special_ids
from specdata.config import Config, read_stored
from specdata.draft_vocabulary import SIZE
from specdata.eagle3 import eagle3_class
from specdata.errors import ConfigError
from specdata.saving import copy_tokenizer
from specdata.states_draft import KEY, Norms, TargetStates
from specdata.storage.files import atomic_folder, read_object, write_json
from specdata.taps import attach, decoder_layers, read_taps, record_of

IGNORED = ("t2d", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
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
KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Targets whose last layer a draft can begin with."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    "initializer_range",
)
"""What a new draft's config.json has of the target's."""
DRAFTED = 3
"""Tokens that a released folder asks engines to draft."""
CARD = """# An EAGLE-3 draft for {target}

It proposes {draft_vocab_size:,} tokens and reads the states that enter layers {taps}.
vLLM takes these numbers as they are. SGLang adds 1 to numbers in config.json: give it {less}.

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


class _Taps(_Read):
    eagle_aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None  # speculators' may be null


def read_eagle3(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Make a draft of a published folder.

    Args:
        folder: with a config.json and safetensors.
        target: the model that it was trained for.

    Returns:
        The draft, in float32 and eval mode, which reads that target.

    Raises:
        ConfigError: if the folder is of another layout, tensors are missing or not known, or it
            does not fit the target.
    """
    name, settings = str(folder), config_of(folder)
    tensors = tensors_of(stored(folder), name)
    taps, norms = settings_of(settings, target)
    ids = ids_of(tensors, target, name)
    return built(settings, taps, norms, tensors, ids, target, name)


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a draft. Raises ConfigError if there is none, or it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a folder with a config.json, and has none")
    try:
        return read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from error


def settings_of(settings: dict[str, Any], target: PreTrainedModel) -> tuple[list[int], Norms]:
    """The taps and the norm flags of a config.json, or what engines take where it is silent.

    Raises:
        ConfigError: if they are no numbers of layers, or a flag is neither true nor false.
    """
    layers = target.config.get_text_config().num_hidden_layers
    eagle = read_stored(_Taps, settings.get("eagle_config", settings), "config.json")
    flags = {each.name: settings[each.name] for each in fields(Norms) if each.name in settings}
    taps = eagle.eagle_aux_hidden_state_layer_ids or [2, layers // 2, layers - 3]
    return taps, read_stored(Norms, flags, "config.json")


def ids_of(tensors: Mapping[str, Tensor], target: PreTrainedModel, name: str) -> Tensor:
    """(N,) the ids of the tokens that a draft proposes.

    Raises:
        ConfigError: if `d2t` gives no such ids, or is missing where they are not all.
    """
    rows, vocabulary = len(tensors["lm_head.weight"]), target.config.get_text_config().vocab_size
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
    tensors = {TOKENS: target.get_input_embeddings().weight, **tensors}
    tensors.pop("d2t", None)
    return _made(layer.model_dump(exclude_none=True), taps, norms, tensors, ids, target, name)


def first_eagle3(
    target: PreTrainedModel, taps: Sequence[int], rollouts: Dataset, seed: int
) -> PreTrainedModel:
    """A new draft of the target's last layer, all of whose norm flags are off.

    `fc` predicts the target's last state from the taps at the token before (ridge regression), and
    the target's final norm and output matrix make tokens of it. The layer is silent, so the token
    itself is not seen yet; its part of the new, wider matrices is random.

    Args:
        target: of Llama's or Qwen's kind.
        taps: that the draft reads.
        rollouts: with `prompt_ids` and `completion_ids`.
        seed: of the random part.

    Raises:
        ConfigError: if the target is of another kind.
    """
    text = target.config.get_text_config()
    if text.model_type not in KINDS:
        raise ConfigError(
            f"draft.init.layout eagle3 needs a target of {', '.join(KINDS)}, whose last layer it "
            f"begins with, and {target.name_or_path} is {text.model_type}: leave layout out"
        )
    last = decoder_layers(target)[1]
    inputs, outputs = [], []
    for row in fit_rows(rollouts):
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
        read, first = read_taps(target, [*taps, len(last)], ids)[0], len(row["prompt_ids"])
        inputs.append(read[first - 1 : -2, : -text.hidden_size])
        outputs.append(read[first:-1, -text.hidden_size :])
    draws = torch.Generator().manual_seed(seed)
    tensors = {TOKENS: target.get_input_embeddings().weight}
    tensors["model.embed_tokens.states.weight"] = ridge(zip(inputs, outputs, strict=True)).T
    for key, weight in last[-1].state_dict().items():
        name = key.removesuffix(".weight")
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            of_token = torch.randn(weight.shape, generator=draws) * text.initializer_range
            tensors[f"{LAYER}{key}"] = torch.cat([of_token.to(weight), weight], dim=1)
        elif name.endswith(SILENCED):
            tensors[f"{LAYER}{key}"] = torch.zeros_like(weight)
        elif name == "input_layernorm":  # that of the state, which is what it read
            tensors[f"{LAYER}hidden_norm.weight"] = weight
            tensors[f"{LAYER}{key}"] = torch.ones_like(weight)
        elif name.endswith(("gate_proj", "up_proj")) or name == "post_attention_layernorm":
            tensors[f"{LAYER}{key}"] = weight
    tensors["norm.weight"] = target.base_model.norm.weight
    tensors["lm_head.weight"] = target.get_output_embeddings().weight
    layer = {key: getattr(text, key) for key in SIZES if hasattr(text, key)}
    layer["num_hidden_layers"] = 1
    ids = torch.arange(text.vocab_size)
    return _made(layer, taps, Norms(), tensors, ids, target, "the new draft")


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
    """What a folder holds by our names, but `d2t` and `norm.weight`, which keep theirs.

    Raises:
        ConfigError: naming the folder, if what every such draft has is missing.
    """
    tensors: dict[str, Tensor] = {}
    for name, each in stored_tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith(IGNORED):
            continue
        former = next((each for each in RENAMED if plain.startswith(each)), "")
        tensors[plain.replace(former, RENAMED[former], 1) if former else plain] = each
    for name in ("lm_head.weight", "norm.weight", "model.embed_tokens.states.weight"):
        if name not in tensors:
            raise ConfigError(
                f"{folder} has no tensor {name.split('.')[0] if 'states' not in name else 'fc'}, "
                "which every EAGLE-3 draft has: it is of another kind, or incomplete"
            )
    for name, each in tensors.items():
        is_whole = not (each.is_floating_point() or each.is_complex())
        if each.dim() == 0 or len(each) == 0 or is_whole != (name == "d2t"):
            raise ConfigError(
                f"{name} in {folder} must have rows of {'integers' if name == 'd2t' else 'floats'},"
                f" it is {str(each.dtype).removeprefix('torch.')} of shape {[*each.shape]}"
            )
    return tensors


def write_eagle3(
    draft: Path, out: Path, layout: Literal["eagle", "speculators"]
) -> tuple[int, list[int], str]:
    """Write a draft in a layout that engines load.

    Args:
        draft: of `draft.init.layout: eagle3`, or made by `read_eagle3`.
        out: the new folder.
        layout: of EAGLE's own code, which vLLM and SGLang load, or speculators'.

    Returns:
        How many tokens it proposes, the taps that it reads, and its target.

    Raises:
        ConfigError: if the draft is of another layout, or its folder is incomplete.
    """
    settings = config_of(draft)
    record = TargetStates.of(settings) if KEY in settings else None
    if record is None or record.layout is None or SIZE not in settings:
        raise ConfigError(
            f"{draft} must be a draft of draft.init.layout eagle3, or one that "
            "import-eagle3 wrote: engines cannot hold any other, train one with this layout"
        )
    first = "midlayer." if layout == "eagle" else "layers.0."
    names = {"lm_head.norm.": "norm.", "model.norm.": "norm."}
    names |= {ours: first if ours == LAYER else former for former, ours in RENAMED.items()}
    tensors = {}
    for name, each in stored(draft).items():
        ours = next((each for each in names if name.startswith(each)), "")
        tensors[name.replace(ours, names[ours], 1) if ours else name] = each
    norms, taps, target = asdict(record.layout), record.taps, record.target
    layer = {key: each for key, each in settings.items() if key not in (KEY, SIZE, *norms)}
    layer["model_type"] = "llama"
    size = {SIZE: settings[SIZE]}
    ids = {"eagle_aux_hidden_state_layer_ids": taps}
    if layout == "eagle":
        layer["architectures"] = ["LlamaForCausalLMEagle3"]
        config = {**layer, **size, **norms, "eagle_config": {**ids, "use_aux_hidden_state": True}}
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
        less = [tap - 1 for tap in taps]
        (temporary / "README.md").write_text(
            CARD.format(target=target, taps=taps, less=less, drafted=DRAFTED, **size),
            encoding="utf-8",
        )
    return size["draft_vocab_size"], taps, target
