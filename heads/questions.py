"""What a head is asked in training: label rows become arguments of its `forward`, and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.inputs import FEATURES, DraftedTokens, logits_of_states, token_embeddings
from heads.rows import Batch, LabelRow, LabelRows, Row, drawn_row, draws_of, mixed_row
from specdata.lm_head import hidden_states
from specdata.probability import SamplingConfig, probabilities
from specdata.storage.files import atomic_write
from specdata.terminal import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Probabilities that are held at once, so that long rows over a large vocabulary fit.
VALUES_AT_ONCE = 1 << 24
ROWS_IN_SHARD = 256
# Rows by which what a head reads is scaled.
SCALED_ROWS = 128


class Questions(Protocol):
    """The reading of label rows for one kind of head."""

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Row:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Raises:
            ValueError: if the columns do not fit each other.
        """

    def arguments(self, batch: Batch) -> tuple[Tensor, ...]:
        """The arguments of the head's `forward` about the tokens of a batch; runs the draft."""


@dataclass(frozen=True, slots=True)
class MixedQuestions:
    """SpecDec++: the draft has read its own tokens at most positions, and judges them there.

    Attributes:
        draft: the frozen draft.
        rate: share of positions that keep the target's token.
        max_length: tokens kept of a row.
        seed: of the mixing.
    """

    draft: PreTrainedModel
    rate: float
    max_length: int
    seed: int

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Row:
        """Mix a row, anew for each pass."""
        key: tuple[str | int, ...] = ("dev",) if epoch is None else ("train", self.seed, epoch)
        return mixed_row(labels, rate=self.rate, max_length=self.max_length, key=key)

    def arguments(self, batch: Batch) -> tuple[Tensor, ...]:
        """The states after the tokens, (N, 1, H)."""
        return (hidden_states(self.draft, batch.input_ids)[batch.row, batch.column, None],)


@dataclass(frozen=True, slots=True)
class DrawnQuestions:
    """Ours: drafted tokens beside the target's own text.

    Attributes:
        draft: the frozen draft.
        reads: names of the features that the head reads.
        sampling: how tokens are drawn.
        draws: drafted tokens a position in one pass.
        max_length: tokens kept of a row.
        cache: keeps what `of_draft` gives of the training rows.
    """

    draft: PreTrainedModel
    reads: Sequence[str]
    sampling: SamplingConfig
    draws: int
    max_length: int
    cache: FeatureCache | None = None

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Row:
        """Take the pass's draws; of dev rows the first."""
        if epoch is None:
            return drawn_row(labels, draws=(0,), max_length=self.max_length)
        held = draws_of(labels)
        count = min(self.draws, held)
        draws = [(epoch * count + number) % held for number in range(count)]
        return drawn_row(labels, draws=draws, max_length=self.max_length, index=index)

    def arguments(self, batch: Batch) -> tuple[Tensor, ...]:
        """The features that the head reads, (N, S) and (N, S, size), in its order."""
        if self.cache is not None and batch.rows[0].index >= 0:
            features = self.cache.features(batch)
        else:
            features = self.of_draft(batch)
        if "embedding" in self.reads:
            features["embedding"] = token_embeddings(self.draft, batch.tokens)
        if "hidden_before" in features:
            features["hidden_before"] = features["hidden_before"].expand(*batch.tokens.shape, -1)
        return tuple(features[name] for name in self.reads)

    @torch.no_grad()
    def of_draft(self, batch: Batch) -> dict[str, Tensor]:
        """The features that take a forward of the draft: numbers (N, S), the state (N, 1, H)."""
        states = hidden_states(self.draft, batch.input_ids)[batch.row, batch.column]
        names = [name for name in self.reads if name != "embedding"]
        to_logits = logits_of_states(self.draft)
        vocabulary = self.draft.config.get_text_config().vocab_size
        step = max(1, VALUES_AT_ONCE // (vocabulary * batch.tokens.shape[1]))
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}
        for start in range(0, len(states), step):
            at = slice(start, start + step)
            drafted = self._drafted(states[at], batch.tokens[at], to_logits)
            for name in names:
                pieces[name].append(FEATURES[name].compute(drafted))
        return {name: torch.cat(piece) for name, piece in pieces.items()}

    def _drafted(
        self, states: Tensor, tokens: Tensor, to_logits: Callable[[Tensor], Tensor]
    ) -> DraftedTokens:
        """Tokens (n, S), all S drawn from the state (n, H) of their position."""

        def distributions() -> Tensor:
            q = probabilities(to_logits(states), self.sampling)
            return q[:, None].expand(*tokens.shape, -1)

        return DraftedTokens(
            tokens=tokens, before=lambda: states[:, None], distributions=distributions
        )


