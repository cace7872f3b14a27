"""Label rows: which can be used, what of each is learned from in a pass, and what makes a batch.

SpecDec++'s head learns from token mixing: the target's own response X and the draft's tokens Y (Y_i
drawn after X_<i) become one sequence Z: Z_i = X_i with probability r, which carries no label, else
Z_i = Y_i with the label min(1, p/q). The state of Z_i, after the draft consumed it, is what
predicts its acceptance; nothing is shifted. Ours learns of every Y_i after the target's own X_<i,
which is all that a draft in decoding has read when it drafts its first token, and, as long as its
tokens are accepted, its later ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict, cast

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.sampling import numpy_generator_for
from specdata.storage.schema import MORE_DRAWS
from specdata.texts import text_length

Key = tuple[str | int, ...]
COLUMNS = (
    "example_id",
    "sample",
    "prompt_ids",
    "completion_ids",
    "draft_ids",
    "accept_prob",
)


class LabelRow(TypedDict):
    """The columns that training reads; those after prompt_ids are aligned token by token.

    The last two hold more draws a position, S - 1 values for each, one position after the other.
    """

    example_id: str
    sample: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    draft_ids: Sequence[int]
    accept_prob: Sequence[float]
    more_draft_ids: NotRequired[Sequence[int]]
    more_accept_prob: NotRequired[Sequence[float]]


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The usable rows of a labelled dataset: with a completion token within the maximum length.

    `labels` counts the positions with a label in all rows, `cut` those beyond that length.
    """

    dataset: datasets.Dataset
    usable: list[int]
    labels: int
    cut: int

    @classmethod
    def read(
        cls, name: str, dataset: datasets.Dataset, max_length: int, *, with_draws: bool
    ) -> LabelRows:
        """Check a dataset, which errors call `name`, and find its usable rows.

        Of a row at most `max_length` tokens, prompt and completion, are kept. Further draws are
        read `with_draws`, if it has them.
        """
        missing = [column for column in COLUMNS if column not in dataset.column_names]
        if missing:
            raise ConfigError(
                f"the {name} rows must have the columns {', '.join(COLUMNS)}; "
                f"{', '.join(missing)} missing; label the rollouts first"
            )
        more = MORE_DRAWS.names if with_draws else ()
        columns = dataset.select_columns(
            [*COLUMNS, *(column for column in more if column in dataset.column_names)]
        )
        prompts: list[int] = []
        completions: list[int] = []
        for rows in columns.with_format("arrow").iter(batch_size=1024):
            prompts += pc.list_value_length(rows["prompt_ids"]).to_pylist()
            completions += pc.list_value_length(rows["completion_ids"]).to_pylist()
        lengths = list(zip(prompts, completions, strict=True))
        usable = [i for i, (prompt, rest) in enumerate(lengths) if prompt < max_length and rest > 0]
        if not usable:
            raise ConfigError(
                f"none of the {len(prompts)} {name} rows has a completion token within the draft's "
                f"context of {max_length} tokens: make rollouts with shorter prompts"
            )
        kept = sum(min(lengths[i][1], max_length - lengths[i][0]) for i in usable)
        labels = sum(completions)
        return cls(columns, usable, labels, labels - kept)

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, position: int) -> LabelRow:
        return cast(LabelRow, self.dataset[self.usable[position]])

    @property
    def skipped(self) -> int:
        """Rows left out because nothing in them can be learned."""
        return len(self.dataset) - len(self.usable)

    def order(self, seed: int, epoch: int) -> list[int]:
        """The order in which the rows are learned from in one epoch."""
        order: list[int] = numpy_generator_for("order", seed, epoch).permutation(len(self)).tolist()
        return order


@dataclass(frozen=True, slots=True)
class HeadRow:
    """One text for the draft, and S tokens at each of n positions that are learned from.

    Attributes:
        text: `prompt_ids` and `completion_ids` (`specdata.texts`). The draft's state from which it
            would draw a token of the completion is what is known of the tokens there.
        places: (n,) int64, positions in the completion.
        tokens: (n, S) int64.
        accept: (n, S) float32, min(1, p/q) of each.
        counts: whether its labels count; those of a row that fills up a batch do not.
        index: of the row in its dataset, to find what is kept of it; -1 if nothing is.
        draws: which S of the row's draws these are.
    """

    text: Mapping[str, Sequence[int]]
    places: Tensor
    tokens: Tensor
    accept: Tensor
    counts: bool = True
    index: int = -1
    draws: tuple[int, ...] = (0,)


