"""What every training in this package shares: arguments, progress, and a safe resume.

A killed run goes on from its newest *complete* checkpoint, in the state and at the sample it had
reached, so its final weights are those of an uninterrupted run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from specdata.processes import join_processes
from specdata.storage.files import write_json
from specdata.storage.resume import Settings
from specdata.terminal import progress

# Written last, so its existence means that every rank has written its part of the checkpoint.
_COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast a language model trains.

    Attributes:
        steps: optimizer steps in all.
        batch_size: rows of one forward in one process.
        learning_rate: the largest, reached after the warm-up; a cosine takes it to 0.
        warmup_ratio: share of the steps over which it rises from 0.
        save_steps: optimizer steps between checkpoints.
        accumulation: forwards added up before an optimizer step.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup_ratio: float
    save_steps: int
    accumulation: int = 1


def training_arguments(work: Path, schedule: Schedule, *, seed: int) -> TrainingArguments:
    """Return arguments for AdamW with a cosine schedule, checkpoints in `work`, no reporting.

    `batch_size` is that of one process; everything else can be scaled by the launcher.
    """
    join_processes()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        # Trainer imports DeepSpeed wherever it is installed, which warns unless told of the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch_size,
        gradient_accumulation_steps=schedule.accumulation,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(schedule.steps * schedule.warmup_ratio),
        adam_beta2=0.95,  # the runs are short: forget old gradients within some 20 steps
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=schedule.save_steps,
        logging_strategy="steps",
        logging_steps=10,
        disable_tqdm=True,
        report_to="none",
        use_cpu=on_cpu,
        accelerator_config={"use_configured_state": True},
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        seed=seed,
        data_seed=seed,
    )
    # A plain script on a machine with several GPUs would silently use DataParallel, which makes
    # every batch, and so the number of epochs, that many times larger. Launchers use them all.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def train_resumably(trainer: Trainer, work: Path, settings: Settings, *, label: str) -> None:
    """Train to the end, from the newest complete checkpoint in `work` if there is one.

    Args:
        trainer: ready to train, with `training_arguments(work, ...)`.
        work: folder of the checkpoints; the caller deletes it when the result is saved.
        settings: what the result depends on; checkpoints of other settings are refused.
        label: shown beside the progress bar.

    Raises:
        ManifestError: if `work` was started with other settings.
    """
    with join_processes().main_process_first():
        settings.check_file(work / "settings.json")
        if trainer.is_world_process_zero():
            work.mkdir(parents=True, exist_ok=True)
            settings.write(work / "settings.json")
            for checkpoint in work.glob("checkpoint-*"):
                if not (checkpoint / _COMPLETE).is_file():
                    shutil.rmtree(checkpoint)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Progress(label))
    trainer.add_callback(_MarkComplete())
    newest = max(work.glob("checkpoint-*"), key=_step, default=None)
    with _no_shard_bars():
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    trainer.model.config.use_cache = True  # the Trainer turned it off; whoever decodes needs it


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write weights (safetensors), `config.json` and `generation_config.json`, without a bar."""
    with _no_shard_bars():
        model.save_pretrained(folder)


@contextmanager
def _no_shard_bars() -> Iterator[None]:
    """Hide the bars of saving and loading, which break ours and last milliseconds."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class _MarkComplete(TrainerCallback):  # type: ignore[misc]
    """Marks a checkpoint once all ranks have written it, and only then deletes the older ones.

    `kill -9` can leave a torn checkpoint, so the last whole one must outlive the next save.
    """

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        join_processes().wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(folder / _COMPLETE, {"step": state.global_step})
            for other in folder.parent.glob("checkpoint-*"):
                if other != folder:
                    shutil.rmtree(other)


class _Progress(TrainerCallback):  # type: ignore[misc]
    """One progress bar with the newest loss, and no other output."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar: tqdm[Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            self.bar = progress(state.max_steps, self.label, "step", done=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self.bar is not None and logs is not None and "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()
