"""Batches of rollouts, or of what a draft writes instead, and the tokens at which they teach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdata.errors import ConfigError
from specdata.models import check_ids, positions
from specdata.rollouts.backend import sample_batch
from specdata.sampling import SamplingConfig, generator_for
from specdata.storage.columns import arrow_parts, cut_lists, list_lengths
from specdata.storage.schema import TARGET_STATES, TARGET_TAPS, TOP_LOGITS
from specdata.texts import IGNORED, TextBatch, TextRow, text_length


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
    tokens = tokens_of(usable)
    order, parts = [], []
    for places, table in arrow_parts(tokens, *tokens.column_names):
        column = table.column_names.index("completion_ids")
        shorter_lists = cut_lists(table[column], room[kept[places]])
        parts.append(table.set_column(column, "completion_ids", shorter_lists))
        order.append(places)
    shorter = Dataset(pa.concat_tables(parts)).select(np.argsort(np.concatenate(order)))
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
        inputs["input_ids"], inputs["attention_mask"], inputs["labels"], inputs["examples"].tolist()
    )


TEXTS_AT_ONCE = 64
"""Rows that the draft writes together: their cache is what generation needs memory for."""


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """Completions that the draft writes while it trains, in a `share` of the rows of each step.

    A draft that only ever reads the target's texts is not trained on what it reads while decoding:
    its own tokens. So at each optimizer step a share of the rows of the batch carries a completion
    of the prompt that the draft, as it is at that step, has just written (GKD, Agarwal et al. 2023,
    arXiv:2306.13649; DistillSpec, Zhou et al. 2023, arXiv:2310.08461). Tokens are constants: no
    gradient goes through their choice.

    What is drawn for a row depends on (seed, step, index of the row in the step) and on nothing
    else. So nothing has to be stored for a killed run to go on, and any number of processes and any
    split of a step into batches draws with the same uniforms. The tokens are then equal, too,
    unless rounding in a batch of another shape moves a cumulative probability past a uniform.

    It draws as serving does, ends where the target's `ends` do, and draws no id beyond the target's
    `vocabulary`; no row becomes longer than `longest` tokens by it. A batch has `batch_size` rows
    over all processes.
    """

    share: float
    sampling: SamplingConfig
    seed: int
    ends: frozenset[int]
    vocabulary: int
    longest: int
    batch_size: int
    pad_id: int

    def into(
        self, batches: Sequence[dict[str, Tensor]], draft: PreTrainedModel, step: int
    ) -> list[dict[str, Tensor]]:
        """The batches of a step (this process's share of them) with the draft's text in its rows.

        `step` counts the optimizer steps taken before.
        """
        rows = [row for batch in batches for row in rows_of(batch)]
        indices = [
            place * self.batch_size + index
            for place, batch in enumerate(batches)
            for index in batch["rows"].tolist()
        ]
        written = iter(self.write(draft, rows, indices, step))
        filled = []
        for batch in batches:
            new = collate(self.pad_id)([next(written) for _ in batch["rows"]])
            new["rows"] = batch["rows"][new["rows"].to(batch["rows"].device)]
            filled.append({name: new[name].to(batch[name].device) for name in batch})
        return filled

    def carries(self, step: int, index: int) -> bool:
        """True if row `index` of a step carries the draft's text.

        Systematic sampling, one uniform a step: each row is as likely as the share says, and of n
        rows it is always floor(n share) or ceil(n share).
        """
        offset = torch.rand((), generator=self._generator(step), dtype=torch.float64).item()
        share = self.share
        return math.floor((index + 1) * share + offset) > math.floor(index * share + offset)

    def write(
        self, draft: PreTrainedModel, rows: Sequence[TextRow], indices: Sequence[int], step: int
    ) -> list[TextRow]:
        """The rows, some of them with completions that the draft has written.

        A completion is at most as long as the rollout's and may end earlier, by an end token; a row
        without one stays as it is. The draft writes in eval mode, without gradients, and keeps its
        mode. `indices` are of the rows in the step, over all its batches and processes.
        """
        uniforms: dict[int, Tensor] = {}  # by the place among the rows
        for place, (row, index) in enumerate(zip(rows, indices, strict=True)):
            most = min(len(row["completion_ids"]), self.longest - len(row["prompt_ids"]))
            if most > 0 and self.carries(step, index):
                generator = self._generator(step, index)
                uniforms[place] = torch.rand(most, generator=generator, dtype=torch.float64)
        written, training = [*rows], draft.training
        order = sorted(uniforms, key=lambda place: len(rows[place]["prompt_ids"]))  # pads less
        draft.eval()
        try:
            for start in range(0, len(order), TEXTS_AT_ONCE):
                batch = order[start : start + TEXTS_AT_ONCE]
                prompts = [rows[place]["prompt_ids"] for place in batch]
                texts = sample_batch(
                    draft,
                    prompts,
                    [uniforms[place] for place in batch],
                    self.sampling,
                    ends=self.ends,
                    vocabulary=self.vocabulary,
                )
                for place, prompt, text in zip(batch, prompts, texts, strict=True):
                    written[place] = {"prompt_ids": prompt, "completion_ids": text}
        finally:
            draft.train(training)
        return written

    def _generator(self, *key: int) -> torch.Generator:
        return generator_for(self.seed, "on-policy", *key)


def rows_of(batch: Mapping[str, Tensor]) -> list[TextRow]:
    """The rows that were collated to a batch (B, T): labels tell completions from prompts."""
    rows: list[TextRow] = []
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    for ids, labels, length, example in zip(
        batch["input_ids"].tolist(),
        batch["labels"].tolist(),
        lengths,
        batch["examples"].tolist(),
        strict=True,
    ):
        prompt = sum(label == IGNORED for label in labels[:length])
        row = {"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:length]}
        rows.append(row if example < 0 else {**row, "example": example})
    return rows
