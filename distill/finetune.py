"""Train a draft on texts: conversations, or completions of its target.

The loss is of the draft's own logits. TRL's multiplies the last states by the output matrix, past
all that a family has before or behind that.

This is how Vicuna-68M was made of LLaMA-68M (MCSD, arXiv 2401.06706, section 5).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, load_from_disk
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from distill.adapters import base_of, load_student, merged, set_weights, trained_weights
from distill.config import FinetuneConfig, LoraConfig
from distill.lesson import freeze
from distill.objective import ChunkedLoss, Columns, Objective
from distill.training import (
    HISTORY_FILE,
    RESULT_FILE,
    DraftTrainer,
    ModelFolder,
    draft_arguments,
    logged_steps,
    train_resumably,
)
from specdata.drafts.draft_vocabulary import draft_vocabulary_ids
from specdata.errors import ConfigError
from specdata.models import check_shared_vocabulary, load_configs, load_tokenizer, positions
from specdata.processes import broadcast_by_main, join_processes
from specdata.prompts.conversations import Account, masked_conversations
from specdata.storage.files import atomic_folder, write_json
from specdata.storage.resume import read_record
from specdata.texts import IGNORED

TokenIds = npt.NDArray[np.int32]

ACCOUNT_FILE = "account.json"


@dataclass(frozen=True, slots=True)
class TuningRows:
    """The training data: of each row `input_ids` (T,) and `labels` (T,).

    The account says what the rows were made of, as JSON values: `texts` (conversations or
    rollouts), how many were `read`, `used` and `split` (longer than a row), what was `left_out` (in
    words), and the numbers of `rows`, `tokens` and `assistant_tokens`, which are learnt.
    """

    dataset: Dataset
    account: dict[str, Any]


def stored_rows(folder: Path, make: Callable[[], TuningRows]) -> TuningRows:
    """Make the rows of a training, or read those that another process or an earlier run made.

    Rendering and masking a hundred thousand conversations takes many minutes, so the main process
    does it, the others wait for it, and a run that goes on reads what lies there.
    """
    account: dict[str, Any] = {}
    if join_processes().is_main_process:
        if not folder.exists():
            rows = make()
            with atomic_folder(folder) as temporary:
                rows.dataset.save_to_disk(str(temporary))
                write_json(temporary / ACCOUNT_FILE, rows.account)
        account = read_record(folder / ACCOUNT_FILE, (), f"remove {folder}")
    account = broadcast_by_main(account)
    return TuningRows(load_from_disk(str(folder)), account)


def make_rows(
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Dataset | None,
    config: FinetuneConfig,
    seed: int,
    template_variables: Mapping[str, Any] = {},
    vocabulary: int = sys.maxsize,
) -> TuningRows:
    """Make the rows of a training.

    Of conversations, rendered by the target's chat template, which is given `template_variables`,
    the assistant's turns are learnt; those with ids beyond the target's `vocabulary` are left out.
    A text that is longer than a row becomes several; parts in which nothing is learnt are dropped.
    """
    accounts = [Account(name) for name in config.conversations]
    texts = rollout_texts(rollouts or [])
    if accounts:
        texts = chain.from_iterable(
            masked_conversations(account, seed, tokenizer, template_variables, vocabulary)
            for account in accounts
        )
    read = split = 0
    ids: list[TokenIds] = []
    labels: list[TokenIds] = []
    for text, learnt in texts:
        read += 1
        split += len(text) > config.max_length
        for start in range(0, len(text), config.max_length):
            part = slice(start, start + config.max_length)
            targets = np.where(learnt[part], text[part], IGNORED).astype(np.int32)
            targets[0] = IGNORED  # nothing stands before it that it could be predicted from
            if (targets != IGNORED).any():
                ids.append(np.array(text[part], dtype=np.int32))
                labels.append(targets)
    if not ids:
        raise ConfigError(
            "no token is left to train on: every completion is empty, or every text a single "
            "token; give conversations (draft.finetune.conversations) or other rollouts"
        )
    dataset = Dataset.from_dict({"input_ids": ids, "labels": labels})
    account = {
        "texts": "conversations" if config.conversations else "rollouts",
        "read": read + sum(sum(account.left_out.values()) for account in accounts),
        "used": read,
        "left_out": [f"{account.source}: {account}" for account in accounts if str(account)],
        "split": split,
        "rows": len(dataset),
        "tokens": sum(map(len, ids)),
        "assistant_tokens": int(sum((part != IGNORED).sum() for part in labels)),
    }
    return TuningRows(dataset, account)


def rollout_texts(
    rollouts: Sequence[Mapping[str, list[int]]],
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of prompts and the target's completions, and which are learnt, 0 or 1: the latter.

    That is sequence-level distillation (Kim and Rush, arXiv 1606.07947, section 3.2).
    """
    for row in rollouts:
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        yield [*prompt, *completion], [0] * len(prompt) + [1] * len(completion)


