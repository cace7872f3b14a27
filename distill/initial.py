"""Where a draft comes from, as its kind begins, and its vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.batches import check_context
from distill.config import FRESH, InitConfig
from distill.drafts import TRAININGS, plain
from distill.drafts.plain import Source
from distill.training import RESULT_FILE, ModelFolder, save_model
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.drafts.states_network import states_input
from specdata.errors import ConfigError
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import (
    check_shared_vocabulary,
    end_ids,
    load_configs,
    load_model,
    load_tokenizer,
)
from specdata.processes import broadcast_by_main, join_processes
from specdata.saving import copy_tokenizer
from specdata.storage.columns import list_lengths, value_counts
from specdata.storage.files import atomic_folder, write_json

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
            model = plain.fresh(str(target), rollouts, seed)
        else:
            whole = load_model(str(target), load=target_load)
            source = plain.Source.of(whole, config)
            record["layers"] = source.layers
            if source.taps:
                record["taps"] = source.taps
            begin = TRAININGS[config.draft_kind.name].begin
            model, changed = begin(whole, source, rollouts, seed)
            record |= changed
            if config.align:
                plain.align_output(model, whole, rollouts, getattr(torch, states_dtype))
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
            if input_embedding := states_input(model):  # the target that is loaded already
                reloaded.get_input_embeddings().share_target(input_embedding)
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


def new_draft(target: PreTrainedModel, init: InitConfig) -> PreTrainedModel:
    """The draft that `make_initial` makes, of a target on no device, there, too.

    A vocabulary is left as it is.
    """
    text: Any = target.config.get_text_config()
    if init.kind == "fresh":
        sizes: Any = FRESH
        config = LlamaConfig(**sizes, vocab_size=text.vocab_size, tie_word_embeddings=False)
        return LlamaForCausalLM(config)
    return TRAININGS[init.draft_kind.name].of_shapes(target, Source.of(target, init))
