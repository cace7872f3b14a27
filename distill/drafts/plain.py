"""Plain drafts: how they begin, and what they say along texts."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed

from distill.config import FRESH, InitConfig
from distill.rounds import Place, Texts
from distill.training import take_special_ids
from specdata.drafts.draft_vocabulary import replace_output
from specdata.drafts.taps import decoder_layers
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.least_squares import fit_rows, ridge
from specdata.lm_head import LMHead, find_lm_head, hidden_states
from specdata.models import load_configs, positions
from specdata.storage.columns import list_lengths
from specdata.target_states import stored_states

# The context of a made draft whose target has no limit, unless the rollouts are longer.
LEAST_POSITIONS = 2048


class Source(NamedTuple):
    """The parts of a draft: layers of its target, taps that it reads, and the settings."""

    layers: list[int]
    taps: list[int]
    init: InitConfig

    @classmethod
    def of(cls, target: PreTrainedModel, init: InitConfig) -> Source:
        """The parts that settings name of a target. Raises ConfigError if it does not have them."""
        count = len(decoder_layers(target)[1])
        return cls(init.layers_of(count, target.name_or_path), init.taps_of(count), init)


def begin(
    target: PreTrainedModel, source: Source, _rollouts: Dataset, _seed: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A draft of layers of the target."""
    return cut(target, source.layers), {}


def of_shapes(target: PreTrainedModel, source: Source) -> PreTrainedModel:
    """The draft that `begin` makes of a target on no device, with the matrices that it trains."""
    model = cut(target, source.layers)
    if source.init.align or source.taps:  # its output matrix is its own
        replace_output(model, copy.deepcopy(model.get_output_embeddings()))
    return model


def states_by_place(draft: LMHead, texts: Texts) -> Iterator[Place]:
    """The states of a draft along texts, once, as every place is alike."""
    states = draft.states(texts.ids, texts.attention, trained=True)
    yield Place(states, torch.ones_like(texts.ids, dtype=torch.bool))


def cut(model: PreTrainedModel, numbers: Sequence[int]) -> PreTrainedModel:
    """A model of some of the layers of another, in order, all other weights as they are there.

    Of the same class, in eval mode; the weights are shared, not copied, but of what Gemma 3n and 4
    pack in one matrix for all layers.
    """
    name, layers = decoder_layers(model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):  # lists with an entry a layer are cut alike
        is_of_layers = isinstance(value, list | tuple) and len(value) == len(layers)
        if is_of_layers and "token" not in key and key != "architectures":
            setattr(text, key, type(value)(value[index] for index in numbers))
    text.num_hidden_layers = len(numbers)
    if shared := getattr(text, "num_kv_shared_layers", 0):  # the last ones: they read others' keys
        first = len(layers) - shared
        text.num_kv_shared_layers = sum(number >= first for number in numbers)
        if text.num_kv_shared_layers and [*numbers[: first + 1]] != [*range(first + 1)]:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut: from layer {first} on its layers read the "
                f"keys and values of earlier ones, which layers {numbers[0]} to {numbers[-1]} do "
                "not hold. Give draft.init another kind: target, model or fresh"
            )
    width = getattr(text, "hidden_size_per_layer_input", 0) or 0
    packed = len(layers) * width, len(numbers) * width
    config.name_or_path = ""
    with torch.device("meta"):
        shorter: PreTrainedModel = type(model)(config)
    for place, module in shorter.named_modules():
        new = old = None  # numbers of the layer that the module is in
        former = place
        if place.startswith(f"{name}."):
            new = int(place[len(name) + 1 :].split(".")[0])
            old = numbers[new]
            former = f"{name}.{old}{place.removeprefix(f'{name}.{new}')}"
        try:
            source = model.get_submodule(former)
            places = {(old, new), (len(layers), len(numbers))}
            if old is None and "per_layer" in place:
                source = _unpacked(source, packed, numbers)
                places.add(packed)
            _share(source, module, places)
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut: {former} depends on its place ({error}). "
                "Choose other layers, or give draft.init another kind: model or fresh"
            ) from error
    shorter.generation_config = special_ids(model.generation_config)
    return shorter.eval()


def fresh(target: str, rollouts: Dataset, seed: int) -> PreTrainedModel:
    """A Llama with random weights, for the target's vocabulary and context."""
    target_config, generation = load_configs(target)
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            **FRESH,
            vocab_size=target_config.get_text_config().vocab_size,
            max_position_embeddings=context_of(target_config, rollouts),
            tie_word_embeddings=False,
        )
    )
    take_special_ids(model, generation)
    return model.eval()


