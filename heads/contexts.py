"""The draft's context when a token is judged: label rows become questions for a head.

In a mixed context (SpecDec++, `heads.mixing`) it has read some of its own tokens instead of the
target's; in the target's own (`heads.target_context`) only what would have been kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.immediate import ImmediateHead
from heads.inputs import (
    FEATURES,
    NUMBERS,
    DecisionPoint,
    DraftedTokens,
    HeadInputs,
    token_embeddings,
)
from heads.loss import loss_mass
from heads.mixing import LabelRow, MixedBatch, MixedRow, mix
from heads.target_context import TargetBatch, TargetRow, draws_of, target_row, tree_states
from specdata.lm_head import hidden_states
from specdata.models import known_ids
from specdata.probability import probabilities
from specdata.storage.files import atomic_write
from specdata.terminal import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heads.model import BaseHead

# Features that take a forward of the draft, which can be kept (`FeatureCache`).
OF_DRAFT = (
    "hidden_before",
    "hidden",
    "log_q",
    "log_q_max",
    "margin",
    "entropy",
    "log_mass_above",
)
# Probabilities that are held at once, so that long rows over a large vocabulary fit.
VALUES_AT_ONCE = 1 << 24
ROWS_IN_SHARD = 256


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions to a head in one micro-batch, and the answers.

    Attributes:
        arguments: of the head's `forward`, tensors; None for a feature that is known of no token.
        accept: (M, ...) labels for the head's M decision points; as many logits are the answer.
        mask: (M, ...) bool, which of them count.
    """

    arguments: tuple[Tensor | None, ...]
    accept: Tensor
    mask: Tensor


