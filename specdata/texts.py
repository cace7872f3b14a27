"""Texts that models read: their states, p and q at the completion tokens.

`text_columns` is the one loop: texts of like length go through the models together, and
distributions over the vocabulary are made for a few positions at a time, since those of a whole
batch would need more memory than the models. Labels, stored logits, measurements, teachers and
analyses are what is computed at the positions. p comes from a `TargetSource`: a model (its forward,
or the states that rollouts keep of it), or the top logits that an earlier stage stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdata.drafts.state_store import StateStore
from specdata.lm_head import LMHead, find_lm_head
from specdata.models import check_ids, check_length, positions
from specdata.probability import SamplingConfig, probabilities, to_vocabulary
from specdata.target_states import reading_stored, stored_states
from specdata.threads import threads_of
from specdata.top_logits import TopLogitDistributions, log_total, top_logit_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of one forward, padding included. Larger batches leave a CPU's caches (at 4096 the toy pair
# is labelled a third slower), smaller ones leave a GPU waiting.
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
# Positions whose distributions are held at once: as many as make VALUES_AT_ONCE probabilities, but
# at least these.
VALUES_AT_ONCE = 1 << 20
POSITIONS = {"cpu": 32, "cuda": 256}
IGNORED = -100
"""The label of a token that is none; the Trainer counts the labels that differ from it."""

TextRow = Mapping[str, Any]
"""A text: `prompt_ids` and `completion_ids`, and what else is stored of it."""


class TextRows(Protocol):
    """Texts by their index: a list, or a stored dataset, of which a row is read when asked for."""

    def __getitem__(self, index: int, /) -> Any:
        """One row."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts that go through models together, and their N completion positions in one line.

    Attributes:
        input_ids: (B, T) prompts and completions, padded on the right.
        attention_mask: (B, T) 1 at tokens, 0 at padding.
        labels: (B, T) the completions' tokens, those that are asked for; `IGNORED` elsewhere.
        examples: B indices of the rows where they come from; -1 for other text.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    examples: Sequence[int]

    @classmethod
    def of(
        cls,
        rows: Sequence[TextRow],
        examples: Sequence[int],
        *,
        pad_id: int = 0,
        places: Sequence[Tensor] | None = None,
    ) -> TextBatch:
        """Pad rows; of each completion all tokens are asked for, or those at `places`."""
        texts = [torch.tensor([*row["prompt_ids"], *row["completion_ids"]]) for row in rows]
        begins = torch.tensor([[len(row["prompt_ids"])] for row in rows])
        ends = torch.tensor([[len(text)] for text in texts])
        ids = pad_sequence(texts, batch_first=True, padding_value=pad_id)
        places_in_text = torch.arange(ids.shape[1])
        is_text = places_in_text < ends
        is_asked = (begins <= places_in_text) & is_text
        if places is not None:
            is_asked = torch.zeros_like(is_asked)
            for row, begin in enumerate(begins.flatten().tolist()):
                is_asked[row, begin + places[row]] = True
        return cls(ids, is_text.long(), ids.masked_fill(~is_asked, IGNORED), examples)

    def to(self, device: torch.device) -> TextBatch:
        """The batch on a device."""
        ids, mask, labels = self.input_ids, self.attention_mask, self.labels
        return TextBatch(ids.to(device), mask.to(device), labels.to(device), self.examples)

    def part(self, rows: Sequence[int]) -> TextBatch:
        """Some of the texts, no wider than the longest of them."""
        longest = int(self.attention_mask[rows].sum(dim=1).max())
        ids, mask, labels = (
            each[rows, :longest] for each in (self.input_ids, self.attention_mask, self.labels)
        )
        return TextBatch(ids, mask, labels, [self.examples[row] for row in rows])

    @property
    def is_predicted(self) -> Tensor:
        """(B, T - 1) bool where a model's output predicts a token that is asked for."""
        return self.labels[:, 1:] != IGNORED

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that are asked for of each text."""
        return self.is_predicted.sum(dim=1).tolist()

    @property
    def tokens(self) -> Tensor:
        """(N,) the tokens that are asked for."""
        return self.labels[:, 1:][self.is_predicted]

    def states(
        self, head: LMHead, rows: TextRows | None = None, vocabulary: int | None = None
    ) -> Tensor:
        """(N, H) states that predict the tokens; a draft on states has its target read the texts.

        `rows` are those that `examples` are of, which may store these states. The `vocabulary` of
        the texts is the target's, of which a draft may lack rows; by default the head's own.
        """
        ids = self.input_ids[:, :-1].to(head.model.device)
        check_length(head.model.config, ids.shape[1])
        check_ids(vocabulary or head.vocabulary, *map(int, self.input_ids.aminmax()))
        stored = [] if rows is None else [rows[example] for example in self.examples]
        with reading_stored(head.model, stored, ids.shape[1]):
            return head.states(ids)[self.is_predicted.to(ids.device)]


class TargetDistributions(NamedTuple):
    """The distributions of a target at C positions.

    Attributes:
        p: (C, V) distributions; some distribution where they are not decided.
        of_text: (C, 1) the text's own tokens under them, which is exact.
        decided: (C,) bool.
    """

    p: Tensor
    of_text: Tensor
    decided: Tensor


ChunkReader = Callable[[slice, Tensor], TargetDistributions]
"""Some of a batch's N positions, and q there (C, V), which a bound of p is made of -> p."""


