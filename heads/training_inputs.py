"""What a head is asked in training: label rows become arguments of its `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.config import HeadConfig
from heads.inputs import FEATURES, DraftedTokens, logits_of_states, token_embeddings
from heads.rows import HeadRow, LabelRow, LabelRows, drawn_row, draws_of, mixed_row
from specdata.lm_head import hidden_states
from specdata.probability import SamplingConfig, probabilities
from specdata.processes import is_main
from specdata.state_store import STATES_BYTES
from specdata.terminal import progress
from specdata.texts import TOKENS_AT_ONCE, TextBatch, along

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_AT_ONCE = 256
# Rows by which what a head reads is scaled.
SCALED_ROWS = 128


@dataclass(slots=True)
class TrainingInputs:
    """The reading of label rows: SpecDec++'s, of mixed texts, or ours, beside the target's own.

    Of each the head `reads` what it names, and at most `max_length` tokens are kept. `kept` is what
    the draft says of the first training rows, so that a pass runs no forward.
    """

    draft: PreTrainedModel
    reads: Sequence[str]
    sampling: SamplingConfig
    config: HeadConfig
    max_length: int
    seed: int
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    _to_logits: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._to_logits = logits_of_states(self.draft)

    def row(self, labels: LabelRow, index: int, epoch: int | None) -> HeadRow:
        """One row of a pass over the training rows; None: of the dev rows, which stay the same.

        Mixed anew for each pass, or with the pass's draws; dev rows with the first. Raises
        ValueError if the columns do not fit each other.
        """
        if self.config.kind == "specdec++":
            key: tuple[str | int, ...] = ("dev",) if epoch is None else ("train", self.seed, epoch)
            return mixed_row(labels, rate=self.config.mixing, max_length=self.max_length, key=key)
        if epoch is None:
            return drawn_row(labels, draws=(0,), max_length=self.max_length)
        count = min(self.config.draws, held := draws_of(labels))
        draws = [(epoch * count + number) % held for number in range(count)]
        return drawn_row(labels, draws=draws, max_length=self.max_length, index=index)

    def keep(self, rows: LabelRows) -> None:
        """Read training rows for all their draws, as many as memory is set aside for.

        Before training and in an order of its own, so that a resumed run goes on with the same.
        """
        room = STATES_BYTES
        with progress(len(rows), "draft's states", "row", is_shown=is_main()) as bar:
            for start in range(0, len(rows), ROWS_AT_ONCE):
                labels = [rows[i] for i in range(start, min(start + ROWS_AT_ONCE, len(rows)))]
                read = self.read(
                    [
                        drawn_row(row, draws=range(draws_of(row)), max_length=self.max_length)
                        for row in labels
                    ],
                    bar.update,
                )
                room -= sum(values.nbytes for each in read for values in each.values())
                if room < 0:
                    break
                self.kept += read

    def arguments(self, rows: Sequence[HeadRow]) -> tuple[Tensor, ...]:
        """What the head reads of the rows' N positions, (N, S) and (N, S, size), in its order."""
        read = iter(self.read([row for row in rows if not self._is_kept(row)]))
        parts = [
            {
                name: values if values.dim() > 2 else values[:, list(row.draws)]
                for name, values in self.kept[row.index].items()
            }
            if self._is_kept(row)
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

    def _is_kept(self, row: HeadRow) -> bool:
        return 0 <= row.index < len(self.kept)

    def read(
        self, rows: Sequence[HeadRow], report: Callable[[int], object] = lambda rows: None
    ) -> list[dict[str, Tensor]]:
        """What takes a forward of the draft, of each row: states (n, 1, H), numbers (n, S)."""
        names = [name for name in self.reads if name != "embedding"]

        def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
            states = hidden_states(self.draft, batch.input_ids[:, :-1])[batch.is_predicted]
            tokens = torch.cat([rows[each].tokens for each in batch.examples]).to(states.device)

            def at(chunk: slice) -> dict[str, Tensor]:
                before = states[chunk, None]

                def distributions() -> Tensor:
                    q = probabilities(self._to_logits(before), self.sampling)
                    return q.expand(*tokens[chunk].shape, -1)

                drafted = DraftedTokens(
                    tokens=tokens[chunk], before=lambda: before, distributions=distributions
                )
                # In a mixed text that is the state after the token that is judged.
                return {
                    name: before if name == "hidden" else FEATURES[name].compute(drafted)
                    for name in names
                }

            return at

        if not rows or not names:
            return [{} for _ in rows]
        device = self.draft.device
        return along(
            [row.text for row in rows],
            read,
            vocabulary=self.draft.config.get_text_config().vocab_size * rows[0].tokens.shape[1],
            tokens_at_once=TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cpu"]),
            device=device,
            places=[row.places for row in rows],
            report=report,
        )


def feature_scales(inputs: TrainingInputs, rows: LabelRows) -> dict[str, tuple[float, float]]:
    """Means and deviations by which a head scales what it reads; of vectors, about 0.

    By some of the rows, the same ones in every process.
    """
    step = max(1, len(rows) // SCALED_ROWS)
    sample = [inputs.row(rows[index], index, 0) for index in range(0, len(rows), step)]
    scales = {}
    for name, values in zip(inputs.reads, inputs.arguments(sample), strict=True):
        values = values.flatten().double()
        mean = float(values.mean()) if FEATURES[name].shape == "number" else 0.0
        deviation = float((values - mean).square().mean().sqrt())
        # What never changes, such as the entropy of a greedy draft, says nothing: it becomes 0.
        scales[name] = (mean, deviation if deviation > 0.0 else 1.0)
    return scales