@torch.no_grad()
def align_output(
    model: PreTrainedModel,
    target: PreTrainedModel,
    rollouts: Dataset,
    states_dtype: torch.dtype | None = None,
) -> None:
    """Give a cut model an output matrix that reads its states as the target's reads its own.

    With A the (H, H) matrix for which `states A` is nearest to the target's last hidden states
    (least squares, at the completion positions of `fit_rows` of the rollouts), and W the target's
    output matrix, the new one is W A^T: linear shortcuts (Din et al. 2023, arXiv:2303.09435), put
    into the weights. The input embedding stays, so tied matrices are untied. `states_dtype` is the
    precision of states that the rollouts keep, if the target was loaded in another.
    """
    output = model.get_output_embeddings()
    if (head := find_lm_head(target)).embedding is None or type(output) is not nn.Linear:
        raise ConfigError(
            f"{type(target).__name__} makes its logits in a way that is not known, so a draft's "
            "output matrix cannot be fitted to them: leave draft.init.align out"
        )

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        """States of the draft and of the target along each text's completion."""
        for row, ids, begin in fit_rows(rollouts, model.device):
            first = begin - 1
            target_states = stored_states(row, head, states_dtype)
            if target_states is None:
                target_states = hidden_states(target, ids)[0, first:-1]
            yield hidden_states(model, ids)[0, first:-1], target_states.to(model.device)

    shortcut = ridge(pairs())
    vocabulary, width = output.weight.shape
    fitted = nn.Linear(width, vocabulary, bias=output.bias is not None, device="meta")
    weight = (output.weight.double() @ shortcut.T).to(output.weight.dtype)
    fitted.weight = nn.Parameter(weight)
    if output.bias is not None:
        fitted.bias = nn.Parameter(output.bias.clone())
    replace_output(model, fitted)


def context_of(target: PreTrainedConfig, rollouts: Dataset) -> int:
    """The target's context, in tokens; if it has no limit, one that the rollouts fit in."""
    if (context := positions(target)) == sys.maxsize:
        lengths = list_lengths(rollouts, "prompt_ids", "completion_ids").sum(axis=0)
        context = max(LEAST_POSITIONS, int(lengths.max()))
    return context


def _unpacked(source: nn.Module, packed: tuple[int, int], numbers: Sequence[int]) -> nn.Module:
    """A module with the parts that some layers have in the matrices which it packs for all."""
    unpacked = copy.copy(source)
    unpacked._parameters = dict(source._parameters)
    for key, weight in source.named_parameters(recurse=False):
        if packed[0] in weight.shape:
            axis = weight.shape.index(packed[0])
            width = packed[1] // len(numbers)
            parts = torch.unflatten(weight.data, axis, (-1, width)).index_select(
                axis, torch.tensor(numbers, device=weight.device)
            )
            unpacked._parameters[key] = nn.Parameter(parts.flatten(axis, axis + 1))
    return unpacked


def _share(
    source: nn.Module, module: nn.Module, places: set[tuple[int | None, int | None]]
) -> None:
    """Give a module (not those in it) the weights of another of the same kind.

    `places` are numbers, there and here, that may differ. Raises ValueError if more does.
    """
    for kind in ("_parameters", "_buffers"):
        source_weights, weights = dict(getattr(source, kind)), getattr(module, kind)
        if kind == "_buffers":  # Gemma 3's rope has some for each kind of layer that there is
            source_weights = {key: source_weights.get(key) for key in weights}
        shapes = (
            {key: None if value is None else value.shape for key, value in values.items()}
            for values in (source_weights, weights)
        )
        if next(shapes) != next(shapes):
            raise ValueError("its weights have other shapes")
        weights.update(source_weights)
    # GPT-2 may scale attention by the number of the layer.
    if getattr(module, "scale_attn_by_inverse_layer_idx", False) and (
        module.layer_idx != source.layer_idx
    ):
        raise ValueError("it scales attention by the number of its layer")
    # What a whole model notes of itself, such as its folder, decides nothing.
    for key, value in [] if isinstance(module, PreTrainedModel) else list(vars(module).items()):
        expected = vars(source).get(key)
        if isinstance(value, Tensor):
            setattr(module, key, expected)
        elif (
            isinstance(value, bool | int | float | str | None)
            and key not in ("training", "store_full_length_kv")  # for layers that read its keys
            and value != expected
            and (expected, value) not in places
        ):
            raise ValueError(f"its {key} is {expected} there and would be {value}")
