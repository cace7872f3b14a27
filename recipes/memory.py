"""What each process of a launch holds on its device at least, stage by stage: `--plan` prints it.

Weights are counted by the models' config.json, and what a training adds is divided as DeepSpeed
divides it. Of our own are the logits that are made at once and the target's states that a draft
reads. What a draft's layers keep of a batch for the backward pass is a rule of thumb.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from distill.initial import new_draft
from distill.lesson import freeze
from distill.objective import CHUNK_BYTES, ENTRY_BYTES
from recipes.config import PipelineConfig
from recipes.models import kind_in, loads_target, model_config
from recipes.run import Stage, say
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.drafts.states_network import states_input
from specdata.loading import Dtype
from specdata.models import DTYPES, positions, without_weights
from specdata.processes import process_count, zero_settings

PROMPT = 512
"""Tokens that a prompt is taken to have."""
LAYER_BYTES = {"float32": 22, "bfloat16": 16}
"""Bytes that a layer of Llama's kind keeps of a token for the backward pass, for each number of its
hidden and intermediate size together, by `draft.precision`, without checkpoints, as drafts are
trained: 22.4 and 16.6 at Llama 2's shape, 19.6 and 14.1 with four times the width inside and a
fourth of the heads for keys (1,024 tokens; `pytest tests/distill/test_memory_plan.py -k keeps`)."""
REMEDIES = {
    "weights": "load the target in bfloat16, or over several devices (models.load.target)",
    "training": "launch zero2 or zero3, with more processes, or reduce draft.init.vocabulary",
    "layers": "lower batch_size (raise accumulation) or max_length, of draft or draft.finetune",
    "logits, taps": "lower batch_size (raise accumulation) or max_length, of draft or "
    "draft.finetune",
    "cache": "lower rollouts.batch_size (or eval.batch)",
}
"""Column of the table -> what to do where it is the largest of a stage that does not fit."""


def show_memory(stages: Sequence[Stage], size: int | None) -> None:
    """Print what each stage holds at least, and what to lower where that is more than a device has.

    `size` is that of a device, in bytes; by default that of the GPU there is.
    """
    config = stages[0].config
    if size is None and torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory
    if absent := [name for name in config.given_models if not model_config(name)]:
        say(f"memory is not known: no config.json of {', '.join(absent)} is on this machine")
        return
    of = f"GB of {size / 1e9:.0f}" if size else "GB"
    say(f"\nmemory that each process of {process_count()} holds at least, {of}")
    say("".join(f"{each:>13}" for each in ("", *REMEDIES, "together")))
    for stage in stages:
        if not (found := held(stage.name, config)):
            continue
        total = sum(found.values())
        values = (*(found.get(column, 0) for column in REMEDIES), total)
        say(f"{stage.name:<13}" + "".join(f"{value / 1e9:>13.2f}" for value in values))
        if size and total > size:
            most = max(found, key=lambda column: found[column])
            say(f"  does not fit: most are {most}; {REMEDIES[most]}")


def held(stage: str, config: PipelineConfig) -> dict[str, int]:
    """Bytes that a stage holds at least, by the columns of `REMEDIES`; empty if nothing much."""
    if stage in ("pair", "release"):
        return {}
    models, section = config.models, config.draft
    target = without_weights(models.target).to(torch.bfloat16)  # without which no experts are read
    text = target.config.get_text_config()
    longest = PROMPT + config.rollouts.max_new_tokens
    longest = min((section and section.max_length) or longest, positions(text))
    texts = config.rollouts.batch_size if stage == "rollouts" else config.eval.batch
    # The evaluation's own cache keeps all tokens, where windows would do, too.
    kept = cached_numbers(target, longest, in_windows=stage != "eval")
    cache = texts * kept * DTYPES[models.dtype_of("target")].itemsize
    if stage in ("rollouts", "logits"):
        found = {"weights": target_bytes(target, config, stage)}
        return found | ({"cache": cache} if stage == "rollouts" else {})
    draft = draft_of(target, config)
    if stage == "initial":
        is_here = not models.load.target.is_spread
        return {"weights": size_of(target, "float32") * is_here + size_of(draft, "float32")}
    taps = states_input(draft)
    if stage in ("labels", "head", "eval"):
        found = {"weights": size_of(draft, models.dtype_of("draft"))}
        if stage != "head" or taps is not None:  # which has its target read the texts
            of_target = target_bytes(target, config, "labels" if stage == "head" else stage)
            found["weights"] += of_target
        return found | ({"cache": cache} if stage == "eval" else {})
    assert section is not None  # or the stage is not asked for
    tuning = section.finetune if stage == "finetuned" else None
    if tuning is not None:
        longest = min(tuning.max_length, positions(text))
    freeze(draft, freeze_embeddings=section.freeze_embeddings)
    trained = 4 * sum(each.numel() for each in draft.parameters() if each.requires_grad)
    copy = size_of(draft, "float32")  # that is measured and saved
    weights, training = training_bytes(copy, trained, 2 * trained)
    tokens = math.ceil((tuning or section).batch_size / process_count()) * longest
    logits = min(CHUNK_BYTES, ENTRY_BYTES * tokens * text.vocab_size) // 2
    places = section.readings if taps is not None and not kind_in(config).in_blocks else 1
    found = {"weights": weights + copy, "training": training, "logits, taps": logits}
    precision = "float32" if tuning is not None else section.precision
    found["layers"] = places * tokens * layers_bytes(draft.config.get_text_config(), precision)
    if stage == "draft":
        found["weights"] += target_bytes(target, config, stage)
        found["logits, taps"] += 4 * tokens * (taps.read_width if taps else 0)
    return found


def draft_of(target: Any, config: PipelineConfig) -> Any:
    """The draft of a run, on no device."""
    init = config.draft.init if config.draft else None
    with torch.device("meta"):
        if init is not None and init.kind != "model":
            draft = new_draft(target, init)
        else:
            draft = without_weights(str(config.models.draft))
    if init is not None and init.vocabulary:
        reduce_vocabulary(draft, range(init.vocabulary))
    return draft


def target_bytes(target: Any, config: PipelineConfig, stage: str) -> int:
    """Bytes of the target in a process of a stage."""
    if config.models.load.target.device_map == "cpu" or not loads_target(config, stage):
        return 0
    return size_of(target, config.models.dtype_of("target"))


def size_of(model: Any, dtype: Dtype) -> int:
    """Bytes of a model's weights in a precision, each counted once."""
    count: int = sum(each.numel() for each in model.parameters())
    return count * DTYPES[dtype].itemsize


