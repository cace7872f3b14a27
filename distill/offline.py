"""Stage 2: distil a draft on completions that its target wrote earlier.

The target runs beside the draft as a frozen teacher; the loss is taken at completion positions
only, between the very distributions that serving will compare.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from transformers import PreTrainedModel, Trainer

from distill.checkpoint import newest_complete
from distill.config import DistilConfig, Objective
from distill.losses import LOSSES
from distill.training import (
    Schedule,
    save_model,
    train_resumably,
    training_arguments,
)
from specdata.errors import TrainingDivergedError
from specdata.model_folder import copy_tokenizer
from specdata.models import known_ids, load_model, load_tokenizer
from specdata.probability import overlap, probabilities, to_vocabulary
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.storage.files import atomic_folder, fingerprint, write_json
from specdata.storage.resume import Settings, defaults_of
from specdata.vocabulary import check_shared_vocabulary

SETTINGS_FILE = "training.json"
RESULT_FILE = "distillation.json"
IGNORED = -100  # the Trainer counts the labels that differ from it


@dataclass(frozen=True, slots=True)
class DistilResult:
    """What distillation changed, on rollouts that were not trained on.

    `acceptance_before` and `acceptance_after` are means of sum_x min(p, q) over `positions`
    completion positions: the probability that a drafted token is accepted there.
    """

    acceptance_before: float
    acceptance_after: float
    positions: int
    steps: int


def distil(
    *,
    target: str | Path,
    draft: str | Path,
    train: Dataset,
    dev: Dataset,
    out: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    teacher_dtype: str = "float32",
) -> DistilResult:
    """Train a copy of the draft on rollouts of the target and save it as a model folder.

    A killed run goes on from its last checkpoint when called again; a finished one returns its
    stored result. Works in one process, under `accelerate launch` and under DeepSpeed. Each step
    is taken on the same rollouts however many processes there are, so a run may go on in another
    number of them (not under DeepSpeed, whose checkpoints are in as many parts).

    Args:
        target: folder or Hub id of the teacher.
        draft: folder or Hub id of the draft to start from.
        train: rollouts with `prompt_ids` and `completion_ids`.
        dev: rollouts that acceptance is measured on.
        out: the new model folder; it appears once it is complete.
        config: loss and schedule.
        sampling: the warp of serving, applied to both models.
        seed: decides the order of the rollouts.
        teacher_dtype: precision of the frozen target: the one it is served in.

    Raises:
        ConfigError: if a model cannot be loaded.
        TrainingDivergedError: if a loss, gradient or weight is not finite.
        VocabularyMismatchError: if the models do not share a vocabulary.
        ManifestError: if `out` or its checkpoints were made with other settings, or its checkpoints
            are damaged.
        ValueError: if a data set is empty.
    """
    for name, rollouts in (("train", train), ("dev", dev)):
        if len(rollouts) == 0:
            raise ValueError(f"{name} must hold at least one rollout, it is empty")
    settings = Settings(
        {
            "target": fingerprint(str(target)),
            "draft": fingerprint(str(draft)),
            "config": config.model_dump(mode="json"),
            "sampling": asdict(sampling),
            "seed": seed,
            "train": _content(train),
            "dev": _content(dev),
            "teacher_dtype": teacher_dtype,
        },
        defaults_of(DistilConfig, "config") | defaults_of(SamplingConfig, "sampling"),
        remedy=f"choose another output folder, or remove {out} and {_work(out)}",
        rewrite=_by_content,
    )
    if out.exists():
        shutil.rmtree(_work(out), ignore_errors=True)  # of a run killed right before its end
        settings.check_file(out / SETTINGS_FILE)
        return DistilResult(**json.loads((out / RESULT_FILE).read_text("utf-8")))
    state = join_processes()
    tokenizer = load_tokenizer(str(target))
    check_shared_vocabulary(tokenizer, load_tokenizer(str(draft)))
    # Before any training arguments exist, or ZeRO-3 would split the frozen teacher too.
    teacher = load_model(str(target), dtype=teacher_dtype)
    student = load_model(str(draft))
    plain = copy.deepcopy(student)  # no engine ever wraps this one
    before = mean_acceptance(teacher, plain, dev, sampling) if state.is_main_process else None

    trainer = draft_trainer(teacher, student, train, out, config, sampling, seed)
    train_resumably(trainer, _work(out), settings, label="distilling the draft")
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    after = None
    if state.is_main_process:
        plain.load_state_dict(weights)
        after = mean_acceptance(teacher, plain, dev, sampling)
    (after,) = broadcast_object_list([after])
    if not math.isfinite(after):
        raise TrainingDivergedError(
            f"distilling the draft: its acceptance is {after} after the last step",
            kept=newest_complete(_work(out)),
            learning_rate=config.learning_rate,
            remedy=settings.remedy,
        )
    if before is not None:
        result = DistilResult(before, after, _positions(dev), trainer.state.global_step)
        with atomic_folder(out) as temporary:
            save_model(plain, temporary)
            copy_tokenizer(str(target), temporary)
            settings.write(temporary / SETTINGS_FILE)
            write_json(temporary / RESULT_FILE, asdict(result))
        shutil.rmtree(_work(out))
    state.wait_for_everyone()
    return DistilResult(**json.loads((out / RESULT_FILE).read_text("utf-8")))


def _by_content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with models by what they hold; they were stored by name once."""
    models = {role: fingerprint(settings[role]) for role in ("target", "draft") if role in settings}
    return {**settings, **models}