class Context(Protocol):
    """The reading of label rows."""

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Any:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Raises:
            ValueError: if the columns do not fit each other.
        """

    def mass(self, row: Any) -> Tensor:
        """() what its labels add to the number that the summed loss of a batch is divided by."""

    def questions(self, rows: Sequence[Any]) -> Questions:
        """The questions of a micro-batch to the head; runs the draft."""


@dataclass(frozen=True, slots=True)
class FeatureCache:
    """The draft's states along the training rows, on the disk: a pass then runs no forward of it.

    A folder of shards with the features of `ROWS_IN_SHARD` rows each, made by `fill`. States are
    bfloat16: 2 bytes times the hidden size for each position, and as much again for each of its
    drafted tokens if the head reads the states after them. Numbers are float32.

    Attributes:
        folder: where they are.
        starts: of each row, its first position among those of its shard.
        sizes: positions of each row.
    """

    folder: Path
    starts: list[int]
    sizes: list[int]
    _open: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, sizes: list[int]) -> FeatureCache:
        """The cache in a folder, of rows with so many positions."""
        shards = [
            sizes[start : start + ROWS_IN_SHARD] for start in range(0, len(sizes), ROWS_IN_SHARD)
        ]
        starts = [start for shard in shards for start in accumulate(shard[:-1], initial=0)]
        return cls(folder, starts, sizes)

    def fill(
        self, accelerator: Accelerator, features: Callable[[range], dict[str, Tensor]]
    ) -> None:
        """Make the shards that are not there; each process makes its share, and waits for all.

        Args:
            accelerator: the group of processes.
            features: gives those of a range of rows for all their draws, (N, S) and (N, S or 1, H).
        """
        count = len(self.sizes)
        shards = range(0, count, ROWS_IN_SHARD)
        mine = list(shards)[accelerator.process_index :: accelerator.num_processes]
        missing = [start for start in mine if not self._path(start // ROWS_IN_SHARD).is_file()]
        shown = accelerator.is_main_process
        with progress(len(missing), "draft's states", "shard", is_shown=shown) as bar:
            for start in missing:
                computed = features(range(start, min(start + ROWS_IN_SHARD, count)))
                number = [name for name in computed if FEATURES[name].shape == "number"]
                kept = {
                    name: values.to(
                        "cpu", torch.float32 if name in number else torch.bfloat16
                    ).contiguous()
                    for name, values in computed.items()
                }
                with atomic_write(self._path(start // ROWS_IN_SHARD)) as temporary:
                    save_file(kept, temporary)
                bar.update()
        accelerator.wait_for_everyone()

    def features(self, batch: TargetBatch) -> dict[str, Tensor]:
        """The features that `fill` was given of the tokens of a batch, float32."""
        rows = [self._of(row) for row in batch.rows]
        device = batch.input_ids.device
        return {
            name: torch.cat([row[name] for row in rows]).to(device, torch.float32)
            for name in rows[0]
        }

    def _of(self, row: TargetRow) -> dict[str, Tensor]:
        shard = row.index // ROWS_IN_SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._path(shard), framework="pt")
        file, begin = self._open[shard], self.starts[row.index]
        here = slice(begin, begin + self.sizes[row.index])
        found = {name: file.get_slice(name)[here] for name in file.keys()}  # noqa: SIM118, no dict
        return {
            name: values if values.shape[1] == 1 else values[:, list(row.draws)]
            for name, values in found.items()
        }

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class MixedContext:
    """Token mixing: the draft has read its own tokens at most positions, and judges them there.

    Attributes:
        head: its `reads` and `decision_points` are asked.
        draft: the frozen draft.
        draft_logits: gives its logits of its last hidden states.
        rate: share of positions that keep the target's token.
        max_length: tokens kept of a row.
        seed: of the mixing.
    """

    head: BaseHead
    draft: PreTrainedModel
    draft_logits: Callable[[Tensor], Tensor]
    rate: float
    max_length: int
    seed: int

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> MixedRow:
        """Mix a row, anew for each pass."""
        key: tuple[str | int, ...] = ("dev",) if epoch is None else ("train", self.seed, epoch)
        return mix(labels, rate=self.rate, max_length=self.max_length, key=key)

    def mass(self, row: MixedRow) -> Tensor:
        """Of the drafted tokens, each decision point's."""
        return len(self.head.decision_points) * loss_mass(
            row.accept, row.mask, self.head.rejection_weight
        )

    def questions(self, rows: Sequence[MixedRow]) -> Questions:
        """Ask about every token as one drafted after those before it."""
        head, batch = self.head, MixedBatch.of(rows).to(self.draft.device)
        inputs = HeadInputs.from_batch(
            head.reads,
            # The draft's distributions end where its vocabulary does; drafted tokens are in it.
            input_ids=known_ids(batch.input_ids, self.draft),
            states=hidden_states(self.draft, batch.input_ids, batch.attention_mask),
            logits=self.draft_logits,
            sampling=head.sampling_config,
            embeddings=lambda: token_embeddings(self.draft, batch.input_ids),
        )
        return Questions(
            _arguments(head, inputs, batch.input_ids.dim()),
            batch.accept.expand(len(head.decision_points), -1, -1),
            batch.mask.expand(len(head.decision_points), -1, -1),
        )


