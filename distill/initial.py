"""Where a draft comes from: layers cut from its target, or random weights, and its vocabulary."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed

from distill.batches import check_context
from distill.config import ARCHITECTURES, InitConfig
from distill.dspark import first_dspark
from distill.eagle import first_eagle3
from distill.states import can_be_silenced, fit_inputs, fit_rows, llama_draft, silence
from distill.toy import language_model
from distill.training import RESULT_FILE, ModelFolder, save_model, take_special_ids
from specdata.draft_models.draft_vocabulary import reduce_vocabulary, replace_output
from specdata.draft_models.states_draft import states_input
from specdata.draft_models.taps import decoder_layers, install
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.lm_head import find_lm_head, hidden_states
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import (
    check_shared_vocabulary,
    end_ids,
    load_configs,
    load_model,
    load_tokenizer,
    positions,
)
from specdata.processes import broadcast_by_main, join_processes
from specdata.saving import copy_tokenizer
from specdata.storage.columns import list_lengths, value_counts
from specdata.storage.files import atomic_folder, write_json
from specdata.target_states import stored_states

# Added to the diagonal of the least squares, as a share of its mean.
RIDGE = 1e-2
# The context of a made draft whose target has no limit, unless the rollouts are longer.
LEAST_POSITIONS = 2048
# Ids that a made draft is tried on.
PROBE = 8


def make_initial(
    *,
    target: str | Path,
    draft: str | Path | None,
    rollouts: Dataset,
    out: Path,
    config: InitConfig,
    seed: int,
    states_dtype: str = "float32",
    target_load: Loading = ONE_DEVICE,
) -> dict[str, Any]:
    """Make the draft that training starts from and save it as a model folder, in float32.

    It has the target's tokenizer; made ones also its padded vocabulary, context and special ids.
    One process works, others wait for it. A finished folder is kept and its stored result returned:
    what was made, as JSON values. On the rollouts, of split "train", the vocabulary is counted and
    an output matrix is fitted; `states_dtype` is the target's precision when it made the states
    that they may keep. Raises VocabularyMismatchError if an existing draft has another vocabulary,
    and ValueError if there are no rollouts, or all their completions are empty.
    """
    if len(rollouts) == 0 or not list_lengths(rollouts, "completion_ids").any():
        raise ValueError(
            "rollouts must hold at least one completion token of split train, and these hold none: "
            "make others"
        )
    check_context({"target": load_configs(str(target))[0]}, rollouts)
    record = ModelFolder(out).result() or {}
    if not record and join_processes().is_main_process:
        record = {"kind": config.kind}
        if config.kind == "model":
            assert draft is not None  # the configuration's own check
            check_shared_vocabulary(load_tokenizer(str(target)), load_tokenizer(str(draft)))
            model = load_model(str(draft), target=str(target), target_load=target_load)
        elif config.kind == "fresh":
            record["architecture"] = config.architecture
            model = _fresh(str(target), rollouts, config, seed)
        else:
            whole = load_model(str(target), load=target_load)
            count = len(decoder_layers(whole)[1])
            record["layers"] = config.layers_of(count, target)
            if config.kind == "target":
                model = cut(whole, record["layers"])
            else:
                record["taps"] = taps = config.taps_of(count)
            if config.layout == "dspark":
                record["layers"] = config.layers  # new ones
                special = load_tokenizer(str(target)).all_special_ids
                set_seed(seed)
                model = first_dspark(whole, taps, rollouts, config, special)
            elif config.layout is not None:
                model = first_eagle3(whole, taps, rollouts)
            elif config.kind == "states":
                model, normed = _silent(whole, record, rollouts, seed)
                install(model, whole, taps)
                fit_inputs(model, whole, taps, rollouts, normed)
            if config.align:
                align_output(model, whole, rollouts, getattr(torch, states_dtype))
        vocabulary = model.config.get_text_config().vocab_size
        if config.vocabulary is not None:
            # The target's: an existing draft may name others, and decoding ends at these.
            ends = end_ids(load_configs(str(target))[1])
            vocabulary_ids = frequent_tokens(rollouts, config.vocabulary, vocabulary, ends)
            reduce_vocabulary(model, vocabulary_ids)
            record |= {
                "vocabulary": config.vocabulary,
                "coverage": coverage(rollouts, vocabulary_ids),
            }
        record["parameters"] = sum(weight.numel() for weight in model.parameters())
        ids = (torch.arange(PROBE, device=model.device) * 7919 % vocabulary).unsqueeze(0)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
        if config.vocabulary is not None and not logits[..., ~model.t2d].isneginf().all():
            raise ConfigError(
                f"{type(model).__name__} changes the logits that its output embedding gives, so "
                "that tokens left out of its vocabulary would have a probability: leave "
                "draft.init.vocabulary out"
            )
        with atomic_folder(out) as temporary:
            save_model(model, temporary)
            copy_tokenizer(str(target), temporary)
            reloaded = load_model(str(temporary)).to(model.device)
            if reads := states_input(model):  # the target that is loaded already
                reloaded.get_input_embeddings().read_target = reads.read_target
            with torch.inference_mode():
                again = reloaded(input_ids=ids, use_cache=False).logits
            if not torch.equal(logits, again):
                raise ConfigError(
                    f"{type(model).__name__} gives other logits once it is saved and loaded again, "
                    "so no draft can be made of it: give draft.init another kind, or leave its "
                    "vocabulary whole"
                )
            write_json(temporary / RESULT_FILE, record)
    return broadcast_by_main(record)


def frequent_tokens(
    rollouts: Dataset, count: int, vocabulary: int, ends: Iterable[int]
) -> list[int]:
    """The `count` tokens that a reduced vocabulary keeps, in the order in which they are chosen.

    End tokens first, then the most frequent of the completions, equal ones by id. If these are
    fewer than `count`, the most frequent of the prompts follow, then the lowest ids, which are
    the earliest merges of a byte-pair vocabulary. Rollouts may hold ids beyond the draft's own.
    """
    ends = sorted(token for token in ends if token < vocabulary)
    if not len(ends) <= count <= vocabulary:
        raise ConfigError(
            f"draft.init.vocabulary must be from {max(1, len(ends))} to {vocabulary}, the tokens "
            f"that the draft has, got {count}"
        )
    tokens = dict.fromkeys(ends)
    for column in ("completion_ids", "prompt_ids"):
        counts = value_counts(rollouts, column)
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        tokens |= dict.fromkeys(token for token in ranked if token < vocabulary)
    return list(tokens | dict.fromkeys(range(vocabulary)))[:count]


def coverage(rollouts: Dataset, vocabulary_ids: Iterable[int]) -> float:
    """The share of the completions' tokens that are among some."""
    counts, kept_ids = value_counts(rollouts, "completion_ids"), {*vocabulary_ids}
    return sum(count for token, count in counts.items() if token in kept_ids) / counts.total()