def mixed_row(row: LabelRow, *, rate: float, max_length: int, key: Key) -> HeadRow:
    """Mix one row: the text holds the tokens that are judged, by the states after them.

    Raises ValueError if the row's columns do not fit each other.

    Args:
        row: the labels of one completion.
        rate: r in [0, 1), the probability that a position keeps the target's token.
        max_length: tokens of prompt + completion kept; the rest is cut at the end.
        key: what the draw depends on beside example_id and sample, e.g. (seed, epoch). The same
            key gives the same mixing on any process, in any order and after a resume.
    """
    tokens, accept = drawn_tokens(row)
    uniform = numpy_generator_for(*key, row["example_id"], row["sample"]).random(len(tokens))
    is_drafted = uniform >= rate
    mixed = np.where(is_drafted, tokens[:, 0], np.asarray(row["completion_ids"]))
    kept = mixed[: max_length - len(row["prompt_ids"])].tolist()
    places = is_drafted[: len(kept)].nonzero()[0]
    return HeadRow(
        # Moved by one: the state after a token is the one that the next is drawn from. The last
        # one, of which nothing is asked, is drawn by nobody.
        text={"prompt_ids": [*row["prompt_ids"], *kept[:1]], "completion_ids": [*kept[1:], 0]},
        places=torch.from_numpy(places),
        tokens=torch.from_numpy(tokens[places, :1]),
        accept=torch.from_numpy(accept[places, :1]),
    )


def drawn_row(row: LabelRow, *, draws: Sequence[int], max_length: int, index: int = -1) -> HeadRow:
    """Some of a row's draws, each beside the target's own text, by the states before them.

    `max_length` as of `mixed_row`; `index` is the row's in its dataset, if what the draft says of
    it may be kept. Raises ValueError if the row's columns do not fit each other.
    """
    tokens, accept = drawn_tokens(row)
    prompt = row["prompt_ids"]
    if not prompt:
        raise _unfit(row, "prompt_ids must hold a token, as the first one is drafted after it")
    kept = min(len(tokens), max_length - len(prompt))
    return HeadRow(
        text={"prompt_ids": prompt, "completion_ids": row["completion_ids"][:kept]},
        places=torch.arange(kept),
        tokens=torch.from_numpy(tokens[:kept, list(draws)]),
        accept=torch.from_numpy(accept[:kept, list(draws)]),
        index=index,
        draws=tuple(draws),
    )


def draws_of(row: LabelRow) -> int:
    """The number of tokens a position that the labels of a row hold."""
    return 1 + len(row.get("more_draft_ids") or ()) // max(1, len(row["draft_ids"]))


def drawn_tokens(row: LabelRow) -> tuple[np.ndarray, np.ndarray]:
    """(n, S) int64 tokens and (n, S) float32 labels, the row's own draw first.

    Raises ValueError if the row's columns do not fit each other.
    """
    tokens = np.asarray(row["draft_ids"], dtype=np.int64)
    accept = np.asarray(row["accept_prob"], dtype=np.float32)
    if not len(row["completion_ids"]) == len(tokens) == len(accept):
        raise _unfit(
            row,
            "completion_ids, draft_ids and accept_prob must be equally long, got "
            f"{len(row['completion_ids'])}, {len(tokens)} and {len(accept)}",
        )
    if len(accept) and not (accept.min() >= 0.0 and accept.max() <= 1.0):
        raise _unfit(
            row,
            f"accept_prob must lie in [0, 1], got values from {accept.min()} to {accept.max()}",
        )
    more_tokens = np.asarray(row.get("more_draft_ids") or (), dtype=np.int64)
    more_accept = np.asarray(row.get("more_accept_prob") or (), dtype=np.float32)
    if len(more_tokens) != len(more_accept) or len(more_tokens) % max(1, len(tokens)):
        raise _unfit(
            row,
            f"for {len(tokens)} draft_ids there must be equally many of more_draft_ids and "
            f"more_accept_prob for each, got {len(more_tokens)} and {len(more_accept)}",
        )
    shape = len(tokens), draws_of(row) - 1
    return (
        np.hstack([tokens[:, None], more_tokens.reshape(shape)]),
        np.hstack([accept[:, None], more_accept.reshape(shape)]),
    )


def _unfit(row: LabelRow, problem: str) -> ValueError:
    return ValueError(
        f"example {row['example_id']!r}, sample {row['sample']}: {problem}; label the rollouts "
        "again"
    )


def labels_of(rows: Sequence[HeadRow]) -> tuple[Tensor, Tensor]:
    """(N, S) labels of the rows' positions in one line, and bool, which of them count."""
    counts = torch.cat([torch.full(row.accept.shape, row.counts) for row in rows])
    return torch.cat([row.accept for row in rows]), counts


def micro_batches(
    rows: Sequence[HeadRow], *, size: int, process: int, processes: int, count: int | None = None
) -> Iterator[list[HeadRow]]:
    """Yield one process's part of a global batch, in `count` micro-batches of `size` rows.

    Where rows run out, rows without labels fill up: every process computes equally many
    micro-batches of equal size, as collective operations require, and the sum does not change. By
    default they are as many as the rows need.
    """
    count = count or math.ceil(len(rows) / (size * processes))
    ordered = sorted(rows, key=lambda row: text_length(row.text))  # like lengths pad less
    filler = replace(ordered[0], counts=False)
    ordered += [filler] * (size * count * processes - len(ordered))
    for index in range(count):
        start = (index * processes + process) * size
        yield ordered[start : start + size]