class TargetSource(Protocol):
    """A source of a target's distributions."""

    @property
    def vocabulary(self) -> int:
        """V."""

    def distributions_of(self, batch: TextBatch, rows: TextRows) -> ChunkReader:
        """Read a batch; `rows` are those that its `examples` are of, with what they store."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A target: the states that the rows store of it, or its forward's, through its output matrix.

    A store keeps what a forward gave, for texts that are read again.
    """

    head: LMHead
    sampling: SamplingConfig
    store: StateStore | None = None

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.head.vocabulary

    def states(self, batch: TextBatch, rows: TextRows) -> Tensor:
        """(N, H) states of the target at the positions."""
        stored = [stored_states(rows[example], self.head) for example in batch.examples]
        whole = [states for states in stored if states is not None]
        if len(whole) == len(stored):
            return torch.cat(whole)
        if self.store is None:
            return batch.states(self.head)
        return self.store.read(tuple(batch.examples), lambda: batch.states(self.head))

    def distributions_of(self, batch: TextBatch, rows: TextRows) -> ChunkReader:
        """The distributions of a batch, by its logits."""
        states, tokens = self.states(batch, rows), batch.tokens

        def read_chunk(chunk: slice, q: Tensor) -> TargetDistributions:
            logits = self.head.logits(states[chunk].to(q.device))
            p = probabilities(logits, self.sampling)
            text = tokens[chunk, None].to(q.device)
            return TargetDistributions(
                p, p.gather(-1, text), torch.ones_like(text[:, 0], dtype=torch.bool)
            )

        return read_chunk


