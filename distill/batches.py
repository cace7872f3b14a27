"""Batches of rollouts: which tokens a model reads, and at which of them the loss is taken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import torch
from datasets import Dataset
from torch import Tensor

IGNORED = -100  # the Trainer counts the labels that differ from it


def collate(
    pad_id: int, *, process: int = 0, processes: int = 1
) -> Callable[[Sequence[Mapping[str, list[int]]]], dict[str, Tensor]]:
    """Return the collator of rollouts: (B, T) `input_ids`, `attention_mask` and `labels`.

    Rows are padded on the right and ordered by length; `labels` are the completion's tokens,
    `IGNORED` elsewhere. `rows` (B,) is each row's index in the global batch, as the data set gave
    it, whatever the order and the number of processes; -1 for a row that fills an empty share.

    Args:
        pad_id: fills up `input_ids`.
        process: which of the `processes` shares of the rows to collate. A share without a row
            becomes one row without labels, because collective operations need a batch.
        processes: among how many the rows are divided.
    """

    def batch(given: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        nothing = {"prompt_ids": given[0]["prompt_ids"][:1], "completion_ids": []}
        order = sorted(range(len(given)), key=lambda index: _length(given[index]))
        share = order[process::processes] or [-1]
        rows = [nothing if index < 0 else given[index] for index in share]
        shape = (len(rows), max(map(_length, rows)))
        ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
        attention = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            begin = len(row["prompt_ids"])
            end = begin + len(row["completion_ids"])
            ids[index, :end] = torch.tensor(row["prompt_ids"] + row["completion_ids"])
            labels[index, begin:end] = ids[index, begin:end]
            attention[index, :end] = 1
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "labels": labels,
            "rows": torch.tensor(share),
        }

    return batch


def _length(row: Mapping[str, list[int]]) -> int:
    return len(row["prompt_ids"]) + len(row["completion_ids"])


def content_of(rollouts: Dataset) -> str:
    """A short hash of the token ids, the same wherever and however the rows are stored."""
    digest = hashlib.sha256()
    for row in rollouts:
        digest.update(json.dumps([row["prompt_ids"], row["completion_ids"]]).encode())
    return digest.hexdigest()[:16]
