"""The watch on a draft in training: figures on held-out rollouts, and best weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from distill.adapters import base_of, set_weights, trained_weights, write_weights
from distill.batches import tokens_of
from distill.config import DistilConfig
from distill.drafts import round_places
from specdata.drafts.depths import depths_of
from specdata.drafts.draft_vocabulary import draft_vocabulary_ids
from specdata.drafts.state_store import StateStore
from specdata.errors import ConfigError, ManifestError, TrainingDivergedError
from specdata.expected_tokens import Verification, expected_tokens, log_ratios
from specdata.lm_head import LMHead, find_lm_head
from specdata.models import check_ids, check_length, device
from specdata.probability import overlap, probabilities, to_vocabulary
from specdata.processes import broadcast_by_main, join_processes
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import complete_steps, newest_complete
from specdata.storage.files import atomic_folder
from specdata.target_states import has_states, has_taps, target_taps
from specdata.terminal import progress
from specdata.texts import (
    TOKENS_AT_ONCE,
    ModelSource,
    TargetSource,
    TextBatch,
    TextRow,
    TextRows,
    TopLogitSource,
    text_columns,
    tokens_at_once,
)
from specdata.top_logits import TopLogitDistributions, logits_of

DRAFTED = (4, 8)
"""Tokens drafted in a round, of which the expected tokens are measured."""
PLACES = 4
"""Of a round, at which a draft on its target's states is read; it drafts later ones as the last.
One with more masks is read at all of them."""
SCORE = "token_4"
"""The figure by which the best weights are told: expected tokens of a round, over all positions.

