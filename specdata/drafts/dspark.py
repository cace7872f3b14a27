"""Drafts in DSpark's form (published for Qwen3 by DeepSpec): a block after one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from specdata.config import checked_taps
from specdata.drafts.kind import (
    KEY,
    LLAMA_LIKE,
    ConfigJson,
    DraftKind,
    Served,
    has_record,
    usual_taps,
)
from specdata.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Blocks:
    """The form of a draft: tokens of a block, the target's token for the mask, the bias's rank."""

    size: Annotated[int, Field(ge=2)]
    mask: NonNegativeInt
    rank: PositiveInt


def _depths(settings: ConfigJson) -> int:
    size: int = settings[KEY]["blocks"]["size"]
    return size


def _taps_of(taps: list[int] | None, count: int) -> list[int]:
    found = checked_taps(taps or [tap for tap in usual_taps(count)[:-1] if tap], count)
    if not found or found[0] == 0 or found[-1] == count:
        raise ConfigError(
            f"taps must be from 1 to {count - 1} with layout dspark, got {found}: engines call "
            "a tap by the layer before it, and llama.cpp hands out nothing behind the last one"
        )
    return found


DSPARK = DraftKind(
    "dspark",
    is_of=has_record("blocks"),
    served=Served(
        method="dspark",
        tags=("dspark", "vllm", "sglang", "llama-cpp", "arxiv:2607.05147"),
        one_forward_engines=("vLLM", "SGLang", "llama.cpp"),
    ),
    depths=_depths,
    reads_states=True,
    in_blocks=True,
    record_key="blocks",
    record_class=Blocks,
    taps_of=_taps_of,
    targets=LLAMA_LIKE,
    layouts={
        "dspark": "DSpark's own code, which vLLM (on GPUs), SGLang and llama.cpp's converter load"
    },
    architecture="DSpark",
    section=(
        "init: {kind: states, layout: dspark, layers: 1}, optimizer: muon, learning_rate: 1.5e-3"
    ),
    engine_head="confidence",
)
