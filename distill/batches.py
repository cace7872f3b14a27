"""Batches of rollouts: which tokens a model reads, and at which of them the loss is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedConfig

from specdata.errors import ConfigError
from specdata.models import check_ids, positions
from specdata.storage.columns import arrow_parts, list_lengths
from specdata.storage.schema import TARGET_STATES, TARGET_TAPS, TOP_LOGITS
from specdata.texts import TextBatch, TextRow, text_length


@dataclass(frozen=True, slots=True)
class Fitted:
    """Rollouts as they are trained or measured on: each with a completion, and none too long.

    `cut` counts those that lost tokens of their completions, `left_out` those that had no
    completion, or lost all of it.
    """

    rollouts: Dataset
    cut: int
    left_out: int


def fitted(rollouts: Dataset, max_length: int | None) -> Fitted:
    """Cut rollouts to `max_length` tokens, and leave out those without a completion."""
    prompts, completions = list_lengths(rollouts, "prompt_ids", "completion_ids")
    room = completions if max_length is None else np.minimum(completions, max_length - prompts)
    kept = np.flatnonzero(room > 0)
    if not len(kept):
        raise ConfigError(
            f"none of {len(rollouts)} rollouts has a completion token that can be learnt from: "
            + (
                "their completions are empty"
                if max_length is None
                else f"draft.max_length is {max_length}, and the shortest prompt has "
                f"{min(prompts)} tokens: raise it"
            )
        )
    cut = int((room < completions)[kept].sum())
    left_out = len(rollouts) - len(kept)
    usable = rollouts.select(kept) if left_out else rollouts
    if not cut:
        return Fitted(usable, cut, left_out)
    assert max_length is not None  # or none would be cut
    tokens = tokens_of(usable)
    shorter = tokens.map(
        lambda prompt, completion: {"completion_ids": completion[: max_length - len(prompt)]},
        input_columns=["prompt_ids", "completion_ids"],
        features=tokens.features,
        keep_in_memory=True,
    )
    # What is stored of the target stays on the disk, and is cut where it is read.
    if large := [name for name in usable.column_names if name not in tokens.column_names]:
        shorter = concatenate_datasets([shorter, usable.select_columns(large)], axis=1)
    return Fitted(shorter, cut, left_out)


def tokens_of(rollouts: Dataset) -> Dataset:
    """Leave out what rows store of the target, as reading a row reads every column."""
    stored = [*TARGET_STATES.names, *TARGET_TAPS.names, *TOP_LOGITS.names]
    return rollouts.remove_columns([name for name in rollouts.column_names if name in stored])


def check_context(configs: Mapping[str, PreTrainedConfig], *rollouts: Dataset) -> None:
    """Make sure that models, by their roles, have positions for every rollout, and its tokens."""
    columns = ("prompt_ids", "completion_ids")
    longest = max(list_lengths(each, *columns).sum(axis=0).max() for each in rollouts)
    bounds = pa.array(
        bound
        for each in rollouts
        for _, table in arrow_parts(each, *columns)
        for column in table.columns
        for bound in pc.min_max(pc.list_flatten(column)).values()
    )
    least, largest = (bound.as_py() for bound in pc.min_max(bounds).values())
    for role, config in configs.items():
        check_ids(config.get_text_config().vocab_size, least, largest)
        if longest > (limit := positions(config)):
            raise ConfigError(
                f"the longest rollout has {longest} tokens, but the {role} "
                f"({config.name_or_path}) has positions for {limit}: set draft.max_length to at "
                f"most {limit}, or take a {role} with more positions"
            )


class Numbered(torch.utils.data.Dataset[TextRow]):
    """Rollouts that say which they are: `example` is their index."""

    def __init__(self, rollouts: Dataset) -> None:
        # The teacher reads the rest by itself, without handing it through the batches.
        self.rollouts = tokens_of(rollouts)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> TextRow:
        return {**self.rollouts[index], "example": index}


def collate(
    pad_id: int, *, process: int = 0, processes: int = 1
) -> Callable[[Sequence[TextRow]], dict[str, Tensor]]:
    """Return the collator of rollouts: (B, T) `input_ids`, `attention_mask` and `labels`.

    Rows are padded on the right and ordered by length; `labels` are the completion's tokens,
    `IGNORED` elsewhere. `rows` (B,) is each row's index in the global batch, as the data set gave
    it, whatever the order and the number of processes; -1 for a row that fills an empty share.
    `examples` (B,) is its index in the data set, where the row says it as `example`; else -1.

    Of the rows it collates the share of one of the `processes`. A share without a row becomes one
    row without labels, because collective operations need a batch.
    """

    def batch(rows: Sequence[TextRow]) -> dict[str, Tensor]:
        nothing = {"prompt_ids": rows[0]["prompt_ids"][:1], "completion_ids": []}
        order = sorted(range(len(rows)), key=lambda index: text_length(rows[index]))
        share = order[process::processes] or [-1]
        share_rows = [nothing if index < 0 else rows[index] for index in share]
        examples = [row.get("example", -1) for row in share_rows]
        texts = TextBatch.of(share_rows, examples, pad_id=pad_id)
        return {
            "input_ids": texts.input_ids,
            "attention_mask": texts.attention_mask,
            "labels": texts.labels,
            "rows": torch.tensor(share),
            "examples": torch.tensor(examples),
        }

    return batch


def text_batch(inputs: Mapping[str, Tensor]) -> TextBatch:
    """The texts of a batch of `collate`."""
    return TextBatch(
        inputs["input_ids"],
        inputs["attention_mask"],
        inputs["labels"],
        inputs["examples"].tolist(),
    )