def layers_bytes(text: Any, precision: str) -> int:
    """Bytes that a model's layers keep of a token for the backward pass, about (`LAYER_BYTES`)."""
    width = text.hidden_size
    inside = getattr(text, "intermediate_size", None) or 4 * width
    inside = max(inside) if isinstance(inside, list | tuple) else inside
    return int(LAYER_BYTES[precision] * text.num_hidden_layers * (width + inside))


@torch.inference_mode()
def cached_numbers(model: Any, tokens: int, *, in_windows: bool) -> int:
    """Numbers that a model's cache keeps of a text of so many tokens, without recurrent states.

    A forward of one token tells what each layer keeps: heads may be shared among queries or layers,
    of another size in some layers, or latent. `in_windows`: layers with a window keep that alone.
    """
    text = model.config.get_text_config()
    try:
        out = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))
    except Exception:  # noqa: BLE001 - of a family whose code asks for values, which meta lacks
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = text.hidden_size // text.num_attention_heads
        return int(2 * tokens * text.num_hidden_layers * heads * width)
    numbers = 0
    for layer in getattr(getattr(out, "past_key_values", None), "layers", ()):
        parts = [getattr(layer, name, None) for name in ("keys", "values")]
        most = (getattr(layer, "sliding_window", None) or sys.maxsize) - 1  # and the next token
        of_layer = min(tokens, most) if in_windows else tokens
        numbers += of_layer * sum(each.numel() for each in parts if isinstance(each, torch.Tensor))
    return numbers


def training_bytes(weights: int, trained: int, moments: int) -> tuple[int, int]:
    """Bytes of a training's weights in a process, and of its gradients and optimizer, in float32.

    Of all weights so many bytes are trained, and their moments take so many.
    """
    parts = process_count()
    if (zero := zero_settings()) is None:
        return weights, (1 + (parts > 1)) * trained + moments  # DDP sends gradients in their size
    stage = zero["stage"]
    stays = {
        each: (zero.get(f"offload_{each}") or {}).get("device", "none") == "none"
        for each in ("param", "optimizer")
    }
    # DeepSpeed's optimizer has its own copy of the weights.
    updated = (trained + moments) // parts * stays["optimizer"]
    gradients = trained if stage < 2 else trained // parts * stays["optimizer"]
    return weights if stage < 3 else weights // parts * stays["param"], gradients + updated
