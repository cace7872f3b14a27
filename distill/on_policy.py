"""Completions that the draft writes while it trains, in place of some of the target's.

A draft that only ever reads the target's texts is not trained on what it reads while decoding: its
own tokens. So at each optimizer step a share of the rows of the batch carries a completion of the
prompt that the draft, as it is at that step, has just written (GKD, Agarwal et al. 2023,
arXiv:2306.13649; DistillSpec, Zhou et al. 2023, arXiv:2310.08461). Tokens are constants: no
gradient goes through their choice.

What is drawn for a row depends on (seed, step, index of the row in the step) and on nothing else.
So nothing has to be stored for a killed run to go on, and any number of processes and any split of
a step into batches draws with the same uniforms. The tokens are then equal, too, unless rounding in
a batch of another shape moves a cumulative probability past a uniform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.batches import collate
from specdata.rollouts.backend import sample_batch
from specdata.sampling import SamplingConfig, generator_for
from specdata.texts import IGNORED, TextRow

ROWS_AT_ONCE = 64
"""Rows that the draft writes together: their cache is what generation needs memory for."""


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """The draft's texts in a `share` of the rows of a step: which rows, and what it writes there.

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
            for start in range(0, len(order), ROWS_AT_ONCE):
                batch = order[start : start + ROWS_AT_ONCE]
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
