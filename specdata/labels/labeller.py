"""Labels of rows in memory.

Models run on batches of rows; distributions over the vocabulary are made for a few positions at a
time, since those of a whole batch would need more memory than the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdata.errors import NotFiniteError
from specdata.lm_head import LMHead
from specdata.models import check_length
from specdata.probability import (
    SamplingConfig,
    accept_probability,
    entropy,
    inverse_cdfs,
    overlap,
    probabilities,
    to_vocabulary,
)
from specdata.sampling import generator_for
from specdata.storage.schema import MORE_DRAWS, TOP_LOGITS, Label, Rollout
from specdata.target_states import reading_stored, stored_states
from specdata.top_logits import TopLogitDistributions

# Tokens of one forward, padding included. Larger batches leave a CPU's caches (at 4096 the toy pair
# is labelled a third slower), smaller ones leave a GPU waiting.
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
# Positions whose distributions are held at once: as many as make VALUES_AT_ONCE probabilities, but
# at least these.
VALUES_AT_ONCE = 1 << 20
POSITIONS = {"cpu": 32, "cuda": 256}

DECIDED = "decided"
# C positions of a batch and the draft's distributions there, (C, V) -> the target's distributions
# there, (C, V), and which of them are decided, (C,): others are left out. None: all.
DistributionsAt = Callable[[slice, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts that go through a model together, and their N completion positions in one line.

    Attributes:
        rows: B rollouts.
        ids: (B, T) prompts and completions without their last tokens, padded on the right.
        row: (N,) the row of each position.
        column: (N,) where a model's output predicts the token of that position.
        uniforms: (N, S) in [0, 1), what the draft's tokens are drawn with.
    """

    rows: Sequence[Rollout]
    ids: Tensor
    row: Tensor
    column: Tensor
    uniforms: Tensor

    @classmethod
    def of(cls, rows: Sequence[Rollout], seed: int, draws: int, device: torch.device) -> Batch:
        """Pad the rows, and draw the uniforms of each from its own seeds; none for 0 draws."""
        ids = [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:-1]) for row in rows]
        lengths = torch.tensor([len(row["completion_ids"]) for row in rows])
        last = torch.tensor([len(tokens) for tokens in ids])
        row = torch.arange(len(rows)).repeat_interleave(lengths)
        # Counted from the end of the row: the last completion token is predicted there.
        column = torch.arange(len(row)) + (last - lengths.cumsum(0)).repeat_interleave(lengths)
        return cls(
            rows,
            pad_sequence(ids, batch_first=True).to(device),
            row.to(device),
            column.to(device),
            torch.cat([_uniforms(rollout, seed, draws) for rollout in rows]).to(device)
            if draws
            else torch.empty(len(row), 0, device=device),
        )

    def states(self, model: LMHead) -> Tensor:
        """(N, H) states of a model at the positions. Raises ConfigError for too long a row."""
        check_length(model.model.config, self.ids.shape[1])
        with reading_stored(model.model, self.rows, self.ids.shape[1]):
            return model.states(self.ids)[self.row, self.column]