def collate_texts(
    pad_id: int,
    vocab_size: int,
    vocabulary_ids: Tensor | None = None,
    *,
    process: int = 0,
    processes: int = 1,
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]:
    """Return the collator of rows: (B, T) `input_ids` and `labels`, padded on the right.

    Args:
        pad_id: fills up `input_ids`.
        vocab_size: of the draft. Ids beyond it, of a target that is padded to more, are read as 0
            and not learnt.
        vocabulary_ids: (N,) ids that a draft with a reduced vocabulary can propose. The others are
            not learnt.
        process: which of the `processes` shares to collate, as `distill.batches.collate`.
        processes: among how many the rows are divided.
    """
    padding = DataCollatorForLanguageModeling(pad_id)
    of_label = torch.arange(vocab_size)
    if vocabulary_ids is not None:
        of_label = torch.full_like(of_label, IGNORED)
        of_label[vocabulary_ids.cpu()] = vocabulary_ids.cpu()

    def batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        nothing = {"input_ids": rows[0]["input_ids"][:2], "labels": [IGNORED] * 2}
        padded = padding(rows[process::processes] or [nothing])
        ids, labels = padded["input_ids"], padded["labels"]
        is_readable = ids < vocab_size
        ids = torch.where(is_readable, ids, 0)
        labels = torch.where(is_readable & (labels != IGNORED), of_label[ids], IGNORED)
        return {"input_ids": ids, "labels": labels}

    return batch


def finetune(  # noqa: PLR0913 - what is trained, on what, how
    *,
    target: str | Path,
    draft: str | Path,
    rollouts: Dataset | None,
    out: Path,
    config: FinetuneConfig,
    lora: LoraConfig | None,
    seed: int,
    save_steps: int,
    template_variables: Mapping[str, Any] = {},
    freeze_embeddings: bool = False,
) -> dict[str, Any]:
    """Train a copy of the draft to predict what the assistant says, and save it as a model folder.

    A killed run goes on from its last checkpoint when called again; a finished one returns its
    stored result. Works in one process and under `accelerate launch`, where each step is taken on
    the same rows however many processes there are. The rollouts, of split "train", are used if the
    configuration names no conversations.

    Returns:
        What was done, as JSON values: `TuningRows.account`, `steps`, and the mean loss
        (nats a token of the assistant's) over the first and over the last logged steps,
        `loss_first` and `loss_last`.
    """
    folder = ModelFolder(out)
    if stored := folder.result():
        return stored
    state = join_processes()
    config.check_context(positions(load_configs(str(draft))[0]), draft)
    tokenizer = load_tokenizer(str(target))
    check_shared_vocabulary(tokenizer, load_tokenizer(str(draft)))
    vocabulary = load_configs(str(target))[0].get_text_config().vocab_size
    student = load_student(str(draft), lora, seed=seed)
    plain = copy.deepcopy(student).eval()  # to save: no engine ever wraps this one
    freeze(base_of(student), freeze_embeddings=freeze_embeddings)
    given = (tokenizer, rollouts, config, seed, template_variables, vocabulary)
    rows = stored_rows(folder.work / "rows", lambda: make_rows(*given))
    trainer = finetune_trainer(student, tokenizer, rows, folder.work, config, seed, save_steps)
    train_resumably(trainer, folder.work, label="fine-tuning the draft")
    weights, steps = trained_weights(trainer), logged_steps(trainer)
    result = {
        **rows.account,
        "steps": trainer.state.global_step,
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
    }
    if state.is_main_process:
        set_weights(plain, weights)
        records = {RESULT_FILE: result, HISTORY_FILE: {"steps": steps}}
        folder.write(merged(plain), target, records)
    return result


class NextToken(Objective):
    """-log q(token) in nats, of the tokens of texts that are learnt."""

    def __init__(self, draft: PreTrainedModel) -> None:
        super().__init__(draft)
        self.chunked = ChunkedLoss(self.head, negative_log, entry_bytes=32)

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """Sum the loss of a batch of `collate_texts`; see `Objective`."""
        tokens = batch["labels"][:, 1:]
        is_learnt = tokens != IGNORED
        states = self.head.states(batch["input_ids"], trained=True)
        columns = {"tokens": tokens[is_learnt]}
        return self.chunked(states[:, :-1][is_learnt], columns), is_learnt.sum()


def negative_log(logits: Tensor, columns: Columns) -> Tensor:
    """The sum over n positions, of logits (n, V)."""
    return nn.functional.cross_entropy(logits, columns["tokens"], reduction="sum")


def finetune_trainer(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TuningRows,
    work: Path,
    config: FinetuneConfig,
    seed: int,
    save_steps: int,
) -> DraftTrainer:
    """The trainer of a draft on texts: `config.batch_size` rows a batch, checkpoints in `work`."""
    state = join_processes()
    return DraftTrainer(
        objective=NextToken(student),
        batch_size=config.batch_size,
        args=draft_arguments(work, config, len(rows.dataset), save_steps=save_steps, seed=seed),
        train_dataset=rows.dataset,
        data_collator=collate_texts(
            # Padding is never learnt nor seen, so any id will do where a tokenizer names none.
            tokenizer.pad_token_id or 0,
            student.config.get_text_config().vocab_size,
            draft_vocabulary_ids(base_of(student)),
            process=state.process_index,
            processes=state.num_processes,
        ),
    )