def feature_scales(
    questions: DrawnQuestions, rows: LabelRows, micro_batch_size: int
) -> dict[str, tuple[float, float]]:
    """Means and deviations by which a head scales what it reads; of vectors, about 0.

    By some of the rows, the same ones in every process.
    """
    step = max(1, len(rows) // SCALED_ROWS)
    some = [questions.row(rows[index], -1, 0) for index in range(0, len(rows), step)]
    parts = [
        questions.arguments(
            Batch.of(some[start : start + micro_batch_size], questions.draft.device)
        )
        for start in range(0, len(some), micro_batch_size)
    ]
    scales = {}
    for name, pieces in zip(questions.reads, zip(*parts, strict=True), strict=True):
        values = torch.cat([piece.flatten() for piece in pieces]).double()
        mean = float(values.mean()) if FEATURES[name].shape == "number" else 0.0
        deviation = float((values - mean).square().mean().sqrt())
        # What never changes, such as the entropy of a greedy draft, says nothing: it becomes 0.
        scales[name] = (mean, deviation if deviation > 0.0 else 1.0)
    return scales


@dataclass(frozen=True, slots=True)
class FeatureCache:
    """The draft's states along the training rows, on the disk: a pass then runs no forward of it.

    A folder of shards with the features of `ROWS_IN_SHARD` rows each, made by `fill`. States are
    bfloat16, 2 bytes times the hidden size for each position; numbers are float32.

    Attributes:
        folder: where they are.
        sizes: positions of each row.
    """

    folder: Path
    sizes: list[int]
    _open: dict[int, Any] = field(default_factory=dict)

    def fill(
        self, accelerator: Accelerator, features: Callable[[range], dict[str, Tensor]]
    ) -> None:
        """Make the shards that are not there; each process makes its share, and waits for all.

        Args:
            accelerator: the group of processes.
            features: gives those of a range of rows for all their draws, (N, S) and (N, 1, H).
        """
        count, shown = len(self.sizes), accelerator.is_main_process
        starts = range(0, count, ROWS_IN_SHARD)
        share = starts[accelerator.process_index :: accelerator.num_processes]
        missing = [start for start in share if not self._path(start // ROWS_IN_SHARD).is_file()]
        with progress(len(missing), "draft's states", "shard", is_shown=shown) as bar:
            for start in missing:
                computed = features(range(start, min(start + ROWS_IN_SHARD, count)))
                kept = {
                    name: values.to("cpu", torch.bfloat16 if values.dim() > 2 else torch.float32)
                    for name, values in computed.items()
                }
                kept = {name: values.contiguous() for name, values in kept.items()}
                with atomic_write(self._path(start // ROWS_IN_SHARD)) as temporary:
                    save_file(kept, temporary)
                bar.update()
        accelerator.wait_for_everyone()

    def features(self, batch: Batch) -> dict[str, Tensor]:
        """The features that `fill` was given of the tokens of a batch, float32."""
        rows = [self._of(row) for row in batch.rows]
        return {
            name: torch.cat([row[name] for row in rows]).to(batch.input_ids.device, torch.float32)
            for name in rows[0]
        }

    def _of(self, row: Row) -> dict[str, Tensor]:
        shard = row.index // ROWS_IN_SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._path(shard), framework="pt")
        begin = sum(self.sizes[shard * ROWS_IN_SHARD : row.index])
        file, at = self._open[shard], slice(begin, begin + self.sizes[row.index])
        stored = {name: file.get_slice(name)[at] for name in file.keys()}  # noqa: SIM118, no dict
        return {
            name: values if values.dim() > 2 else values[:, list(row.draws)]
            for name, values in stored.items()
        }

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"


def cached(
    accelerator: Accelerator,
    questions: DrawnQuestions,
    rows: LabelRows,
    micro_batch_size: int,
    folder: Path,
) -> FeatureCache:
    """The draft's states along the training rows, on the disk; made here if they are not there."""

    def features(indices: range) -> dict[str, Tensor]:
        pieces = []
        for start in range(0, len(indices), micro_batch_size):
            labels = [rows[index] for index in indices[start : start + micro_batch_size]]
            whole = [
                drawn_row(row, draws=range(draws_of(row)), max_length=questions.max_length)
                for row in labels
            ]
            pieces.append(questions.of_draft(Batch.of(whole, questions.draft.device)))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    cache = FeatureCache(folder, rows.sizes)
    cache.fill(accelerator, features)
    return cache
