"""What `--plan` says of a stage's work and memory, and what helps where there is too little."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence

from recipes.layout import spared
from recipes.memory import (
    LIBRARIES,
    PARTS,
    WITHIN,
    Memory,
    Setting,
    stage_memory,
    unknown_models,
)
from recipes.units import in_bytes
from specdata.loading import Role
from specdata.prompts.config import PromptSet

# What a part of the memory is made smaller by, {} being the stage's own section. What loading a
# model otherwise can do depends on the stage: `_of_loading`.
REMEDIES = {
    "keys and values": "a smaller {}.batch_size or max_new_tokens",
    "weights in training": "draftsmith launch zero3 or fsdp2, or draft.lora",
    "gradients": "draftsmith launch zero2, or draft.lora",
    "optimizer": "draftsmith launch zero1, zero2 or zero3_offload, or draft.lora",
    "gradient bucket": "a smaller reduce_bucket_size in the launch profile",
    "activations": "a smaller {}.batch_size, or draft.gradient_checkpointing",
    "logits": "a smaller {}.batch_size, or draft.init.vocabulary",
}
ROLES: dict[str, Role] = {"target": "target", "drafts": "draft", "draft": "draft"}
SECTION = {"finetuned": "draft.finetune"}


def plan_lines(stage: str, setting: Setting) -> Iterator[str]:
    """What to say of a stage: tokens, processes, memory; nothing of one that computes nothing.

    Args:
        stage: its name.
        setting: what is known of the run and of this machine.
    """
    if tokens := tokens_of(stage, setting):
        verb = "writes" if stage == "eval" else "reads or writes"
        yield f"{verb} at most {tokens:,} tokens"
    found = stage_memory(stage, setting)
    if found is None:
        if stage in PARTS:
            missing = " and ".join(f"the {role}" for role in unknown_models(stage, setting))
            yield f"memory: not known, as config.json of {missing} is not on this machine"
        return
    if not found.parts:
        return
    where = "on the CPU" if setting.here.kind == "cpu" else "on its GPU"
    count = processes_of(stage, setting)
    each = "1 process" if count == 1 else f"each of {count} processes"
    parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in found.parts.items())
    yield f"holds {where}, in {each}, about {in_bytes(found.total)}: {parts}"
    yield from _too_much(stage, found, setting)


def assumptions(setting: Setting) -> str:
    """What the lines of all stages are to be read with."""
    return (
        f"memory is right within a factor {WITHIN:g}, without what the libraries take (some "
        f"{in_bytes(LIBRARIES)} of memory a process), for rollouts of {setting.prompt} + "
        f"{setting.config.rollouts.max_new_tokens} tokens. No time is estimated "
        "without measuring: --plan time measures for about a minute"
    )


def processes_of(stage: str, setting: Setting) -> int:
    """How many of the launch's processes work on a stage."""
    # Times are measured by one process a device, and a CPU is one.
    is_timed = stage == "eval" and setting.config.eval.batch == 1 and setting.here.kind == "cpu"
    alone = stage in ("pair", "initial", "release") or is_timed
    return 1 if alone else setting.shards.processes


def _too_much(stage: str, found: Memory, setting: Setting) -> Iterator[str]:
    """What to say if a device has less than is needed."""
    here = setting.here
    if here.memory is None:
        return
    local = 1
    needed = found.total
    if here.kind == "cpu":  # whose memory all processes of this machine share
        local = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), processes_of(stage, setting))
        needed = local * (found.total + LIBRARIES)
    if needed <= here.memory:
        return
    what = "this machine has free" if here.kind == "cpu" else "a GPU here has"
    section = SECTION.get(stage, stage)
    largest = sorted(found.parts, key=lambda name: -found.parts[name])
    known = (
        _of_loading(ROLES[name], stage, setting) if name in ROLES else REMEDIES.get(name, "")
        for name in largest
    )
    remedies = [remedy.format(section) for remedy in known if remedy][:2]
    yield f"that is more than {what} ({in_bytes(needed)} of {in_bytes(here.memory)})" + (
        f": try {'; or '.join(remedies)}" if remedies else ""
    )


def _of_loading(role: Role, stage: str, setting: Setting) -> str:
    """How a model that only reads its weights would take less here; only what is not done yet."""
    load, config = setting.load(role), setting.config
    key = f"models.load.{role}"
    is_divided = stage == "draft" and config.draft is not None and config.draft.shard_teacher
    ways = []
    if not (load.is_spread or load.tp_plan or is_divided):
        if setting.shards.processes == 1:
            ways.append(f"{key}.device_map auto")
        elif role == "target" and stage != "eval":
            is_draft = stage == "draft"
            ways.append("draft.shard_teacher true" if is_draft else f"{key}.tp_plan auto")
    if not (load.bits or load.tp_plan or is_divided):
        ways.append(f"{key}.bits 4")
    if load.dtype == "float32":
        ways.append(f"{key}.dtype bfloat16")
    if role == "target" and stage in ("draft", "labels"):
        ways.append(f"{stage}.cache with kept logits (draftsmith make-logits)")
    return ", ".join(ways)


def rows_of(setting: Setting, *splits: str) -> int | None:
    """Rollouts of some splits, or of all; None if a set has no count."""
    sets = [each for each in setting.config.rollouts.sets if not splits or each.split in splits]
    counted = _counted(sets)
    return None if counted is None else setting.config.rollouts.samples * counted


def tokens_of(stage: str, setting: Setting) -> int | None:
    """Tokens that the models read or write in a stage, at most; None if that is not known."""
    config, length = setting.config, setting.length
    train = rows_of(setting, "train")
    rows = rows_of(setting)
    if stage in ("rollouts", "logits", "labels") and rows is not None:
        return rows * length
    if stage == "draft" and train is not None and config.draft is not None:
        learnt = train * (1 - config.draft.spared)
        length = min(length, config.draft.max_length or length)
        return math.ceil(config.draft.epochs * learnt) * length
    if stage == "head" and train and config.head is not None:
        learnt = math.ceil(train * (spared(config) or 1.0))
        length = min(length, config.head.max_length or length)
        return config.head.passes(learnt) * learnt * length
    if stage == "eval" and (prompts := _counted(config.eval.sets)) is not None:
        return prompts * len(config.eval.methods) * config.eval.max_new_tokens
    return None


def _counted(sets: Iterable[PromptSet]) -> int | None:
    counts: Sequence[int] = [each.count for each in sets]
    return sum(counts) if all(counts) else None