@dataclass(frozen=True, slots=True)
class Labeller:
    """Labels rows: Y_i ~ q(. | prompt, X_<i) and min(1, p(Y_i)/q(Y_i)) at each position i.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 4.1. The models cost most, so several Y a
    position, independent of each other, are cheap where they are learned from. Memory beyond the
    models' bodies: the states of a batch, and the distributions of a few positions
    (`VALUES_AT_ONCE`, `POSITIONS`).

    Attributes:
        distributions: batch -> p at some of its positions.
        draft: the model of q.
        vocabulary: V of the target.
        sampling: the sampler that tokens are served with.
        seed: the run's seed.
        tokens_at_once: tokens of one forward; a longer row goes by itself.
        draws: S, how many Y a position of the rows of split "train"; others have one.
    """

    distributions: Callable[[Batch], DistributionsAt]
    draft: LMHead
    vocabulary: int
    sampling: SamplingConfig
    seed: int
    tokens_at_once: int
    draws: int = 1

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Rollout]) -> list[Label]:
        """Label the rows; one with undecided positions in parts, without these.

        They go through the models longest first, and are returned in the order given.

        Raises:
            ConfigError: if a row is longer than a model's context.
            NotFiniteError: naming the model, if a distribution is none.
        """
        labels = []
        made = columns_of_rows(rows, self.tokens_at_once, self._columns)
        for row, mine in zip(rows, made, strict=True):
            if self.draws > 1 and row["split"] != "train":
                mine |= {name: torch.empty(len(mine["log_q"]), 0) for name in MORE_DRAWS.names}
            labels += _decided_parts(row, mine)
        return labels

    def _columns(self, rows: Sequence[Rollout]) -> dict[str, Tensor]:
        """(N, ...) values of every column at the rows' positions."""
        batch = Batch.of(rows, self.seed, self.draws, self.draft.model.device)
        distributions, states = self.distributions(batch), batch.states(self.draft)

        def at(here: slice) -> dict[str, Tensor]:
            logits = to_vocabulary(self.draft.logits(states[here]), self.vocabulary)
            q = probabilities(logits, self.sampling)
            p, decided = distributions(here, q)
            columns = _compare(p, q, batch.uniforms[here])
            return columns if decided is None else columns | {DECIDED: decided}

        columns = in_chunks(states, self.vocabulary, at)
        if bool(columns["overlap"].isnan().any()):
            by_draft = bool(columns["log_q"].isnan().any())
            raise NotFiniteError(
                self.draft.model.config.name_or_path if by_draft else "the target of these rollouts"
            )
        return columns


def _decided_parts(row: Rollout, columns: dict[str, Tensor]) -> list[Label]:
    """A row with its (C, ...) columns; where positions are left out, what lies between them.

    The text before a part goes to its prompt, so its labels stand where they stood.
    """
    ids, size = row["completion_ids"], len(row["completion_ids"])
    decided = columns.pop(DECIDED, torch.ones(size, dtype=torch.bool))
    ends = [*(~decided).nonzero().flatten().tolist(), size]
    parts = []
    for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        if begin == end:
            continue
        text = {
            "prompt_ids": row["prompt_ids"] + ids[:begin],
            "completion_ids": ids[begin:end],
            "finish": row["finish"] if end == size else "length",
        }
        mine = {name: values[begin:end].flatten().tolist() for name, values in columns.items()}
        parts.append(cast(Label, {**row, **text, **mine}))
    return parts


