"""Logits: the target's N largest at every position of its completions, stored as a dataset.

Distillation and labels read them instead of the target. What they then give exactly, and what only
as a bound, depends on the sampler: `specdata.top_logits.TopLogitDistributions` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import datasets
from torch import Tensor

from specdata.config import LogitsConfig
from specdata.lm_head import LMHead
from specdata.logits.served import ServedLogits
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset
from specdata.storage.resume import Settings
from specdata.storage.schema import LOGITS, LogitRow, Rollout
from specdata.texts import ModelSource, TextBatch, text_columns, tokens_at_once
from specdata.top_logits import top_logits


def make_logits(
    source: ModelLogits | ServedLogits,
    rollouts: datasets.Dataset,
    folder: Path,
    config: LogitsConfig,
    *,
    settings: Settings,
    report: Callable[[int], object],
) -> int:
    """Store the target's largest logits along every rollout (see `fill_dataset`).

    Rollouts that keep the target's states are not read again by the target in this process. Returns
    the number of rows.
    """

    def shard(start: int) -> list[LogitRow]:
        stop = min(start + config.shard_size, len(rollouts))
        made = source(cast(list[Rollout], rollouts.select(range(start, stop)).to_list()))
        report(stop - start)
        return made

    stored = {"top_logits": source.count, "vocabulary": source.vocabulary}
    shards = [partial(shard, start) for start in range(0, len(rollouts), config.shard_size)]
    return fill_dataset(folder, LOGITS, settings.extended(stored), shards, report)


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """The N = `count` logits of rollouts by the target in this process, a forward over each.

    Rollouts that keep the target's states are not read again. Batches depend on the shard alone.
    """

    target: LMHead
    count: int

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.target.vocabulary

    def __call__(self, rows: Sequence[Rollout]) -> list[LogitRow]:
        """Each rollout with its columns of `TOP_LOGITS`, in the order given."""
        source = ModelSource(self.target, SamplingConfig())

        def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
            states, tokens = source.states(batch, rows), batch.tokens

            def read_chunk(chunk: slice) -> dict[str, Tensor]:
                logits = self.target.logits(states[chunk].to(tokens.device)).float()
                text_logit = logits.gather(-1, tokens[chunk, None]).squeeze(-1)
                return {**top_logits(logits, self.count), "text_logit": text_logit}

            return read_chunk

        columns_of = text_columns(
            rows,
            read,
            vocabulary=self.vocabulary,
            tokens_at_once=tokens_at_once(self.target),
            device=self.target.model.device,
        )
        lists = [
            {name: values.flatten().tolist() for name, values in columns.items()}
            for columns in columns_of
        ]
        return [
            cast(LogitRow, {**row, **columns}) for row, columns in zip(rows, lists, strict=True)
        ]