@torch.inference_mode()
def mean_acceptance(
    target: PreTrainedModel, draft: PreTrainedModel, rollouts: Dataset, sampling: SamplingConfig
) -> float:
    """Mean of sum_x min(p, q) over all completion positions, both distributions as in serving."""
    total = 0.0
    for row in rollouts:
        length = len(row["completion_ids"])
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=target.device)
        # Position t predicts token t + 1: the last position predicts beyond the completion.
        p_logits, q_logits = (
            model(input_ids=known_ids(ids[:, :-1], model), logits_to_keep=length).logits[0]
            for model in (target, draft)
        )
        q_logits = to_vocabulary(q_logits, p_logits.shape[-1])
        p, q = probabilities(p_logits, sampling), probabilities(q_logits, sampling)
        total += overlap(p, q).sum().item()
    return total / _positions(rollouts)


def collate(
    pad_id: int, *, process: int = 0, processes: int = 1
) -> Callable[[Sequence[Mapping[str, list[int]]]], dict[str, Tensor]]:
    """Return the collator of rollouts: (B, T) `input_ids`, `attention_mask` and `labels`.

    Rows are padded on the right; `labels` are the completion's tokens, `IGNORED` elsewhere.

    Args:
        pad_id: fills up `input_ids`.
        process: which of the `processes` shares of the rows to collate. A share without a row
            becomes one row without labels, because collective operations need a batch.
        processes: among how many the rows are divided.
    """

    def batch(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        nothing = {"prompt_ids": rows[0]["prompt_ids"][:1], "completion_ids": []}
        rows = rows[process::processes] or [nothing]
        longest = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
        shape = (len(rows), longest)
        ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
        attention = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            begin = len(row["prompt_ids"])
            end = begin + len(row["completion_ids"])
            ids[index, :end] = torch.tensor(row["prompt_ids"] + row["completion_ids"])
            labels[index, begin:end] = ids[index, begin:end]
            attention[index, :end] = 1
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}

    return batch


class _DistilTrainer(Trainer):  # type: ignore[misc]
    """The Trainer with two methods changed.

    The loss compares the draft with its teacher, and a batch is one over all processes.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        teacher: PreTrainedModel,
        objective: Objective,
        sampling: SamplingConfig,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.student: PreTrainedModel = rest["model"]  # `model` may be wrapped by an engine
        self.teacher = teacher.eval().requires_grad_(False)
        self.objective = LOSSES[objective]
        self.sampling = sampling
        self.batch_size = batch_size

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Whole batches, the same on every process; the collator takes this process's rows.

        accelerate would divide them, and fill up the last batch of an epoch with rows of its
        beginning. Told of one process, it orders rows as it does for one.
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
        """Mean divergence over the completion positions of the whole (accumulated, global) batch.

        Weighting by positions makes the result independent of how a batch is split.
        """
        labels = inputs["labels"]
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        chosen = labels[:, 1:] != IGNORED
        outputs = model(**{**tokens, "input_ids": known_ids(tokens["input_ids"], self.student)})
        with torch.no_grad():
            p_logits = self.teacher(**tokens).logits[:, :-1][chosen]
            p = probabilities(p_logits, self.sampling)
        q_logits = to_vocabulary(outputs.logits[:, :-1][chosen], p.shape[-1])
        # Truncation applies to p alone: a token cut from q would get no gradient to come back.
        loss = self.objective(
            q_logits / (self.sampling.temperature or 1.0), p.log(), torch.ones_like(p[:, 0])
        )
        if num_items_in_batch is not None:
            # Gradients are averaged over processes, positions are counted over all of them.
            share = chosen.sum() * self.accelerator.num_processes / num_items_in_batch
            loss = loss * share
        return (loss, outputs) if return_outputs else loss


def draft_trainer(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    train: Dataset,
    out: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Trainer:
    """The trainer of a draft: `config.batch_size` rollouts a batch, seeded, with checkpoints."""
    state = join_processes()
    schedule = Schedule(
        steps=math.ceil(config.epochs * len(train) / (config.batch_size * config.accumulation)),
        batch_size=math.ceil(config.batch_size / state.num_processes),
        accumulation=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_ratio=config.warmup_ratio,
        save_steps=config.save_steps,
    )
    pad_id = teacher.generation_config.pad_token_id
    return _DistilTrainer(
        batch_size=config.batch_size,
        teacher=teacher,
        objective=config.objective,
        sampling=sampling,
        model=student,
        args=training_arguments(_work(out), schedule, seed=seed),
        train_dataset=train,
        data_collator=collate(
            # Padding is masked everywhere, so any id will do where a model names none.
            0 if pad_id is None else pad_id,
            process=state.process_index,
            processes=state.num_processes,
        ),
    )


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


def _content(rollouts: Dataset) -> str:
    """A short hash of the token ids, the same wherever and however the rows are stored."""
    digest = hashlib.sha256()
    for row in rollouts:
        digest.update(json.dumps([row["prompt_ids"], row["completion_ids"]]).encode())
    return digest.hexdigest()[:16]


def _positions(rollouts: Dataset) -> int:
    return sum(map(len, rollouts["completion_ids"]))