@dataclass(frozen=True, slots=True)
class TargetContext:
    """The target's own text: drafted tokens beside it, in one forward of the draft.

    Attributes:
        head: its `reads` and `decision_points` are asked.
        draft: the frozen draft.
        draft_logits: gives its logits of its last hidden states.
        draws: drafted tokens a position in one pass.
        max_length: tokens kept of a row.
        seed: of the simulated rounds.
        cache: keeps what `of_draft` gives of the training rows.
    """

    head: BaseHead
    draft: PreTrainedModel
    draft_logits: Callable[[Tensor], Tensor]
    draws: int
    max_length: int
    seed: int
    cache: FeatureCache | None = None

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> TargetRow:
        """Take the pass's draws; of dev rows the first."""
        if epoch is None:
            return self.all_of(labels, (0,), key=("dev",))
        held = draws_of(labels)
        first = epoch * min(self.draws, held)
        draws = [(first + number) % held for number in range(min(self.draws, held))]
        return self.all_of(labels, draws, key=("train", self.seed, epoch), index=index)

    def all_of(
        self,
        labels: LabelRow,
        draws: Sequence[int],
        *,
        key: tuple[str | int, ...] = (),
        index: int = -1,
    ) -> TargetRow:
        """A row with some of its draws."""
        return target_row(labels, index=index, draws=draws, max_length=self.max_length, key=key)

    def mass(self, row: TargetRow) -> Tensor:
        """The number of labels that count."""
        count = row.accept.numel() * len(self.head.decision_points) * row.counts
        return torch.tensor(float(count), dtype=torch.float64)

    @torch.no_grad()
    def questions(self, rows: Sequence[TargetRow]) -> Questions:
        """Ask about each token at each of the head's decision points."""
        head, batch = self.head, TargetBatch.of(rows).to(self.draft.device)
        inputs = self.inputs(batch)
        ex_ante = batch.overlap[:, None].expand_as(batch.accept)
        accept = [
            ex_ante if m is DecisionPoint.BEFORE else batch.accept for m in head.decision_points
        ]
        mask = batch.mask[:, None].expand_as(batch.accept)
        return Questions(
            _arguments(head, inputs, batch.tokens.dim()),
            torch.stack(accept),
            mask.expand(len(head.decision_points), -1, -1),
        )

    def inputs(self, batch: TargetBatch) -> HeadInputs:
        """All that the head reads of the tokens of a batch, leading shape (N, S)."""
        is_training = batch.rows[0].index >= 0
        kept = self.cache if is_training else None
        computed = self.of_draft(batch) if kept is None else kept.features(batch)
        shape = batch.tokens.shape
        simulated = {"position": batch.position, "since_rejection": batch.since_rejection}
        for name in self.head.reads:
            if name == "embedding":
                computed[name] = token_embeddings(self.draft, batch.tokens)
            elif name in simulated:
                computed[name] = simulated[name][:, None].expand(shape)
            elif name == "hidden_before":
                computed[name] = computed[name].expand(*shape, -1)
        return HeadInputs(computed, self.head.decision_points[-1])

    @torch.no_grad()
    def of_draft(self, batch: TargetBatch) -> dict[str, Tensor]:
        """The features that take a forward of the draft: numbers (N, S), vectors (N, S or 1, H)."""
        reads = [name for name in self.head.reads if name in OF_DRAFT]
        after = None
        if "hidden" in reads:
            ids, positions, place = batch.padded()
            states, drafted = tree_states(self.draft, batch.input_ids, ids, positions)
            after = drafted[batch.row[:, None], place]
        else:
            states = hidden_states(self.draft, batch.input_ids)
        before = states[batch.row, batch.column - 1]
        values = self.draft.config.get_text_config().vocab_size
        step = max(1, VALUES_AT_ONCE // (values * batch.tokens.shape[1]))

        def piece(here: slice) -> HeadInputs:
            tokens, mine = batch.tokens[here], before[here]

            def distributions() -> Tensor:
                """(n, S, V), the same for all draws."""
                q = probabilities(self.draft_logits(mine), self.head.sampling_config)
                return q[:, None].expand(*tokens.shape, -1)

            drafted = DraftedTokens(
                tokens=tokens,
                before=lambda: mine[:, None],
                after=lambda: cast(Tensor, after)[here],
                distributions=distributions,
            )
            return HeadInputs.of(reads, drafted, self.head.decision_points[-1])

        pieces = [piece(slice(start, start + step)) for start in range(0, len(before), step)]
        return {name: torch.cat([each[name] for each in pieces]) for name in reads}


def feature_scales(inputs: Sequence[HeadInputs]) -> dict[str, tuple[float, float]]:
    """Means and deviations by which a head scales what it reads; of vectors, about 0.

    Args:
        inputs: of some rows.
    """
    scales = {}
    for name in inputs[0].features:
        values = torch.cat([each[name].flatten() for each in inputs]).double()
        mean = float(values.mean()) if name in NUMBERS else 0.0
        deviation = float((values - mean).square().mean().sqrt())
        # What never changes, such as the entropy of a greedy draft, says nothing: it becomes 0.
        scales[name] = (mean, deviation if deviation > 0.0 else 1.0)
    return scales


def _arguments(head: BaseHead, inputs: HeadInputs, dims: int) -> tuple[Tensor | None, ...]:
    """The arguments of a head's `forward` that ask about all tokens at each of its decision points.

    Args:
        head: of any kind.
        inputs: what is known at the last decision point, leading shape (...).
        dims: how many dimensions that has.
    """
    features = tuple(inputs.features.get(name) for name in head.reads)
    if not isinstance(head, ImmediateHead):
        return features
    device = next(value.device for value in features if value is not None)
    decision_points = torch.tensor([int(point) for point in head.decision_points], device=device)
    return decision_points.view(-1, *[1] * dims), *features
