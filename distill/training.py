"""The code that every training in this package shares: arguments, progress, and a safe resume.

A killed run goes on from its newest *complete* checkpoint, in the state and at the sample it had
reached, so its final weights are those of an uninterrupted run.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import unset_hf_deepspeed_config
from transformers.utils import SAFE_WEIGHTS_NAME

from distill.adapters import set_weights, trained_weights, write_weights
from distill.config import DistilConfig, FinetuneConfig
from distill.objective import Objective
from specdata.errors import TrainingDivergedError
from specdata.generation import special_ids
from specdata.interruption import Interrupted, stop_signal_of_any, until_checkpoint
from specdata.models import device, load_configs
from specdata.processes import begin_training, broadcast_by_main, join_processes
from specdata.products import by_onednn
from specdata.saving import add_former_names, copy_tokenizer
from specdata.storage.checkpoints import (
    checkpoint_folder,
    checkpoint_to_resume,
    complete,
    newest_complete,
)
from specdata.storage.files import atomic_folder, write_json
from specdata.storage.resume import read_record
from specdata.terminal import progress
from specdata.threads import threads_of

TRIMMED_STEPS = 4

RESULT_FILE, HISTORY_FILE = "result.json", "history.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The folder of a model that is made once: it appears when it is complete.

    It is of one training: the stage's run.json says of which, and refuses another.
    """

    path: Path

    @property
    def work(self) -> Path:
        """The folder of a training under way: its checkpoints, above all."""
        return self.path.with_name(f"{self.path.name}.training")

    def result(self) -> dict[str, Any] | None:
        """Read the record that was stored with the model; None if it is not there yet."""
        if not self.path.exists():
            return None
        shutil.rmtree(self.work, ignore_errors=True)  # of a run killed right before its end
        remedy = f"remove {self.path} and run the same command again"
        return read_record(self.path / RESULT_FILE, (), remedy)

    def write(self, model: PreTrainedModel, target: str | Path, records: Mapping[str, Any]) -> None:
        """Write the model with the target's tokenizer, and JSON values by their file's name.

        Its weights are stored in the target's precision, if they are already rounded to it.
        """
        dtype = stored_dtype(target)
        weights = list(model.parameters())  # buffers may need more
        if all(torch.equal(each, each.to(dtype).to(each.dtype)) for each in weights):
            for weight in weights:
                weight.data = weight.data.to(dtype)
        with atomic_folder(self.path) as temporary:
            save_model(model, temporary)
            copy_tokenizer(str(target), temporary)
            for name, record in records.items():
                write_json(temporary / name, record)
        shutil.rmtree(self.work, ignore_errors=True)


def draft_arguments(
    work: Path, config: DistilConfig | FinetuneConfig, rows: int, *, save_steps: int, seed: int
) -> TrainingArguments:
    """Return the arguments of a draft's training; each pass over its rows ends with a step."""
    a_pass = math.ceil(math.ceil(rows / config.batch_size) / config.accumulation)
    return training_arguments(
        work,
        steps=math.ceil(config.epochs * a_pass),
        batch_size=math.ceil(config.batch_size / join_processes().num_processes),
        accumulation=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_ratio=config.warmup_ratio,
        save_steps=save_steps,
        seed=seed,
    )


def training_arguments(
    work: Path,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_ratio: float,
    save_steps: int,
    seed: int,
    accumulation: int = 1,
) -> TrainingArguments:
    """Return arguments for AdamW with a cosine schedule, checkpoints in `work`, no reporting.

    `batch_size` counts the rows of one forward in one process; `accumulation` forwards make a step.
    """
    begin_training()
    on_cpu = device().type == "cpu"
    if on_cpu:
        # Trainer imports DeepSpeed wherever it is installed, which warns unless told of the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(steps * warmup_ratio),
        adam_beta2=0.95,  # the runs are short: forget old gradients within some 20 steps
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=save_steps,
        logging_strategy="steps",
        logging_steps=10,
        logging_nan_inf_filter=False,  # it would report a finite loss
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
    # In a process group the device is "cpu:0". The Trainer of transformers before 5.23 loads the
    # optimizer of a checkpoint to it, and torch.load knows "cpu" only.
    if arguments.device.type == "cpu":
        arguments.__dict__["_setup_devices"] = torch.device("cpu")
    return arguments


class DraftTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of an objective; a batch is one over all processes.

    The loss is the mean over the learnt tokens of the whole (accumulated, global) batch, so how it
    is split makes no difference. It is of the draft's logits alone: the losses by which mixtures of
    experts balance their routers are left out.
    """

    def __init__(self, *, objective: Objective, batch_size: int, **rest: Any) -> None:
        super().__init__(model=objective, **rest)
        self.objective = objective  # `model_wrapped` is what an engine makes of it
        self.batch_size = batch_size
        self.model_accepts_loss_kwargs = True  # whatever the model: it is our loss that counts
        output = objective.head.embedding
        if self.is_deepspeed_enabled and output is not None:
            import deepspeed

            for weight in output.parameters():
                deepspeed.zero.register_external_parameter(objective.chunked, weight)

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Whole batches, the same on every process; the collator takes this process's rows.

        accelerate would divide them, and fill up the last batch of an epoch with rows of its
        beginning. Told of one process, it keeps them whole and orders rows as it does for one.
        """
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.batch_size,
            sampler=RandomSampler(self.train_dataset),
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[dict[str, Tensor]] = prepare_data_loader(
            loader,
            self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed,
        )
        return prepared

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The mean; positions are weighted alike in whichever process and forward they are."""
        value, counted = model(inputs, self.state.global_step)
        if num_items_in_batch is not None:
            counted = num_items_in_batch
        # Gradients are averaged over processes, positions are counted over all of them.
        value = value * self.accelerator.num_processes / torch.as_tensor(counted).clamp(min=1)
        return (value, {}) if return_outputs else value

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights that are trained; all processes together."""
        weights = trained_weights(self)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(weights, folder / SAFE_WEIGHTS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        set_weights(
            self.objective.draft, load_file(Path(resume_from_checkpoint, SAFE_WEIGHTS_NAME))
        )


def train_resumably(trainer: Trainer, work: Path, *, label: str) -> None:
    """Train to the end, from the newest whole checkpoint in `work` if there is one.

    The trainer is ready to train, with `training_arguments(work, ...)`; the caller deletes `work`
    when the result is saved.

    Raises:
        TrainingDivergedError: on every process, before anything that is not finite is stored.
        Interrupted: on every process, if one was asked to stop, after a checkpoint.
    """
    newest = checkpoint_to_resume(work, engine=_engine())
    trainer.remove_callback(PrinterCallback)
    supervisor = _Supervisor(label)
    trainer.add_callback(supervisor)
    try:
        with until_checkpoint(), by_onednn():
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if supervisor.signal:
                join_processes().wait_for_everyone()  # until the checkpoint is written
                raise Interrupted(supervisor.signal)
    finally:
        # Or transformers would load any model in parts, with no engine to join them, until the
        # garbage collector finds the trainer.
        unset_hf_deepspeed_config()
        if supervisor.bar is not None:
            supervisor.bar.close()
    trainer.model.config.use_cache = True  # the Trainer turned it off; whoever decodes needs it


def logged_steps(trainer: Trainer) -> list[dict[str, float]]:
    """Loss, norm of the gradient and learning rate as the Trainer logged them, in order."""
    logged = ("step", "loss", "grad_norm", "learning_rate")
    return [
        {name: float(entry[name]) for name in logged if entry.get(name) is not None}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write weights (safetensors), `config.json` and `generation_config.json`."""
    model.save_pretrained(folder)
    add_former_names(folder)


def round_as_stored(model: PreTrainedModel, target: str | Path) -> None:
    """Round weights, in place and in their own type, to the precision that a target's are in."""
    dtype = stored_dtype(target)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).to(weight.dtype)


def stored_dtype(model: str | Path) -> torch.dtype:
    """The precision in which a folder or Hub id has a model's weights: float32, unless half."""
    dtype = load_configs(str(model))[0].dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def take_special_ids(model: Any, generation: GenerationConfig) -> None:
    """Give a made model the special ids of a generation configuration."""
    model.generation_config = special_ids(generation)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(generation, name))


def _engine() -> str:
    """The kind of run that can read this one's checkpoints, which DeepSpeed divides by process."""
    state = join_processes()
    if state.distributed_type != DistributedType.DEEPSPEED:
        return "PyTorch"
    stage = AcceleratorState().deepspeed_plugin.zero_stage
    name = "ZeRO-3" if stage == 3 else "ZeRO-1 or 2"
    return f"DeepSpeed {name} in {state.num_processes} processes"


def _is_finite(checkpoint: Path) -> bool:
    """True if all weights in a checkpoint are finite."""
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                if not torch.isfinite(file.get_tensor(name)).all():
                    return False
    return True


class _Supervisor(TrainerCallback):  # type: ignore[misc]
    """Shows progress, completes the checkpoints of a healthy training, and ends it where it must.

    The loss and the norm of the gradient are looked at when they are logged, at the latest before
    each checkpoint; the weights when they are stored. All are the same on every process. One that
    was asked to stop ends with a checkpoint, after the same step everywhere.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.healthy_steps = 0
        self.signal = 0
        self.bar: tqdm[Any] | None = None
        self.threads = threads_of(label, device())

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.threads.begin(state.global_step + 1)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.threads.end()  # before measurements and checkpoints

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.healthy_steps = state.global_step
        if state.is_world_process_zero:
            self.bar = progress(state.max_steps, self.label, "step", done=state.global_step)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        if args.use_cpu and state.global_step % TRIMMED_STEPS == 0:
            # Large tensors of many sizes leave gaps, which glibc keeps: of 262,144 tokens 24 GB.
            getattr(ctypes.CDLL(None), "malloc_trim", id)(0)
        self.signal = stop_signal_of_any()
        if self.signal:
            control.should_save = control.should_training_stop = True
        if control.should_save:
            control.should_log = True  # which comes first

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        for name, words in (("loss", "the loss"), ("grad_norm", "the norm of the gradient")):
            value = logs.get(name, 0.0)
            if not math.isfinite(value):
                steps = f"steps {self.healthy_steps + 1} to {state.global_step}"
                raise self._error(args, f"{words} is {value} in {steps}")
        if "loss" in logs:
            self.healthy_steps = state.global_step
            if self.bar is not None:
                self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        join_processes().wait_for_everyone()
        folder = checkpoint_folder(Path(args.output_dir), state.global_step)
        if not broadcast_by_main(state.is_world_process_zero and _is_finite(folder)):
            if state.is_world_process_zero:
                shutil.rmtree(folder)
            raise self._error(args, f"weights are not finite after step {state.global_step}")
        if state.is_world_process_zero:
            complete(folder, engine=_engine())

    def _error(self, args: TrainingArguments, what: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"{self.label}: {what}",
            last_good=newest_complete(Path(args.output_dir)),
            learning_rate=args.learning_rate,
        )