Every engine verifies token by token unless it is told otherwise, and small drafts are fastest at
about four tokens a round, so this is nearest to what serving gains; block verification emits at
least as many, and more only where a draft's joint ratio recovers.
"""
FIGURES = ("acceptance", "kl", *(f"{v}_{k}" for v in get_args(Verification) for k in DRAFTED))


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over completion positions of held-out rollouts; None where top logits decide none."""

    positions: int
    acceptance: float | None  # sum_x min(p, q), the probability that a drafted token is accepted
    kl: float | None  # KL(p || q) in nats, over the tokens that the draft can propose
    # Of a round that starts there, by verification and tokens drafted, such as "token_4".
    expected_tokens: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of a draft on held-out rollouts."""

    step: int
    rollouts: int
    overall: Figures
    sets: Mapping[str, Figures]  # by prompt set; none where rollouts do not name theirs

    @property
    def undecided(self) -> list[str]:
        """What top logits decide nowhere, in words: such figures are null where they are stored."""
        return [
            f"{', '.join(names)} of {name}"
            for name, figures in {**self.sets, "all held-out rollouts": self.overall}.items()
            if (names := [each for each, value in _named(figures).items() if value is None])
        ]


class HeldOut:
    """Rollouts that drafts are measured on, and what their target says there.

    The target says the same of them at every measurement, so its states are kept, as far as a
    store goes, or read where the rollouts store them: then a measurement runs only the draft.

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
        store: StateStore | None = None,
    ) -> None:
        """Choose the rollouts that are watched: all, or so many, evenly over prompt sets.

        The target is the model of p, or what p is made of the logits that the rollouts keep; the
        store has room for its states. The sampling is that of serving, for both models.
        """
        self.sampling = sampling
        self._rows: list[TextRow] = tokens_of(rollouts).to_list()
        # What is stored of the target stays on the disk.
        self._stored: TextRows = rollouts if has_states(rollouts) else self._rows
        self._tapped = rollouts if has_taps(rollouts) else None
        self._source: TargetSource
        if isinstance(target, TopLogitDistributions):
            self._source, self._stored = TopLogitSource(target), logits_of(rollouts)
            self._at_once = TOKENS_AT_ONCE.get(device().type, TOKENS_AT_ONCE["cpu"])
        else:
            head = find_lm_head(target)
            self._source = ModelSource(head, sampling, store or StateStore())
            self._at_once = tokens_at_once(head)
        self._watched = _evenly([row.get("dataset", "") for row in self._rows], watched)
        self._others = sorted({*range(len(self._rows))} - {*self._watched})

    def measure(
        self, draft: PreTrainedModel, *, step: int = 0, watched_only: bool = False
    ) -> Measurement:
        """Measure a draft in eval mode, after so many optimizer steps; NaN if its weights are."""
        head = find_lm_head(draft)
        rows: list[TextRow] = []
        columns: list[dict[str, Tensor]] = []
        # In the same batches at every measurement, whichever rollouts it reads.
        parts = [self._watched] if watched_only else [self._watched, self._others]
        count = sum(map(len, parts))
        # In training its own bar shows where it is.
        with progress(count, "held-out rollouts", "rollout", is_shown=not watched_only) as bar:
            for members in parts:
                rows += [self._rows[each] for each in members]
                columns += text_columns(
                    self._rows,
                    lambda batch: self.look(batch, head),
                    vocabulary=self._source.vocabulary,
                    tokens_at_once=self._at_once,
                    device=device(),
                    members=members,
                    report=bar.update,
                )
        values, counted = _of_rounds(columns)
        sets = [str(row.get("dataset", "")) for row in rows for _ in row["completion_ids"]]
        in_set = {
            name: torch.tensor([each == name for each in sets]) for name in sorted({*sets} - {""})
        }
        return Measurement(
            step=step,
            rollouts=len(rows),
            overall=_figures(values, counted),
            sets={name: _figures(values[is_in], counted[is_in]) for name, is_in in in_set.items()},
        )

    def measured_by_main(
        self, draft: PreTrainedModel, *, step: int = 0, watched_only: bool = False
    ) -> Measurement:
        """Measure on the main process; the others wait for its figures."""
        measured: Measurement | None = None
        if join_processes().is_main_process:
            measured = self.measure(draft, step=step, watched_only=watched_only)
        measured = broadcast_by_main(measured)
        assert measured is not None
        return measured

    def look(self, batch: TextBatch, draft: LMHead) -> Callable[[slice], dict[str, Tensor]]:
        """Sum min(p, q), KL(p || q), if p is decided, and log q/p of the text's tokens.

        The last at each of S places in a round, all else at the first.
        """
        read_p = self._source.distributions_of(batch, self._stored)
        tokens, sampling = batch.tokens, self.sampling
        q_states = self._states(batch, draft)

        def read_chunk(chunk: slice) -> dict[str, Tensor]:
            q_logits = to_vocabulary(draft.logits(q_states[0][chunk]), self._source.vocabulary)
            q, text = probabilities(q_logits, sampling), tokens[chunk, None].to(q_logits.device)
            p, p_of_text, decided = read_p(chunk, q)
            # Of q before truncation, as in the losses: else it would be infinite nearly everywhere.
            log_q = (q_logits.to(p.dtype) / (sampling.temperature or 1.0)).log_softmax(dim=-1)
            counted = (p > 0) & (log_q > float("-inf"))
            kl = torch.where(counted, p * (p.log() - log_q), 0.0).sum(dim=-1)
            later = (self._of_text(text, draft, states[chunk]) for states in q_states[1:])
            ratios = [log_ratios(p_of_text, each) for each in (q.gather(-1, text), *later)]
            values = {"acceptance": overlap(p, q), "kl": kl, "ratios": torch.cat(ratios, dim=-1)}
            return {name: each.double() for name, each in values.items()} | {"decided": decided}

        return read_chunk

    def _states(self, batch: TextBatch, draft: LMHead) -> list[Tensor]:
        """(N, H) the draft's states at each place of a round; of a plain draft all are alike."""
        ids = batch.input_ids[:, :-1].to(draft.model.device)
        check_length(draft.model.config, ids.shape[1])
        check_ids(self._source.vocabulary, *map(int, batch.input_ids.aminmax()))
        rows = [] if self._tapped is None else [self._tapped[row] for row in batch.examples]
        taps, is_predicted = target_taps(draft.model, rows, ids), batch.is_predicted.to(ids.device)
        place_count = max(PLACES, min(depths_of(draft.model), max(DRAFTED)))
        places = round_places(draft, ids, place_count, taps=taps, begins=is_predicted)
        return [place.states[is_predicted] for place in places]

    def _of_text(self, text: Tensor, draft: LMHead, states: Tensor) -> Tensor:
        """(C, 1) q of a text's tokens (C, 1), from states (C, H)."""
        logits, ids = draft.logits(states), draft_vocabulary_ids(draft.model)
        if ids is None:
            logits = to_vocabulary(logits, self._source.vocabulary)
            return probabilities(logits, self.sampling).gather(-1, text)
        some = probabilities(logits[:, ids], self.sampling)  # far fewer than all tokens
        place = torch.searchsorted(ids, text).clamp(max=len(ids) - 1)
        return some.gather(-1, place).masked_fill(ids[place] != text, 0.0)


