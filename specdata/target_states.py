"""The target's last hidden states along its completions, stored with the rollouts.

The target computes them while it samples. Stored, they save distillation and labels a forward of it
over every rollout: its output matrix makes the same logits of them again. They are those of the
forwards that sampled, so they differ from those of a later forward by rounding alone.

For drafts that read states inside the target (`specdata.drafts.taps`), those are stored at every
token that the target read, in float16: each is scaled to unit mean square, and its scale stands
behind it, in the room of two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from specdata.drafts.states_network import EPSILON, TargetStates, states_input
from specdata.errors import ConfigError
from specdata.lm_head import LMHead, find_lm_head
from specdata.storage.schema import TARGET_STATES, TARGET_TAPS

(COLUMN,) = TARGET_STATES.names
TAPS, TAPPED = TARGET_TAPS.names


def check_keepable(model: Any) -> None:
    """Raise ConfigError for a model whose logits are not made of its last states in a known way."""
    if find_lm_head(model).embedding is None:
        raise ConfigError(
            f"rollouts.store_states must be false for {type(model).__name__}: its logits are not "
            "made of its last hidden states in a way known here"
        )


def to_bytes(states: Tensor) -> bytes:
    """(C, H) states in the model's precision -> what is stored of them."""
    return bytes(states.contiguous().cpu().view(torch.uint8).numpy())


def taps_to_bytes(tapped: Tensor, taps: int) -> bytes:
    """(N, F) states inside the target in any precision -> what is stored of them."""
    each = tapped.float().view(len(tapped), taps, -1)
    scale = (each.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
    return to_bytes(torch.cat([(each / scale).half(), scale.view(torch.float16)], dim=-1))


def has_states(rollouts: Dataset) -> bool:
    """True if rollouts are stored with their states."""
    return COLUMN in rollouts.column_names


def has_taps(rollouts: Dataset) -> bool:
    """True if rollouts are stored with states inside the target."""
    return {TAPS, TAPPED} <= {*rollouts.column_names}


@contextmanager
def reading_stored(draft: Any, rows: Sequence[Mapping[str, Any]], length: int) -> Iterator[None]:
    """Inside, a draft that reads states takes those stored with the texts that it reads, if any.

    `rows` are B rollouts, whose completions may have been cut since; `length` is T of the ids that
    it reads of them, padding on the right included.
    """
    input_embedding = states_input(draft)
    taps = [] if input_embedding is None else TargetStates.of(draft.config).taps
    is_stored = all(row.get(TAPPED) and {*taps} <= {*(row.get(TAPS) or ())} for row in rows)
    if input_embedding is None or not rows or not is_stored:
        yield
        return
    size = TargetStates.of(draft.config).width // len(taps)
    states = torch.zeros(len(rows), length, len(taps) * size, dtype=input_embedding.weight.dtype)
    for place, row in enumerate(rows):
        count = len(row["prompt_ids"]) + len(row["completion_ids"]) - 1
        numbers, width = len(row[TAPPED]) / torch.float16.itemsize, len(row[TAPS]) * (size + 2)
        if numbers % width or numbers < count * width:
            raise ConfigError(
                f"the rollouts keep {numbers:,g} numbers of the target's states for {count} "
                f"tokens of {width} numbers each: they were made with another target, or cut; "
                "make the rollouts again"
            )
        stored = torch.frombuffer(bytearray(row[TAPPED]), dtype=torch.float16)
        each = stored.view(-1, len(row[TAPS]), size + 2)[: min(count, length)]
        each = each[:, [row[TAPS].index(tap) for tap in taps]]
        scale = each[..., size:].contiguous().view(torch.float32)
        states[place, : len(each)] = (each[..., :size] * scale).flatten(1)
    with input_embedding.reading(states):
        yield


def target_taps(draft: Any, rows: Sequence[Mapping[str, Any]], ids: Tensor) -> Tensor | None:
    """(B, T, F) the target's states along (B, T) texts, stored with them or read; see `taps`.

    `rows` are those of `reading_stored`. None if the draft reads no states.
    """
    input_embedding = states_input(draft)
    if input_embedding is None:
        return None
    with reading_stored(draft, rows, ids.shape[1]):
        return input_embedding.read_target(ids)


def stored_states(
    row: Mapping[str, Any], target: LMHead, dtype: torch.dtype | None = None
) -> Tensor | None:
    """(C, H) of the target at the completion tokens of a stored rollout, on the CPU.

    In the precision `dtype` that it had when it made them, if it has another now. None if the
    rollout was stored without, or if the target's logits are not made of its states.
    """
    stored = row.get(COLUMN)
    if stored is None or target.embedding is None:
        return None
    dtype = dtype or target.model.dtype
    width = target.model.config.get_text_config().hidden_size
    length = len(row["completion_ids"])
    if len(stored) % (width * dtype.itemsize) or len(stored) < length * width * dtype.itemsize:
        raise ConfigError(
            f"the rollouts keep {len(stored):,} bytes of states for {length} tokens, but the target"
            f" has {width} numbers of {dtype.itemsize} bytes a token: they were made with another "
            "target or models.dtype; make the rollouts again"
        )
    states = torch.frombuffer(bytearray(stored), dtype=dtype).view(-1, width)
    return states[:length]
