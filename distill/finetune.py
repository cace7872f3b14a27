"""Train a draft on texts: conversations, or completions of its target (TRL's SFTTrainer).

This is how Vicuna-68M was made of LLaMA-68M (MCSD, arXiv 2401.06706, section 5.1).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from distill.adapters import (
    base_of,
    load_plain,
    load_student,
    merged,
    set_weights,
    trained_weights,
)
from distill.batches import content_of
from distill.callbacks import history_of
from distill.config import FinetuneConfig, LoraConfig
from distill.texts import Rows, collate_texts, stored_rows
from distill.training import (
    Schedule,
    save_model,
    train_resumably,
    training_arguments,
    whole_batches,
)
from specdata.draft_vocabulary import kept_tokens
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.models import (
    check_shared_vocabulary,
    copy_tokenizer,
    load_generation,
    load_tokenizer,
    positions,
)
from specdata.processes import join_processes, wait_for_main
from specdata.prompts.conversations import conversation_inputs
from specdata.storage.checkpoints import newest_complete
from specdata.storage.files import atomic_folder, fingerprint, write_json
from specdata.storage.resume import Settings

SETTINGS_FILE = "training.json"
RESULT_FILE = "finetuning.json"
LABEL = "fine-tuning the draft"


def finetune(
    *,
    target: str | Path,
    draft: str | Path,
    rollouts: Dataset | None,
    out: Path,
    config: FinetuneConfig,
    lora: LoraConfig | None,
    seed: int,
) -> dict[str, Any]:
    """Train a copy of the draft to predict what the assistant says, and save it as a model folder.

    A killed run goes on from its last checkpoint when called again; a finished one returns its
    stored result. Works in one process and under `accelerate launch`, where each step is taken on
    the same rows however many processes there are.

    Args:
        target: folder or Hub id of the target, whose tokenizer and chat template are used.
        draft: folder or Hub id of the draft to start from.
        rollouts: of split "train"; used if the configuration names no conversations.
        out: the new model folder; it appears once it is complete.
        config: texts and schedule.
        lora: adapters, if not all weights are trained.
        seed: decides the order of the texts.

    Returns:
        What was done, as JSON values: `distill.texts.Rows.account`, `steps`, and the mean loss
        (nats a token of the assistant's) over the first and over the last logged steps,
        `loss_first` and `loss_last`.

    Raises:
        ConfigError: if a model cannot be loaded or has fewer positions than `config.max_length`,
            texts cannot be used or none is left, or packed texts would see each other.
        TrainingDivergedError: if a loss, gradient or weight is not finite.
        VocabularyMismatchError: if the models do not share a vocabulary.
        ManifestError: if `out` or its checkpoints were made with other settings, or its checkpoints
            are damaged.
    """
    settings = Settings(
        {
            "target": fingerprint(str(target)),
            "draft": fingerprint(str(draft)),
            "texts": _contents(config, rollouts),
            "config": config.model_dump(mode="json"),
            "lora": None if lora is None else lora.model_dump(mode="json"),
            "seed": seed,
        },
        remedy=f"choose another output folder, or remove {out}, {_work(out)} and {_rows(out)}",
    )
    if out.exists():
        _tidy(out)  # of a run killed right before its end
        settings.check_file(out / SETTINGS_FILE)
        return _result(out)
    state = join_processes()
    check_context(draft, config)
    tokenizer = load_tokenizer(str(target))
    check_shared_vocabulary(tokenizer, load_tokenizer(str(draft)))
    rows = stored_rows(_rows(out), settings, tokenizer, rollouts, config, seed)
    student = load_student(str(draft), lora, seed=seed)
    plain = load_plain(str(draft), lora)
    if config.packing:
        check_packing(base_of(plain), rows.dataset)
    trainer = finetune_trainer(student, tokenizer, rows, _work(out), config, seed)
    train_resumably(trainer, _work(out), settings, label=LABEL)
    weights = trained_weights(trainer)
    if not all(parameter.isfinite().all() for parameter in student.parameters()):
        raise TrainingDivergedError(
            f"{LABEL}: weights are not finite after the last step",
            kept=newest_complete(_work(out)),
            learning_rate=config.learning_rate,
            remedy=settings.remedy,
        )
    if state.is_main_process:
        history = history_of(trainer.state)
        result = {
            **rows.account,
            "steps": trainer.state.global_step,
            "loss_first": history.steps[0]["loss"],
            "loss_last": history.steps[-1]["loss"],
        }
        with atomic_folder(out) as temporary:
            set_weights(plain, weights)
            save_model(merged(plain), temporary)
            copy_tokenizer(str(target), temporary)
            settings.write(temporary / SETTINGS_FILE)
            write_json(temporary / RESULT_FILE, result)
            history.write(temporary)
        _tidy(out)
    wait_for_main()
    return _result(out)


class FinetuneTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer on rows of token ids; a batch is one over all processes."""

    def __init__(self, *, batch_size: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.batch_size = batch_size

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """As in distillation."""
        return whole_batches(self, self.batch_size)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: TRL would write one beside each checkpoint."""

    def _send_telemetry(self) -> None:
        """Report nothing: TRL would tell the Hub of each training."""


def finetune_trainer(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    work: Path,
    config: FinetuneConfig,
    seed: int,
) -> FinetuneTrainer:
    """The trainer of a draft on texts: `config.batch_size` rows a batch, checkpoints in `work`."""
    state = join_processes()
    step = config.batch_size * config.accumulation
    schedule = Schedule(
        steps=math.ceil(config.epochs * len(rows.dataset) / step),
        batch_size=math.ceil(config.batch_size / state.num_processes),
        accumulation=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_ratio=config.warmup_ratio,
        save_steps=config.save_steps,
    )
    arguments = training_arguments(work, schedule, seed=seed, kind=SFTConfig)
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # rows are token ids already
    return FinetuneTrainer(
        batch_size=config.batch_size,
        model=student,
        args=arguments,
        train_dataset=rows.dataset,
        processing_class=tokenizer,
        data_collator=collate_texts(
            # Padding is never learnt nor seen, so any id will do where a tokenizer names none.
            tokenizer.pad_token_id or 0,
            student.config.get_text_config().vocab_size,
            kept_tokens(base_of(student)),
            packed=config.packing,
            process=state.process_index,
            processes=state.num_processes,
        ),
    )


def check_context(draft: str | Path, config: FinetuneConfig) -> None:
    """Raise ConfigError if a draft has fewer positions than a row's texts may have tokens."""
    model, _ = load_generation(str(draft))
    if config.max_length > positions(model):
        raise ConfigError(
            f"draft.finetune.max_length must be at most {positions(model)}, the positions of "
            f"{draft}, got {config.max_length}: lower it, or take a draft with a longer context"
        )


@torch.inference_mode()
def check_packing(model: PreTrainedModel, rows: Dataset) -> None:
    """Try on the first row of several texts whether they see each other.

    transformers reads off the positions where a text begins (`masking_utils`, for eager attention,
    SDPA and flex; FlashAttention for batches of one row). Models without positions, or with
    attention of their own, do not, and would learn across texts without a word.

    Raises:
        ConfigError: if the logits of a text depend on the text before it.
    """
    row = next((row for row in rows if len(row["seq_lengths"]) > 1), None)
    if row is None:
        return
    first, second = row["seq_lengths"][:2]
    length = min(second, 16)
    vocab_size = model.config.get_text_config().vocab_size
    # Two rows, because some kernels tell texts apart in batches of one alone.
    packed = {**row, "input_ids": row["input_ids"][: first + length]}
    packed |= {"labels": row["labels"][: first + length], "seq_lengths": [first, length]}
    alone = torch.tensor([row["input_ids"][first : first + length]], device=model.device)
    batch = collate_texts(0, vocab_size, packed=True)([packed, packed])
    batch = {name: values.to(model.device) for name, values in batch.items() if name != "labels"}
    # With a cache, which training has none of, transformers does not look for texts.
    together = model(**batch, use_cache=False).logits[1, first:].float()
    separate = model(input_ids=torch.where(alone < vocab_size, alone, 0)).logits[0].float()
    # Random weights attend little, so differences are held against those between the logits.
    spread = separate[separate.isfinite()].std().item()
    if not torch.allclose(together, separate, rtol=0.0, atol=1e-4 * spread):
        raise ConfigError(
            f"texts that share a row would see each other in {model.config.model_type} with "
            f"{model.config._attn_implementation} attention: set draft.finetune.packing to false"
        )


def _contents(config: FinetuneConfig, rollouts: Dataset | None) -> dict[str, str]:
    """What identifies the texts: files by their content, a Hub id itself."""
    if config.conversations:
        sources = conversation_inputs(config.conversations)
        return {name: fingerprint(source) for name, source in sources.items()}
    if not rollouts:
        raise ConfigError(
            "there are no rollouts to fine-tune on: make some of split train, or name "
            "conversations (draft.finetune.conversations)"
        )
    return {"rollouts": content_of(rollouts)}


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


def _rows(out: Path) -> Path:
    return out.with_name(f"{out.name}.rows")


def _tidy(out: Path) -> None:
    """Remove what only a training under way needs."""
    for folder in (_work(out), _rows(out)):
        shutil.rmtree(folder, ignore_errors=True)
    out.with_name(f".{_rows(out).name}.lock").unlink(missing_ok=True)


def _result(out: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((out / RESULT_FILE).read_text("utf-8"))
    return stored