def _of_rounds(columns: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """(N, F) values of `FIGURES` at the positions of texts, and which count."""
    texts = pad_sequence([each["ratios"] for each in columns], batch_first=True)  # (R, T, S)
    unknown = pad_sequence([~each["decided"] for each in columns], batch_first=True)
    lengths = torch.tensor([len(each["decided"]) for each in columns])
    is_text = torch.arange(texts.shape[1]) < lengths[:, None]
    decided = torch.cat([each["decided"] for each in columns])
    values = [torch.cat([each[name] for each in columns]) for name in ("acceptance", "kl")]
    counted = [decided, decided]
    for verification in get_args(Verification):
        for drafted in DRAFTED:
            values.append(expected_tokens(texts, lengths, drafted, verification)[is_text])
            reached = nn.functional.pad(unknown, (0, drafted - 1)).unfold(1, drafted, 1)
            counted.append(~reached.any(dim=-1)[is_text])
    return torch.stack(values, dim=-1), torch.stack(counted, dim=-1)


def score(measurement: Measurement) -> float:
    """The number that the best weights have most of."""
    if (tokens := measurement.overall.expected_tokens[SCORE]) is None:
        raise ConfigError(
            "the best weights are told by rounds of four tokens, and top logits decide none in the "
            f"{measurement.rollouts} held-out rollouts that are watched: raise draft.eval_rollouts,"
            " or keep more logits"
        )
    return tokens


def _evenly(sets: Sequence[str], count: int | None) -> list[int]:
    """Indices of `count` rows, as many of each set as it has, spread over its rows."""
    if count is None or count >= len(sets):
        return list(range(len(sets)))
    members = {
        name: [i for i, each in enumerate(sets) if each == name] for name in dict.fromkeys(sets)
    }
    indices: list[int] = []
    smallest_first = sorted(members.values(), key=len)
    for done, rows in enumerate(smallest_first):
        share = min(len(rows), (count - len(indices)) // (len(members) - done))
        indices += [rows[place * len(rows) // share] for place in range(share)]
    return sorted(indices)


def _figures(values: Tensor, counted: Tensor) -> Figures:
    """Means of (N, F) values of FIGURES over those that count; None where none does."""
    sums, counts = values.where(counted, 0.0).sum(dim=0), counted.sum(dim=0)
    means = [mean if n else None for mean, n in zip((sums / counts).tolist(), counts, strict=True)]
    acceptance, kl, *tokens = means
    return Figures(int(counts[0]), acceptance, kl, dict(zip(FIGURES[2:], tokens, strict=True)))


def _named(figures: Figures) -> dict[str, float | None]:
    return {
        "acceptance": figures.acceptance,
        "kl": figures.kl,
        **{f"expected_tokens_{name}": each for name, each in figures.expected_tokens.items()},
    }


MEASUREMENT = "measured"
"""Key of a measurement in the Trainer's `log_history`, which its checkpoints hold."""
BEST_WEIGHTS = "weights.safetensors"

Weights = dict[str, Tensor]


@dataclass(eq=False)
class Watch(TrainerCallback):  # type: ignore[misc]
    """Measures the draft at the start, every `eval_steps` and at the end, and keeps the best.

    Measurements are entries of the Trainer's log, so a checkpoint holds those up to its step, and a
    resumed training goes on with them. The best weights lie in `best-STEP` beside the checkpoints.
    Those that a checkpoint would go on with stay as long as the checkpoint does, so that whatever a
    killed training did after it makes no difference.

    `plain` is a copy of the draft, given the weights that are measured (`set_weights`); the
    label stands in the error of a training that diverged.
    """

    trainer: Trainer
    held_out: HeldOut
    plain: PreTrainedModel
    config: DistilConfig
    label: str

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Measure what training starts from, or find the best weights so far."""
        if not measurements(state):
            self._measure(args, state)
        else:
            load_best(Path(args.output_dir), best_step(measurements(state)))  # must be there

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure, if it is time."""
        if state.global_step % self.config.eval_steps == 0 or state.global_step >= state.max_steps:
            loss_is_due = control.should_log
            self._measure(args, state)
            control.should_log = loss_is_due  # which the log of a measurement resets

    def _measure(self, args: TrainingArguments, state: TrainerState) -> None:
        # All processes take part where each holds only a share of the weights.
        weights = trained_weights(self.trainer)
        main, step = state.is_world_process_zero, state.global_step
        if step and main:
            set_weights(self.plain, weights)
        draft = base_of(self.plain)
        measured = self.held_out.measured_by_main(draft, step=step, watched_only=True)
        if not math.isfinite(score(measured)):
            raise TrainingDivergedError(
                f"{self.label}: acceptance on held-out rollouts is {measured.overall.acceptance} "
                f"after step {step}",
                last_good=newest_complete(Path(args.output_dir)),
                learning_rate=args.learning_rate,
            )
        state.log_history.append({"step": step, MEASUREMENT: asdict(measured)})
        self.trainer.log(_scalars(measured))
        if main and best_step(measurements(state)) == step:
            store_best(Path(args.output_dir), step, weights, _needed(args, state))


def _needed(args: TrainingArguments, state: TrainerState) -> set[int]:
    """Steps of best weights that this training or a checkpoint of it would go on with."""
    measured = measurements(state)
    ends = [*complete_steps(Path(args.output_dir)), state.global_step]
    # Checkpoints beyond this step are of a training that was killed and goes on from before them.
    by_end = ([m for m in measured if m.step <= end] for end in ends)
    return {best_step(before) for before in by_end if before}


def measurements(state: TrainerState) -> list[Measurement]:
    """The measurements in a Trainer's log, in order."""
    entries = [entry[MEASUREMENT] for entry in state.log_history if MEASUREMENT in entry]
    return TypeAdapter(list[Measurement]).validate_python(entries)


def best_step(measured: Sequence[Measurement]) -> int:
    """The step of the best measurement, the earliest of equals."""
    return max(measured, key=score).step


def _scalars(measured: Measurement) -> dict[str, float]:
    """A measurement as names and numbers; reports show `eval_x` as `eval/x`."""
    named = _named(measured.overall)
    return {f"eval_{name}": value for name, value in named.items() if value is not None}


def store_best(work: Path, step: int, weights: Weights, needed: set[int]) -> None:
    """Keep weights whole or not at all, and drop those of other steps that are not needed."""
    with atomic_folder(work / f"best-{step}", replace=True) as folder:
        write_weights(weights, folder / BEST_WEIGHTS)
    for former in work.glob("best-*"):
        if int(former.name.partition("-")[2]) not in needed:
            shutil.rmtree(former)


def load_best(work: Path, step: int) -> Weights:
    """The weights of a step."""
    path = work / f"best-{step}" / BEST_WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ManifestError(
            f"{path}, the best weights so far, cannot be read ({error}): remove {work} to train "
            "from the start"
        ) from error
