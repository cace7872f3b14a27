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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, cast

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from heads.config import HeadConfig
from heads.inputs import FEATURES, DraftedTokens, feature_of
from specdata.drafts.state_store import STATES_BYTES
from specdata.drafts.states_network import token_embedding
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.models import known_ids
from specdata.probability import SamplingConfig, probabilities
from specdata.processes import process_count, rank
from specdata.sampling import numpy_generator_for
from specdata.storage.columns import list_lengths
from specdata.storage.schema import MORE_DRAWS, Label
from specdata.texts import TOKENS_AT_ONCE, TextBatch, text_columns, text_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SeedKey = tuple[str | int, ...]
LABEL_COLUMNS = ("example_id", "sample", "prompt_ids", "completion_ids", "draft_ids", "accept_prob")


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The usable rows of a labelled dataset: with a completion token within the maximum length.

    `lengths` are the completion tokens of each, `labels` counts the positions with a label in all
    rows, `cut` those beyond that length.
    """

    dataset: datasets.Dataset
    usable: NDArray[np.int64]
    lengths: NDArray[np.int64]
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
        missing = [column for column in LABEL_COLUMNS if column not in dataset.column_names]
        if missing:
            raise ConfigError(
                f"the {name} rows must have the columns {', '.join(LABEL_COLUMNS)}; "
                f"{', '.join(missing)} missing; label the rollouts first"
            )
        draws = [name for name in MORE_DRAWS.names if with_draws and name in dataset.column_names]
        columns = dataset.select_columns([*LABEL_COLUMNS, *draws])
        prompts, completions = list_lengths(dataset, "prompt_ids", "completion_ids")
        usable = np.flatnonzero((prompts < max_length) & (completions > 0))
        if not len(usable):
            raise ConfigError(
                f"none of the {len(prompts)} {name} rows has a completion token within the draft's "
                f"context of {max_length} tokens: make rollouts with shorter prompts"
            )
        lengths = np.minimum(completions, max_length - prompts)[usable]
        labels = int(completions.sum())
        return cls(columns, usable, lengths, labels, labels - int(lengths.sum()))

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, position: int) -> Label:
        return cast(Label, self.dataset[int(self.usable[position])])

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
    """One text for the draft, and S tokens at each of n positions that are learned from."""

    # `prompt_ids` and `completion_ids` (`specdata.texts`). The draft's state from which it would
    # draw a token of the completion is what is known of the tokens there.
    text: Mapping[str, Sequence[int]]
    places: Tensor  # (n,) int64, positions in the completion
    tokens: Tensor  # (n, S) int64
    accept: Tensor  # (n, S) float32, min(1, p/q) of each
    counts: bool = True  # its labels do; not those of a row that fills up a batch
    index: int = -1  # of the row in its dataset, to find what is kept of it; -1 if nothing is
    draws: tuple[int, ...] = (0,)  # which S of the row's draws these are


def mixed_row(row: Label, *, rate: float, max_length: int, key: SeedKey) -> HeadRow:
    """Mix one row: the text holds the tokens that are judged, by the states after them.

    With probability `rate` (r) a position keeps the target's token; prompt and completion are cut
    at `max_length` tokens. The draw depends on `key`, as (seed, epoch), example_id and sample, and
    on no process, order or resume.
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


def drawn_row(row: Label, *, draws: Sequence[int], max_length: int, index: int = -1) -> HeadRow:
    """Take some of a row's draws, beside the target's own text, by the states before them.

    `max_length` as of `mixed_row`; `index` is the row's in its dataset, if what the draft says of
    it may be kept.
    """
    tokens, accept = drawn_tokens(row)
    prompt = row["prompt_ids"]
    kept = min(len(tokens), max_length - len(prompt))
    return HeadRow(
        text={"prompt_ids": prompt, "completion_ids": row["completion_ids"][:kept]},
        places=torch.arange(kept),
        tokens=torch.from_numpy(tokens[:kept, list(draws)]),
        accept=torch.from_numpy(accept[:kept, list(draws)]),
        index=index,
        draws=tuple(draws),
    )


def draws_of(row: Label) -> int:
    """The number of tokens a position that the labels of a row hold."""
    return 1 + len(row.get("more_draft_ids") or ()) // max(1, len(row["draft_ids"]))


