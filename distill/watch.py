"""Measurements of a draft while it trains, on rollouts that are not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from distill.batches import tokens_of
from distill.states import readings
from specdata.draft_vocabulary import draft_vocabulary_ids
from specdata.expected_tokens import Verification, expected_tokens, log_ratios
from specdata.labels.labeller import TOKENS_AT_ONCE, by_length, tokens_at_once
from specdata.lm_head import LMHead, find_lm_head
from specdata.models import check_length, device
from specdata.probability import overlap, probabilities, to_vocabulary
from specdata.processes import join_processes, wait_for_main
from specdata.sampling import SamplingConfig
from specdata.sharded import is_sharded
from specdata.states_draft import states_input
from specdata.storage.files import write_json
from specdata.target_states import has_states, has_taps, reading_stored, stored_states
from specdata.top_logits import (
    TopLogitDistributions,
    log_total,
    logits_of,
    top_logit_columns,
)

DRAFTED = (4, 8)
"""Tokens drafted in the rounds whose expected tokens are measured."""
PLACES = 4
"""Of a round, at which a draft on its target's states is read; it drafts later ones as the last."""
SCORE = "token_4"
"""The figure by which the best weights are told: expected tokens of a round, over all positions.

Every engine verifies token by token unless it is told otherwise, and small drafts are fastest at
about four tokens a round, so this is nearest to what serving gains; block verification emits at
least as many, and more only where a draft's joint ratio recovers.
"""
# Teacher's states that are stored between measurements, in bytes; others are computed again.
STATES_BYTES = 1 << 30
# Probabilities of a distribution over the vocabulary that are held at once, of each model.
VALUES_AT_ONCE = 1 << 22

COLUMNS = ("acceptance", "kl", *(f"{v}_{k}" for v in get_args(Verification) for k in DRAFTED))


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over completion positions of held-out rollouts.

    Attributes:
        positions: how many.
        acceptance: of sum_x min(p, q), the probability that a drafted token is accepted.
        kl: of KL(p || q) in nats, over the tokens that the draft can propose.
        expected_tokens: of a round that starts there, by verification and tokens drafted, such as
            "token_4" and "block_8" (`specdata.expected_tokens`).
    """

    positions: int
    acceptance: float
    kl: float
    expected_tokens: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A draft on held-out rollouts.

    Attributes:
        step: optimizer steps taken before.
        rollouts: how many were read.
        overall: over all positions.
        sets: the same of each prompt set, by name; none where rollouts do not name theirs.
    """

    step: int
    rollouts: int
    overall: Figures
    sets: Mapping[str, Figures]