def _compare(p: Tensor, q: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
    """Columns to store of p and q, (C, V), for the tokens that the uniforms (C, S) draw from q."""
    drafted = inverse_cdfs(q, uniforms).clamp(min=0)  # where there is none, log q is NaN
    p_at, q_at = p.gather(-1, drafted), q.gather(-1, drafted)
    accept = accept_probability(p_at, q_at)
    most, best = q.max(dim=-1, keepdim=True)
    more = (
        {"more_draft_ids": drafted[:, 1:], "more_accept_prob": accept[:, 1:]}
        if uniforms.shape[-1] > 1
        else {}
    )
    return {
        "draft_ids": drafted[:, 0],
        "accept_prob": accept[:, 0],
        # A drafted token that the target gives 0 has log p = -inf; parquet stores it as such.
        "log_p": p_at[:, 0].log(),
        "log_q": q_at[:, 0].log(),
        "log_q_max": most.squeeze(-1).log(),
        "log_q_second": q.scatter(-1, best, 0.0).amax(dim=-1).log(),
        "entropy": entropy(q),
        "log_mass_above": q.where(q > q_at[:, :1], 0.0).sum(dim=-1).log(),
        "overlap": overlap(p, q),
        **more,
    }


def target_distributions(target: LMHead, sampling: SamplingConfig, batch: Batch) -> DistributionsAt:
    """The target's distributions from the states stored with the rollouts, or its own forward."""
    states = target_states(target, batch)

    def there(here: slice, _q: Tensor) -> tuple[Tensor, None]:
        return probabilities(target.logits(states[here]), sampling), None

    return there


def target_states(target: LMHead, batch: Batch) -> Tensor:
    """The target's states at a batch's positions: those that rollouts keep, or its forward's."""
    stored = [stored_states(row, target) for row in batch.rows]
    known = [states for states in stored if states is not None]
    if len(known) == len(stored):
        return torch.cat(known).to(batch.ids.device)
    return batch.states(target)


def columns_of_rows(
    rows: Sequence[Rollout],
    tokens_at_once: int,
    columns_of: Callable[[Sequence[Rollout]], dict[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """(C, ...) columns of each row, in the order given, made of batches, longest first.

    Args:
        rows: to make columns for.
        tokens_at_once: tokens of one forward; a longer row goes by itself.
        columns_of: rows -> (N, ...) columns at all their positions, in a line.
    """
    made: dict[int, dict[str, Tensor]] = {}
    whole = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
    for indices in by_length(whole, tokens_at_once):
        columns = columns_of([rows[index] for index in indices])
        lengths = [len(rows[index]["completion_ids"]) for index in indices]
        starts = accumulate(lengths[:-1], initial=0)
        for index, begin, length in zip(indices, starts, lengths, strict=True):
            made[index] = {name: each[begin : begin + length] for name, each in columns.items()}
    return [made[index] for index in range(len(rows))]


def in_chunks(
    states: Tensor, vocabulary: int, columns_at: Callable[[slice], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """(N, ...) columns on the CPU, made for as many positions at once as memory allows.

    Args:
        states: (N, H) of the positions.
        vocabulary: V of the distributions that are made of them.
        columns_at: makes the columns of some positions.
    """
    at_least = POSITIONS.get(states.device.type, POSITIONS["cpu"])
    step = max(at_least, VALUES_AT_ONCE // vocabulary)
    columns: dict[str, Tensor] = {}
    for start in range(0, len(states), step):
        here = slice(start, start + step)
        for name, piece in columns_at(here).items():
            # Small tensors kept one by one would cut up the memory that large ones leave.
            if name not in columns:
                columns[name] = piece.new_empty(len(states), *piece.shape[1:])
            columns[name][here] = piece
    return {name: column.cpu() for name, column in columns.items()}


def distributions_of_top_logits(
    distributions: TopLogitDistributions, batch: Batch
) -> DistributionsAt:
    """The target's distributions from the logits that an earlier dataset keeps."""
    top = {
        name: torch.cat([torch.tensor(row[name]) for row in cast(Any, batch.rows)])
        for name in TOP_LOGITS.names
    }
    columns = {
        name: values.view(len(batch.row), -1).to(batch.ids.device) for name, values in top.items()
    }

    def there(here: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        top_here = {name: column[here] for name, column in columns.items()}
        return distributions.distribution(top_here, q), distributions.decided(top_here)

    return there


def tokens_at_once(*models: LMHead) -> int:
    """Tokens of a batch; 1, a row by itself, if a model only gives whole rows of logits."""
    if any(model.embedding is None for model in models):
        return 1
    return TOKENS_AT_ONCE.get(models[0].model.device.type, TOKENS_AT_ONCE["cpu"])


def by_length(lengths: Sequence[int], tokens_at_once: int) -> Iterator[list[int]]:
    """Indices of rows that go together: of like length, longest first.

    Args:
        lengths: tokens of each row.
        tokens_at_once: most tokens of a batch, padding included; a longer row goes by itself.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        count = max(1, tokens_at_once // lengths[order[0]])
        yield order[:count]
        order = order[count:]


def _uniforms(row: Rollout, seed: int, draws: int) -> Tensor:
    """(C, S) uniforms of a row. Each draw has its own generator, so S does not change any."""
    key = (row["example_id"], row["sample"])
    if turn := row.get("turn", 0):
        key = (*key, turn)  # type: ignore[assignment]
    names = ["label", *(f"label draw {draw}" for draw in range(1, draws))]
    generators = [generator_for(seed, name, *key) for name in names]
    length = len(row["completion_ids"])
    uniforms = [torch.rand(length, generator=one, dtype=torch.float64) for one in generators]
    return torch.stack(uniforms, dim=-1)
