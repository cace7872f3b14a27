"""What the draft has read when a token is judged: how label rows become questions for a head.

In a mixed context (SpecDec++, `heads.mixing`) it has read some of its own tokens instead of the
target's; in the target's own (`heads.target_context`) only what would have been kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from heads.immediate import ImmediateHead
from heads.inputs import NUMBERS, DraftedTokens, HeadInputs, Moment, token_embeddings
from heads.loss import loss_mass
from heads.mixing import LabelRow, MixedRow, mix
from heads.mixing import collate as collate_mixed
from heads.target_context import TargetBatch, TargetRow, collate, draws_of, target_row
from heads.tree import tree_states
from specdata.lm_head import hidden_states
from specdata.models import known_ids
from specdata.probability import probabilities

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heads.base import BaseHead
    from heads.cache import FeatureCache

# Features that take a forward of the draft, which can be kept (`heads.cache`).
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


@dataclass(frozen=True, slots=True)
class Questions:
    """What a head is asked of one micro-batch, and the answers.

    Attributes:
        arguments: of the head's `forward`, tensors; None for a feature that is known of no token.
        accept: (M, ...) labels for the head's M moments; as many logits are the answer.
        mask: (M, ...) bool, which of them count.
    """

    arguments: tuple[Tensor | None, ...]
    accept: Tensor
    mask: Tensor


class Context(Protocol):
    """How label rows are read."""

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> Any:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Raises:
            ValueError: if the columns do not fit each other.
        """

    def mass(self, row: Any) -> Tensor:
        """() what its labels add to the number that the summed loss of a batch is divided by."""

    def questions(self, rows: Sequence[Any]) -> Questions:
        """What the head is asked of a micro-batch; runs the draft."""


@dataclass(frozen=True, slots=True)
class MixedContext:
    """Token mixing: the draft has read its own tokens at most positions, and judges them there.

    Attributes:
        head: its `reads` and `moments` are asked.
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
        """Of the drafted tokens, each moment's."""
        return len(self.head.moments) * loss_mass(row.accept, row.mask, self.head.rejection_weight)

    def questions(self, rows: Sequence[MixedRow]) -> Questions:
        """Ask about every token as one drafted after those before it."""
        head, batch = self.head, collate_mixed(rows).to(self.draft.device)
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
            batch.accept.expand(len(head.moments), -1, -1),
            batch.mask.expand(len(head.moments), -1, -1),
        )


@dataclass(frozen=True, slots=True)
class TargetContext:
    """The target's own text: drafted tokens beside it, in one forward of the draft.

    Attributes:
        head: its `reads` and `moments` are asked.
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
            return target_row(
                labels, index=-1, draws=(0,), max_length=self.max_length, key=("dev",)
            )
        held = draws_of(labels)
        first = epoch * min(self.draws, held)
        draws = [(first + number) % held for number in range(min(self.draws, held))]
        key = ("train", self.seed, epoch)
        return target_row(labels, index=index, draws=draws, max_length=self.max_length, key=key)

    def mass(self, row: TargetRow) -> Tensor:
        """How many labels count."""
        count = row.tokens.numel() * len(self.head.moments) * row.counts
        return torch.tensor(float(count), dtype=torch.float64)

    @torch.no_grad()
    def questions(self, rows: Sequence[TargetRow]) -> Questions:
        """Ask about each token at each of the head's moments."""
        head, batch = self.head, collate(rows).to(self.draft.device)
        inputs = self.inputs(batch)
        ex_ante = batch.overlap[:, None].expand_as(batch.accept)
        accept = [ex_ante if m is Moment.BEFORE else batch.accept for m in head.moments]
        return Questions(
            _arguments(head, inputs, batch.tokens.dim()),
            torch.stack(accept),
            batch.mask[:, None].expand(len(head.moments), *batch.tokens.shape),
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
        return HeadInputs(computed, self.head.moments[-1])

    @torch.no_grad()
    def of_draft(self, batch: TargetBatch) -> dict[str, Tensor]:
        """The features that take a forward of the draft: numbers (N, S), vectors (N, S or 1, H)."""
        reads = [name for name in self.head.reads if name in OF_DRAFT]
        before, after = draft_states(self.draft, batch, "hidden" in reads)
        values = self.draft.config.get_text_config().vocab_size
        step = max(1, VALUES_AT_ONCE // (values * batch.tokens.shape[1]))
        pieces = []
        for start in range(0, len(before), step):
            here = slice(start, start + step)
            pieces.append(self._of_draft(reads, batch.tokens[here], before[here], after, here))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in reads}

    def _of_draft(
        self,
        reads: Sequence[str],
        tokens: Tensor,
        before: Tensor,
        after: Tensor | None,
        here: slice,
    ) -> HeadInputs:
        def distributions() -> Tensor:
            """(n, S, V), the same for all draws."""
            logits = self.draft_logits(before)
            q = probabilities(logits, self.head.sampling_config)
            return q[:, None].expand(*tokens.shape, -1)

        def consumed() -> Tensor:
            assert after is not None
            return after[here]

        drafted = DraftedTokens(
            tokens=tokens,
            before=lambda: before[:, None],
            after=consumed,
            distributions=distributions,
        )
        return HeadInputs.of(reads, drafted, self.head.moments[-1])


def draft_states(
    draft: PreTrainedModel, batch: TargetBatch, consumed: bool
) -> tuple[Tensor, Tensor | None]:
    """The draft's states at the positions of a batch.

    Args:
        draft: the draft, on the batch's device.
        batch: the texts and the tokens drafted along them.
        consumed: whether those after the drafted tokens are wanted.

    Returns:
        (N, H) before the tokens were drawn, and (N, S, H) after each; None if not wanted.
    """
    after = None
    if consumed:
        ids, positions, place = batch.padded()
        states, drafted = tree_states(draft, batch.input_ids, ids, positions)
        after = drafted[batch.row[:, None], place]
    else:
        states = hidden_states(draft, batch.input_ids)
    return states[batch.row, batch.column - 1], after


def number_scales(inputs: Sequence[HeadInputs]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of the number features, by which a head standardises them.

    Args:
        inputs: of some rows.
    """
    scales = {}
    for name in [name for name in inputs[0].features if name in NUMBERS]:
        values = torch.cat([each[name].flatten() for each in inputs]).double()
        # What never changes, such as the entropy of a greedy draft, says nothing: it becomes 0.
        deviation = float(values.std(correction=0))
        scales[name] = (float(values.mean()), deviation if deviation > 0.0 else 1.0)
    return scales


def _arguments(head: BaseHead, inputs: HeadInputs, dims: int) -> tuple[Tensor | None, ...]:
    """The arguments of a head's `forward` that ask about all tokens at each of its moments.

    Args:
        head: of any kind.
        inputs: what is known at the last moment, leading shape (...).
        dims: how many dimensions that has.
    """
    features = tuple(inputs.features.get(name) for name in head.reads)
    if not isinstance(head, ImmediateHead):
        return features
    device = next(value.device for value in features if value is not None)
    moments = torch.tensor([int(moment) for moment in head.moments], device=device)
    return moments.view(-1, *[1] * dims), *features
