"""Watching a training: measurements that tell the best weights, and where they are reported."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import (
    TensorBoardCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from distill.adapters import base_of, set_weights, trained_weights, write_weights
from distill.config import DistilConfig, Reporter
from distill.watch import SCORE, HeldOut, Measurement, score
from specdata.errors import ConfigError, ManifestError, TrainingDivergedError
from specdata.storage.checkpoints import complete_steps, newest_complete
from specdata.storage.files import atomic_folder

MEASURED = "measured"
"""Key of a measurement in the Trainer's `log_history`, which its checkpoints hold."""
WEIGHTS = "weights.safetensors"

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
        elif self.config.keep == "best":
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
        state.log_history.append({"step": step, MEASURED: asdict(measured)})
        self.trainer.log(_scalars(measured))
        is_best = best_step(measurements(state)) == step
        if main and self.config.keep == "best" and is_best:
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
    entries = [entry[MEASURED] for entry in state.log_history if MEASURED in entry]
    return TypeAdapter(list[Measurement]).validate_python(entries)


def best_step(measured: Sequence[Measurement]) -> int:
    """The step of the best measurement, the earliest of equals."""
    return max(measured, key=score).step


def _scalars(measured: Measurement) -> dict[str, float]:
    """A measurement as names and numbers; reports show `eval_x` as `eval/x`."""
    whole = measured.overall
    named = {"acceptance": whole.acceptance, "kl": whole.kl}
    named |= {f"expected_tokens_{name}": value for name, value in whole.expected_tokens.items()}
    for name, figures in measured.sets.items():
        named[f"acceptance_{name}"] = figures.acceptance
        named[f"expected_tokens_{SCORE}_{name}"] = figures.expected_tokens[SCORE]
    return {f"eval_{name}": value for name, value in named.items()}


def store_best(work: Path, step: int, weights: Weights, needed: set[int]) -> None:
    """Keep weights whole or not at all, and drop those of other steps that are not needed."""
    with atomic_folder(work / f"best-{step}", replace=True) as folder:
        write_weights(weights, folder / WEIGHTS)
    for former in work.glob("best-*"):
        if int(former.name.partition("-")[2]) not in needed:
            shutil.rmtree(former)


def load_best(work: Path, step: int) -> Weights:
    """The weights of a step."""
    path = work / f"best-{step}" / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ManifestError(
            f"{path}, the best weights so far, cannot be read ({error}): remove {work} to train "
            "from the start"
        ) from error


def reporters(names: Sequence[Reporter] | None, folder: Path) -> list[TrainerCallback]:
    """The Trainer's callbacks that report losses and measurements, besides `history.json`.

    Without names that is TensorBoard if it is installed, else nowhere. Its files go to the folder,
    if its own environment variable names no other; by default they would lie among the checkpoints,
    and go with them.
    """
    installed = get_available_reporting_integrations()
    if missing := [name for name in names or () if name not in installed]:
        raise ConfigError(
            f"draft.report_to names {', '.join(map(repr, missing))}, which is not installed here: "
            "install it, or take it out; [] reports nowhere"
        )
    wanted = ["tensorboard"] if names is None else names
    kinds = get_reporting_integration_callbacks([name for name in installed if name in wanted])
    callbacks: list[TrainerCallback] = [kind() for kind in kinds]
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(folder)
    return callbacks