@dataclass(frozen=True, slots=True)
class TopLogitSource:
    """The logits that the rows store of their target."""

    distributions: TopLogitDistributions

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.distributions.vocabulary

    def columns(self, batch: TextBatch, rows: TextRows) -> dict[str, Tensor]:
        """The top logits at a batch's positions, (N, ...)."""
        # A share without a row holds a text without labels, which is no rollout.
        parts = [
            top_logit_columns(rows[max(0, example)], self.distributions.count, length)
            for example, length in zip(batch.examples, batch.lengths, strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def distributions_of(self, batch: TextBatch, rows: TextRows) -> ChunkReader:
        """The distributions of a batch, as far as its top logits decide them."""
        columns, tokens = self.columns(batch, rows), batch.tokens

        def read_chunk(chunk: slice, q: Tensor) -> TargetDistributions:
            top = {name: values[chunk].to(q.device) for name, values in columns.items()}
            p = self.distributions.distribution(top, q)
            if self.distributions.is_exact:
                of_text = p.gather(-1, tokens[chunk, None].to(q.device))
            else:
                of_text = (top["text_logit"] - log_total(top)).exp()
            return TargetDistributions(p, of_text, self.distributions.decided(top))

        return read_chunk


ReadBatch = Callable[[TextBatch], Callable[[slice], dict[str, Tensor]]]
"""What is computed along texts: a batch, which the models then read -> some of its N positions ->
(C, ...) columns there."""


@torch.inference_mode()
def text_columns(
    rows: Sequence[TextRow],
    read: ReadBatch,
    *,
    vocabulary: int,
    tokens_at_once: int,
    device: torch.device,
    members: Sequence[int] | None = None,
    places: Sequence[Tensor] | None = None,
    report: Callable[[int], object] = lambda rows: None,
) -> list[dict[str, Tensor]]:
    """(C, ...) columns of each text on the CPU, made longest first, given in the order asked for.

    Args:
        rows: the texts.
        read: makes the columns of a batch.
        vocabulary: V of the distributions that it makes at once.
        tokens_at_once: tokens of one forward; a longer text goes by itself.
        device: of the batches.
        members: which of the rows; by default all.
        places: of each row, which of its completion's tokens; by default all.
        report: called with the number of texts that were read.
    """
    members = range(len(rows)) if members is None else members
    step = max(POSITIONS.get(device.type, POSITIONS["cpu"]), VALUES_AT_ONCE // vocabulary)
    columns_of: dict[int, dict[str, Tensor]] = {}
    groups = by_length([text_length(rows[each]) for each in members], tokens_at_once)
    for group in threads_of("texts", device).units(groups):
        examples = [members[index] for index in group]
        asked = None if places is None else [places[example] for example in examples]
        batch = TextBatch.of([rows[each] for each in examples], examples, places=asked).to(device)
        lengths = batch.lengths
        columns = in_chunks(sum(lengths), step, read(batch))
        parts = {name: torch.split(values, lengths) for name, values in columns.items()}
        for place, example in enumerate(examples):
            columns_of[example] = {name: each[place] for name, each in parts.items()}
        report(len(examples))
    return [columns_of[example] for example in members]


def in_chunks(
    count: int, step: int, columns_at: Callable[[slice], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """(N, ...) columns on the CPU, made for `step` of `count` = N positions at once."""
    columns: dict[str, Tensor] = {}
    for start in range(0, max(1, count), step):  # of no position, columns without a value
        chunk = slice(start, start + step)
        for name, piece in columns_at(chunk).items():
            # Small tensors kept one by one would cut up the memory that large ones leave.
            if name not in columns:
                columns[name] = piece.new_empty(count, *piece.shape[1:])
            columns[name][chunk] = piece
    return {name: column.cpu() for name, column in columns.items()}


def pair_columns(
    pair: Sequence[PreTrainedModel],
    rows: Sequence[TextRow],
    samplings: SamplingConfig | Sequence[SamplingConfig],
    columns_at: Callable[[Tensor, Tensor, TextBatch, slice], dict[str, Tensor]],
    *,
    places: Sequence[Tensor] | None = None,
    report: Callable[[int], object] = lambda rows: None,
) -> list[dict[str, Tensor]]:
    """Columns (`text_columns`) of p and q (C, V), float64, of a target and its draft.

    `columns_at` makes (C, ...) columns of p, q and the positions of a batch that they are of;
    `samplings` is the warp of both, or of each.
    """
    heads = [find_lm_head(model) for model in pair]
    vocabulary, device = heads[0].vocabulary, heads[0].model.device
    warps = [samplings] * 2 if isinstance(samplings, SamplingConfig) else samplings

    def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
        both = [batch.states(head, vocabulary=vocabulary).to(device) for head in heads]

        def read_chunk(chunk: slice) -> dict[str, Tensor]:
            p, q = (
                probabilities(to_vocabulary(head.logits(states[chunk]).double(), vocabulary), warp)
                for head, states, warp in zip(heads, both, warps, strict=True)
            )
            return columns_at(p, q, batch, chunk)

        return read_chunk

    return text_columns(
        rows,
        read,
        vocabulary=vocabulary,
        tokens_at_once=tokens_at_once(*heads),
        device=device,
        places=places,
        report=report,
    )


def tokens_at_once(*heads: LMHead) -> int:
    """Tokens of a batch; 1, a row by itself, if a model only gives whole rows of logits."""
    if any(head.embedding is None for head in heads):
        return 1
    return TOKENS_AT_ONCE.get(heads[0].model.device.type, TOKENS_AT_ONCE["cpu"])


def text_length(row: TextRow) -> int:
    """Tokens of a text."""
    return len(row["prompt_ids"]) + len(row["completion_ids"])


def readable_rows(rows: Sequence[TextRow], model: PreTrainedModel) -> list[Any]:
    """Rollouts cut to the positions of a model, those left out that lose their completions."""
    limit = positions(model.config)
    return [
        row
        if text_length(row) <= limit
        else {**row, "completion_ids": row["completion_ids"][:room], "finish": "length"}
        for row in rows
        if (room := limit - len(row["prompt_ids"])) > 0
    ]


def by_length(
    lengths: Sequence[int] | NDArray[np.int64], tokens_at_once: int
) -> Iterator[list[int]]:
    """Indices of rows that go together: of like length, longest first.

    A batch has at most `tokens_at_once`, padding included; a longer row goes by itself.
    """
    order, start = np.argsort(np.negative(lengths), kind="stable").tolist(), 0
    while start < len(order):
        end = start + max(1, tokens_at_once // int(lengths[order[start]]))
        yield order[start:end]
        start = end