def drawn_tokens(row: Label) -> tuple[np.ndarray, np.ndarray]:
    """(n, S) int64 tokens and (n, S) float32 labels, the row's own draw first."""
    shape = len(row["draft_ids"]), draws_of(row) - 1

    def joined(first: Sequence[float], more: Sequence[float] | None, dtype: type) -> np.ndarray:
        further: np.ndarray = np.asarray(more or (), dtype).reshape(shape)
        return np.hstack([np.asarray(first, dtype)[:, None], further])

    tokens = joined(row["draft_ids"], row.get("more_draft_ids"), np.int64)
    return tokens, joined(row["accept_prob"], row.get("more_accept_prob"), np.float32)


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


# Rows that are read together to be kept.
ROWS_AT_ONCE = 256
# Rows by which what a head reads is scaled, about.
SCALED_ROWS = 128


@dataclass(slots=True)
class TrainingInputs:
    """The reading of label rows: SpecDec++'s, of mixed texts, or ours, beside the target's own.

    Of each the head `reads` what it names, and at most `max_length` tokens are kept. `kept` is what
    the draft says of training rows, by index, so that later passes run no forward: of the first
    `most` in `order`.
    """

    draft: PreTrainedModel
    reads: Sequence[str]
    sampling: SamplingConfig
    config: HeadConfig
    max_length: int
    seed: int
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    order: NDArray[np.int64] = field(init=False)
    most: int = field(init=False)
    _place: NDArray[np.int64] = field(init=False)
    _to_logits: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._to_logits = logits_of_states(self.draft)

    def row(self, labels: Label, index: int, epoch: int | None) -> HeadRow:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Mixed anew for each pass, or with the pass's draws; dev rows with the first.
        """
        if self.config.kind_facts.lag:
            key: tuple[str | int, ...] = ("dev",) if epoch is None else ("train", self.seed, epoch)
            return mixed_row(labels, rate=self.config.mixing, max_length=self.max_length, key=key)
        if epoch is None:
            return drawn_row(labels, draws=(0,), max_length=self.max_length)
        count = min(self.config.draws, held := draws_of(labels))
        draws = [(epoch * count + number) % held for number in range(count)]
        return drawn_row(labels, draws=draws, max_length=self.max_length, index=index)

    def plan(self, rows: LabelRows) -> None:
        """Choose the training rows that are kept, as many as memory is set aside for.

        Those that scales are found by, and then in the order of the first pass.
        """
        order = rows.order(self.seed, 0)
        self.order = np.array(list(dict.fromkeys([*scaled_rows(rows), *order])))
        self._place = np.argsort(self.order)
        self.most = len(rows)
        self.keep(rows, self.order[:1])  # their group, by which the others' size is known
        size = sum(values.nbytes for each in self.kept.values() for values in each.values())
        lengths = rows.lengths[self.order].cumsum()
        room = STATES_BYTES / max(1, size) * lengths[len(self.kept) - 1]
        self.most = int(np.searchsorted(lengths, room, side="right"))
        fit = self.order[: min(self.most, len(self.kept))].tolist()
        self.kept = {index: self.kept[index] for index in fit}
        self.keep(rows, scaled_rows(rows))

    def keep(self, rows: LabelRows, batch: Iterable[int]) -> None:
        """Read what is to be kept of a batch, for all draws; the processes share the work.

        Rows are read in groups, so that a resumed run goes on with the same. All processes call it
        with the same batch.
        """
        process, processes = rank(), process_count()
        places = self._place[[index for index in batch if index not in self.kept]]
        for group in np.unique(places[places < self.most] // ROWS_AT_ONCE):
            begin = group * ROWS_AT_ONCE
            members = self.order[begin : min(begin + ROWS_AT_ONCE, self.most)]
            share = members[process::processes].tolist()
            labels = [rows[index] for index in share]
            read = self.read(
                [
                    drawn_row(row, draws=range(draws_of(row)), max_length=self.max_length)
                    for row in labels
                ]
            )
            for part in gather_object([dict(zip(share, read, strict=True))]):
                self.kept |= part

    def arguments(self, rows: Sequence[HeadRow]) -> tuple[Tensor, ...]:
        """Features of the rows' N positions in the head's order, (N, S) and (N, S, size)."""
        read = iter(self.read([row for row in rows if row.index not in self.kept]))
        parts = [
            {
                name: values if values.dim() > 2 else values[:, list(row.draws)]
                for name, values in self.kept[row.index].items()
            }
            if row.index in self.kept
            else next(read)
            for row in rows
        ]
        device = self.draft.device
        tokens = torch.cat([row.tokens for row in rows]).to(device)
        features = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
        if "embedding" in self.reads:
            features["embedding"] = token_embeddings(self.draft, tokens)
        return tuple(
            values.expand(*tokens.shape, -1) if values.dim() > 2 else values
            for values in (features[name] for name in self.reads)
        )

    def read(self, rows: Sequence[HeadRow]) -> list[dict[str, Tensor]]:
        """Features of each row that take a forward: (n, 1, H) states and (n, S) numbers."""
        names = [name for name in self.reads if name != "embedding"]

        def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
            states = hidden_states(self.draft, batch.input_ids[:, :-1])[batch.is_predicted]
            tokens = torch.cat([rows[each].tokens for each in batch.examples]).to(states.device)

            def read_chunk(chunk: slice) -> dict[str, Tensor]:
                before = states[chunk, None]

                def distributions() -> Tensor:
                    q = probabilities(self._to_logits(before), self.sampling)
                    return q.expand(*tokens[chunk].shape, -1)

                drafted = DraftedTokens(
                    tokens=tokens[chunk],
                    before=lambda: before,
                    after=lambda: before,  # of a mixed text, whose states are moved by one
                    distributions=distributions,
                )
                return {name: feature_of(name, drafted) for name in names}

            return read_chunk

        if not rows or not names:
            return [{} for _ in rows]
        device = self.draft.device
        return text_columns(
            [row.text for row in rows],
            read,
            vocabulary=self.draft.config.get_text_config().vocab_size * rows[0].tokens.shape[1],
            tokens_at_once=TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cpu"]),
            device=device,
            places=[row.places for row in rows],
        )


def scaled_rows(rows: LabelRows) -> range:
    """The rows by which what a head reads is scaled."""
    return range(0, len(rows), max(1, len(rows) // SCALED_ROWS))


def feature_scales(inputs: TrainingInputs, rows: LabelRows) -> dict[str, tuple[float, float]]:
    """Means and deviations by which a head scales what it reads; of vectors, about 0.

    By some of the rows, the same ones in every process.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in inputs.reads}
    for index in scaled_rows(rows):  # one by one: a device may not hold all
        read = inputs.arguments([inputs.row(rows[index], index, 0)])
        for (name, part), values in zip(parts.items(), read, strict=True):
            if FEATURES[name].shape != "number":
                values = values.double().square().mean(-1).sqrt()
            part.append(values.flatten().double())
    scales = {}
    for name, part in parts.items():
        values = torch.cat(part)
        mean = float(values.mean()) if FEATURES[name].shape == "number" else 0.0
        deviation = float((values - mean).square().mean().sqrt())
        # What never changes, such as the entropy of a greedy draft, says nothing: it becomes 0.
        scales[name] = (mean, deviation if deviation > 0.0 else 1.0)
    return scales


def logits_of_states(draft: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The map from a draft's last hidden states to its logits: (..., H) -> (..., V).

    It is found out at the first call, so a head that reads no distribution costs nothing.
    """
    find = cache(find_lm_head)

    def logits(states: Tensor) -> Tensor:
        lm_head = find(draft)
        if lm_head.embedding is None:
            raise ConfigError(
                f"the head reads the draft's distributions, and how {type(draft).__name__} makes "
                "logits of its hidden states is not known; use another draft or head"
            )
        with torch.no_grad():
            return lm_head.logits(states)

    return logits


def token_embeddings(draft: PreTrainedModel, ids: Tensor) -> Tensor:
    """The draft's input embeddings of tokens: (...) ids -> (..., E), without a gradient.

    Ids that only the target has are replaced, as where the draft reads them (`known_ids`).
    """
    with torch.no_grad():
        embeddings: Tensor = token_embedding(draft)(known_ids(ids, draft))
    return embeddings