@dataclass(frozen=True, slots=True)
class History:
    """The record of a training, stored beside the draft's weights as `history.json`.

    Attributes:
        steps: loss, norm of the gradient and learning rate as the Trainer logged them, in order.
        measurements: on the rollouts that are watched while training, in order.
        before: on all held-out rollouts, before the first step.
        after: the same, of the weights that were stored.
        best_step: optimizer steps after which these weights were reached.
    """

    steps: tuple[dict[str, float], ...] = ()
    measurements: tuple[Measurement, ...] = ()
    before: Measurement | None = None
    after: Measurement | None = None
    best_step: int | None = None

    def write(self, folder: Path) -> None:
        """Write it into a model's folder, whole or not at all."""
        write_json(folder / "history.json", asdict(self))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rollouts that go through the models together, and their N completion positions in a line.

    Attributes:
        ids: (B, T) prompts and completions without their last tokens, padded on the right.
        row: (N,) the row of each position.
        column: (N,) where a model's output predicts the token of that position.
        place: (N,) the position's number in its completion, from 0.
        tokens: (N,) the completions' own tokens.
        lengths: (B,) tokens of each completion.
        sets: B names of prompt sets.
        members: B indices of the rollouts.
    """

    ids: Tensor
    row: Tensor
    column: Tensor
    place: Tensor
    tokens: Tensor
    lengths: Tensor
    sets: Sequence[str]
    members: Sequence[int]

    @classmethod
    def of(cls, all_rows: Sequence[Mapping[str, Any]], members: Sequence[int]) -> _Batch:
        rows = [all_rows[index] for index in members]
        whole = [torch.tensor(row["prompt_ids"] + row["completion_ids"]) for row in rows]
        lengths = torch.tensor([len(row["completion_ids"]) for row in rows])
        row = torch.arange(len(rows)).repeat_interleave(lengths)
        place = torch.cat([torch.arange(int(length)) for length in lengths])
        # Position t predicts token t + 1, so the first completion token is read off the prompt.
        column = place + torch.tensor([len(row["prompt_ids"]) - 1 for row in rows])[row]
        return cls(
            pad_sequence([ids[:-1] for ids in whole], batch_first=True),
            row,
            column,
            place,
            torch.cat([torch.tensor(row["completion_ids"]) for row in rows]),
            lengths,
            [str(row.get("dataset", "")) for row in rows],
            members,
        )

    def states(self, head: LMHead) -> Tensor:
        """(N, H) states of a model at the positions. Raises ConfigError for too long a row."""
        check_length(head.model.config, self.ids.shape[1])
        device = head.model.device
        return head.states(self.ids.to(device))[self.row.to(device), self.column.to(device)]


class HeldOut:
    """Rollouts that drafts are measured on, and what their target says there.

    Models run on batches of rows of like length; distributions over the vocabulary are made for a
    few positions at a time. The target says the same of them at every measurement, so its states
    are stored, as far as `STATES_BYTES` go, or read where the rollouts store them: then a
    measurement runs only the draft.

    With top logits there is no target. Where they do not decide p (`TopLogitDistributions`), the
    tokens outside count as one: acceptance is an upper bound and KL a lower one. Expected tokens
    need p of the text's own tokens alone, which is exact where its logits are stored, too.
    Positions at which they do not decide a truncated p are left out, and rounds that reach one.
    """

    def __init__(
        self,
        target: PreTrainedModel | TopLogitDistributions,
        rollouts: Dataset,
        sampling: SamplingConfig,
        *,
        watched: int | None = None,
    ) -> None:
        """Choose the rollouts that are watched while training.

        Args:
            target: the model of p, or what p is made of the logits that the rollouts keep.
            rollouts: with `prompt_ids`, `completion_ids`; prompt sets by `dataset`, if there.
            sampling: the warp of serving, applied to both models.
            watched: how many of them are watched, evenly over prompt sets; None for all.
        """
        self.sampling = sampling
        self._target: _ModelTarget | _TopLogitsTarget
        if isinstance(target, TopLogitDistributions):
            self._target = _TopLogitsTarget(target, logits_of(rollouts))
            at_once = TOKENS_AT_ONCE.get(device().type, TOKENS_AT_ONCE["cpu"])
        else:
            head = find_lm_head(target)
            self._target = _ModelTarget(head, rollouts if has_states(rollouts) else None, sampling)
            at_once = tokens_at_once(head)
        self._tapped = rollouts if has_taps(rollouts) else None
        rows = tokens_of(rollouts).to_list()
        chosen = _evenly([row.get("dataset", "") for row in rows], watched)
        others = sorted(set(range(len(rows))) - set(chosen))
        self._batches = _in_batches(rows, chosen, at_once)
        self._watched = len(self._batches)
        self._batches += _in_batches(rows, others, at_once)

    @torch.inference_mode()
    def measure(
        self, draft: PreTrainedModel, *, step: int = 0, watched_only: bool = False
    ) -> Measurement:
        """Measure a draft.

        Args:
            draft: the model of q, in eval mode.
            step: optimizer steps that it has taken.
            watched_only: whether to read only the rollouts that are watched.

        Returns:
            Its figures. They are NaN if its weights are.

        Raises:
            ConfigError: if a rollout is longer than a model's context.
        """
        head = find_lm_head(draft)
        batches = self._batches[: self._watched] if watched_only else self._batches
        found = [self._values(index, batch, head) for index, batch in enumerate(batches)]
        values, counted = (torch.cat(each) for each in zip(*found, strict=True))
        sets = [batch.sets[row] for batch in batches for row in batch.row.tolist()]
        rows = {
            name: torch.tensor([each == name for each in sets]) for name in sorted(set(sets) - {""})
        }
        return Measurement(
            step=step,
            rollouts=sum(len(batch.sets) for batch in batches),
            overall=_figures(values, counted),
            sets={name: _figures(values[mine], counted[mine]) for name, mine in rows.items()},
        )

    @torch.inference_mode()
    def measure_on_main(
        self, draft: PreTrainedModel, *, step: int = 0, watched_only: bool = False
    ) -> Measurement | None:
        """Measure a draft on the main process, as `measure`, while the others wait: None there.

        A target in parts is run by all of them.
        """
        measured = None
        if join_processes().is_main_process:
            measured = self.measure(draft, step=step, watched_only=watched_only)
        elif self._target.is_sharded:
            batches = self._batches[: self._watched] if watched_only else self._batches
            for index, batch in enumerate(batches):
                self._target.at(index, batch)
        wait_for_main()
        return measured

    def _values(self, index: int, batch: _Batch, draft: LMHead) -> tuple[Tensor, Tensor]:
        """(N, C) values of COLUMNS at a batch's positions, and which count; float64 on the CPU."""
        q_states, here = self._states(batch, draft), self._target.at(index, batch)
        tokens = batch.tokens.to(q_states[0].device)
        step = max(1, VALUES_AT_ONCE // self._target.vocabulary)
        compared = [
            self._compare(
                here,
                slice(start, start + step),
                draft,
                [states[start : start + step] for states in q_states],
                tokens[start : start + step],
            )
            for start in range(0, len(tokens), step)
        ]
        acceptance, kl, decided, *logs = torch.cat(compared).double().cpu().unbind(dim=-1)
        lengths = batch.lengths.tolist()
        ratios = torch.stack(logs, dim=-1)  # (N, S)
        texts = pad_sequence(list(torch.split(ratios, lengths)), batch_first=True)
        unknown = pad_sequence(list(torch.split(1.0 - decided, lengths)), batch_first=True)
        values, counted = [acceptance, kl], [decided.bool()] * 2
        for verification in get_args(Verification):
            for drafted in DRAFTED:
                rounds = expected_tokens(texts, batch.lengths, drafted, verification)
                reached = nn.functional.pad(unknown, (0, drafted - 1)).unfold(1, drafted, 1)
                values.append(rounds[batch.row, batch.place])
                counted.append(~reached.any(dim=-1)[batch.row, batch.place])
        return torch.stack(values, dim=-1), torch.stack(counted, dim=-1)

    def _states(self, batch: _Batch, draft: LMHead) -> list[Tensor]:
        """(N, H) the draft's states; of one on its target's states at each place of a round."""
        rows = [] if self._tapped is None else [self._tapped[row] for row in batch.members]
        reads, ids = states_input(draft.model), batch.ids.to(draft.model.device)
        if reads is None:
            return [batch.states(draft)]
        check_length(draft.model.config, ids.shape[1])
        with reading_stored(draft.model, rows, ids.shape[1]):
            taps = reads.read_target(ids)
        row, column = batch.row.to(ids.device), batch.column.to(ids.device)
        return [states[row, column] for states in readings(draft.model, ids, taps, PLACES)]

    def _compare(
        self,
        target: _At,
        positions: slice,
        draft: LMHead,
        states: Sequence[Tensor],
        tokens: Tensor,
    ) -> Tensor:
        """(C, 3 + S): sum min(p, q), KL(p || q), if p is decided, and log q/p of the text's token.

        The last at each of S places in a round, all else at the first; of each the draft's states
        (C, H) are given.
        """
        text = tokens.unsqueeze(-1)
        q_logits = to_vocabulary(draft.logits(states[0]), self._target.vocabulary)
        q = probabilities(q_logits, self.sampling)
        p, p_of_text, decided = target(positions, q, text)
        # Of q before truncation, as in the losses: else it would be infinite nearly everywhere.
        log_q = (q_logits.to(p.dtype) / (self.sampling.temperature or 1.0)).log_softmax(dim=-1)
        counted = (p > 0) & (log_q > float("-inf"))
        kl = torch.where(counted, p * (p.log() - log_q), 0.0).sum(dim=-1)
        of_text = [q.gather(-1, text), *(self._of(text, draft, each) for each in states[1:])]
        ratios = (log_ratios(p_of_text, each).squeeze(-1) for each in of_text)
        return torch.stack([overlap(p, q), kl, decided.to(kl.dtype), *ratios], dim=-1)

    def _of(self, text: Tensor, draft: LMHead, states: Tensor) -> Tensor:
        """(C, 1) q of a text's tokens (C, 1), from states (C, H)."""
        logits, ids = draft.logits(states), draft_vocabulary_ids(draft.model)
        if ids is None:
            logits = to_vocabulary(logits, self._target.vocabulary)
            return probabilities(logits, self.sampling).gather(-1, text)
        some = probabilities(logits[:, ids], self.sampling)  # far fewer than all tokens
        place = torch.searchsorted(ids, text).clamp(max=len(ids) - 1)
        return some.gather(-1, place).masked_fill(ids[place] != text, 0.0)


_At = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""C positions of a batch, q there (C, V) and the text's tokens (C, 1) -> p (C, V), p of these, and
where p is decided, (C,) bool."""


class _ModelTarget:
    """p by the target."""

    def __init__(self, head: LMHead, stored: Dataset | None, sampling: SamplingConfig) -> None:
        self._head = head
        self._stored = stored
        self._sampling = sampling
        self._cached: dict[int, Tensor] = {}
        self.vocabulary = head.vocabulary
        self.is_sharded = is_sharded(head.model)

    def at(self, index: int, batch: _Batch) -> _At:
        states = self._states(index, batch)

        def there(positions: slice, q: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            p = probabilities(self._head.logits(states[positions].to(q.device)), self._sampling)
            return p, p.gather(-1, text), torch.ones_like(text[:, 0], dtype=torch.bool)

        return there

    def _states(self, index: int, batch: _Batch) -> Tensor:
        if index in self._cached:
            return self._cached[index]
        if self._stored is not None:
            stored = [stored_states(self._stored[row], self._head) for row in batch.members]
            if known := [states for states in stored if states is not None]:
                return torch.cat(known)
        states = batch.states(self._head)
        used = sum(each.numel() * each.element_size() for each in self._cached.values())
        if used + states.numel() * states.element_size() <= STATES_BYTES:
            self._cached[index] = states.cpu()
        return states


class _TopLogitsTarget:
    """p from the logits that an earlier stage stored of the target."""

    def __init__(self, known: TopLogitDistributions, rows: Dataset) -> None:
        self._known = known
        self._rows = rows
        self.vocabulary = known.vocabulary
        self.is_sharded = False

    def at(self, _index: int, batch: _Batch) -> _At:
        parts = [
            top_logit_columns(self._rows[row], self._known.count, length)
            for row, length in zip(batch.members, batch.lengths.tolist(), strict=True)
        ]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

        def there(positions: slice, q: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            top = {name: values[positions].to(q.device) for name, values in columns.items()}
            p, decided = self._known.distribution(top, q), self._known.decided(top)
            if self._known.is_exact:
                return p, p.gather(-1, text), decided
            return p, (top["text_logit"] - log_total(top)).exp(), decided

        return there


def score(measurement: Measurement) -> float:
    """The number that the best weights have most of."""
    return measurement.overall.expected_tokens[SCORE]


def _evenly(sets: Sequence[str], count: int | None) -> list[int]:
    """Indices of `count` rows, as many of each set as it has, spread over its rows."""
    if count is None or count >= len(sets):
        return list(range(len(sets)))
    members = {
        name: [i for i, each in enumerate(sets) if each == name] for name in dict.fromkeys(sets)
    }
    chosen: list[int] = []
    smallest_first = sorted(members.values(), key=len)
    for done, rows in enumerate(smallest_first):
        share = min(len(rows), (count - len(chosen)) // (len(members) - done))
        chosen += [rows[place * len(rows) // share] for place in range(share)]
    return sorted(chosen)


def _in_batches(
    rows: Sequence[Mapping[str, Any]], members: Sequence[int], at_once: int
) -> list[_Batch]:
    lengths = [len(rows[i]["prompt_ids"]) + len(rows[i]["completion_ids"]) for i in members]
    return [
        _Batch.of(rows, [members[place] for place in chosen])
        for chosen in by_length(lengths, at_once)
    ]


def _figures(values: Tensor, counted: Tensor) -> Figures:
    """Means of (N, C) values of COLUMNS over those that count."""
    sums = values.where(counted, 0.0).sum(dim=0)
    means = dict(zip(COLUMNS, (sums / counted.sum(dim=0)).tolist(), strict=True))
    acceptance, kl = means.pop("acceptance"), means.pop("kl")
    return Figures(int(counted[:, 0].sum()), acceptance, kl, means)