def cut(model: PreTrainedModel, numbers: Sequence[int]) -> PreTrainedModel:
    """A model of some of the layers of another, in order, all other weights as they are there.

    Of the same class, in eval mode; the weights are shared, not copied.
    """
    name, layers = decoder_layers(model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):  # lists with an entry a layer are cut alike
        is_of_layers = isinstance(value, list | tuple) and len(value) == len(layers)
        if is_of_layers and "token" not in key and key != "architectures":
            setattr(text, key, type(value)(value[index] for index in numbers))
    text.num_hidden_layers = len(numbers)
    config.name_or_path = ""
    with torch.device("meta"):
        shorter: PreTrainedModel = type(model)(config)
    for place, module in shorter.named_modules():
        new = old = None  # numbers of the layer that the module is in
        there = place
        if place.startswith(f"{name}."):
            new = int(place[len(name) + 1 :].split(".")[0])
            old = numbers[new]
            there = f"{name}.{old}{place.removeprefix(f'{name}.{new}')}"
        try:
            source = model.get_submodule(there)
            _share(source, module, {(old, new), (len(layers), len(numbers))})
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut: {there} depends on its place ({error}). "
                "Choose other layers, or give draft.init another kind: model or fresh"
            ) from error
    shorter.generation_config = special_ids(model.generation_config)
    return shorter.eval()


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
    gram = cross = torch.zeros((), dtype=torch.float64)
    for row in fit_rows(rollouts):
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=model.device)
        first = len(row["prompt_ids"]) - 1
        target_states = stored_states(row, head, states_dtype)
        if target_states is None:
            target_states = hidden_states(target, ids)[0, first:-1]
        draft_states = hidden_states(model, ids)[0, first:-1].double()
        gram = gram + draft_states.T @ draft_states
        cross = cross + draft_states.T @ target_states.to(draft_states)
    # States of few rollouts may not span the space; this keeps the map small where they do not.
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    shortcut = torch.linalg.solve(gram, cross)
    vocabulary, width = output.weight.shape
    fitted = nn.Linear(width, vocabulary, bias=output.bias is not None, device="meta")
    weight = (output.weight.double() @ shortcut.T).to(output.weight.dtype)
    fitted.weight = nn.Parameter(weight)
    if output.bias is not None:
        fitted.bias = nn.Parameter(output.bias.clone())
    replace_output(model, fitted)


def _fresh(target: str, rollouts: Dataset, config: InitConfig, seed: int) -> PreTrainedModel:
    """A Llama with random weights, for the target's vocabulary and context."""
    target_config, generation = load_configs(target)
    vocabulary = target_config.get_text_config().vocab_size
    context = _context(target_config, rollouts)
    sizes = ARCHITECTURES[config.architecture]
    if config.architecture == "toy":
        model = language_model(
            load_tokenizer(target),
            layers=sizes.num_hidden_layers,
            width=sizes.hidden_size,
            seed=seed,
            vocabulary=vocabulary,
            positions=context,
        )
    else:
        set_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                **asdict(sizes),
                vocab_size=vocabulary,
                max_position_embeddings=context,
                tie_word_embeddings=False,
            )
        )
    take_special_ids(model, generation)
    return model.eval()


def _silent(
    target: PreTrainedModel, record: dict[str, Any], rollouts: Dataset, seed: int
) -> tuple[PreTrainedModel, Callable[[Tensor], Tensor] | None]:
    """A model of the target's layers in a record, or of as many of Llama's; see `llama_draft`."""
    if can_be_silenced(target):
        with suppress(ConfigError):  # a layer depends on its place
            model = cut(target, record["layers"])
            silence(model)
            replace_output(model, copy.deepcopy(model.get_output_embeddings()))  # was tied
            return model, None
    record |= {"architecture": "llama", "layers": len(record["layers"])}
    return llama_draft(target, record["layers"], _context(target.config, rollouts), seed)


def _context(target: PreTrainedConfig, rollouts: Dataset) -> int:
    """The target's context, in tokens; if it has no limit, one that the rollouts fit in."""
    if (context := positions(target)) == sys.maxsize:
        lengths = list_lengths(rollouts, "prompt_ids", "completion_ids").sum(axis=0)
        context = max(LEAST_POSITIONS, int(lengths.max()))
    return context


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
        there = vars(source).get(key)
        if isinstance(value, Tensor):
            setattr(module, key, there)
        elif (
            isinstance(value, bool | int | float | str | None)
            and key != "training"
            and value != there
            and (there, value) not in places
        ):
            raise ValueError(f"its {key} is {there} there and would be {value}")
