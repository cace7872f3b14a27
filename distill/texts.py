"""Texts to train on as rows of token ids: what of them is learnt, how they are cut and packed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, load_from_disk
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from distill.batches import IGNORED
from distill.config import FinetuneConfig
from specdata.errors import ConfigError
from specdata.prompts.chat_templates import (
    TemplateRefusedError,
    UnmaskableError,
    assistant_mask,
    require_template,
)
from specdata.prompts.conversations import Account, read_conversations
from specdata.storage.files import atomic_folder, locked, write_json
from specdata.storage.resume import Settings

Ids = npt.NDArray[np.int32]
Text = tuple[Ids, npt.NDArray[np.bool_]]
"""Ids (T,) and which of them are learnt (T,)."""

SETTINGS_FILE, ACCOUNT_FILE = "settings.json", "account.json"


@dataclass(frozen=True, slots=True)
class Rows:
    """What is trained on.

    Attributes:
        dataset: one row each: `input_ids` (T,), `labels` (T,), and `seq_lengths`, the lengths of
            the texts that lie one after the other in it.
        account: what they were made of, as JSON values: `texts` (conversations or rollouts), how
            many were `read`, `used` and `split` (longer than a row), what was `left_out` (in
            words), and the numbers of `rows`, `tokens` and `assistant_tokens`, which are learnt.
    """

    dataset: Dataset
    account: dict[str, Any]


def stored_rows(
    folder: Path,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Dataset | None,
    config: FinetuneConfig,
    seed: int,
) -> Rows:
    """Make the rows of a training, or read those that another process or an earlier run made.

    Rendering and masking a hundred thousand conversations takes many minutes, so one process does
    it, the others wait for its lock, and a run that goes on reads what lies there.

    Args:
        folder: where the rows are kept until the training is done.
        settings: what they depend on.
        tokenizer: the target's.
        rollouts: the texts, if the configuration names no conversations.
        config: the texts and the length of a row.
        seed: decides the order of a catalogued set.

    Raises:
        ConfigError: if the texts cannot be used or none is left (see `conversation_texts`).
        ManifestError: if `folder` was made with other settings.
    """
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            made = make_rows(tokenizer, rollouts, config, seed)
            with atomic_folder(folder) as temporary:
                made.dataset.save_to_disk(str(temporary))
                write_json(temporary / ACCOUNT_FILE, made.account)
                settings.write(temporary / SETTINGS_FILE)
        settings.check_file(folder / SETTINGS_FILE)
    account = json.loads((folder / ACCOUNT_FILE).read_text("utf-8"))
    return Rows(load_from_disk(str(folder)), account)


def make_rows(
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Dataset | None,
    config: FinetuneConfig,
    seed: int,
) -> Rows:
    """Make the rows of a training.

    A text that is longer than a row becomes several; parts in which nothing is learnt are dropped.
    With `config.packing` several texts share a row: TRL's best-fit decreasing, which cuts none.

    Raises:
        ConfigError: as `stored_rows`.
    """
    accounts: list[Account] = []
    if config.conversations:
        texts = conversation_texts(config.conversations, tokenizer, seed, accounts)
    else:
        texts = rollout_texts(rollouts or [])
    read = split = 0
    ids: list[Ids] = []
    labels: list[Ids] = []
    for text, learnt in texts:
        read += 1
        split += len(text) > config.max_length
        for start in range(0, len(text), config.max_length):
            part = slice(start, start + config.max_length)
            targets = np.where(learnt[part], text[part], IGNORED).astype(np.int32)
            targets[0] = IGNORED  # nothing stands before it that it could be predicted from
            if (targets != IGNORED).any():
                ids.append(text[part])
                labels.append(targets)
    if not ids:
        raise ConfigError(
            "no token is left to train on: every completion is empty, or every text a single "
            "token; give conversations (draft.finetune.conversations) or other rollouts"
        )
    lengths = [np.array([len(part)], dtype=np.int32) for part in ids]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": labels, "seq_lengths": lengths})
    if config.packing:
        dataset = pack_dataset(dataset.remove_columns("seq_lengths"), config.max_length, "bfd")
    account = {
        "texts": "conversations" if config.conversations else "rollouts",
        "read": read + sum(sum(account.left_out.values()) for account in accounts),
        "used": read,
        "left_out": [f"{account.source}: {account}" for account in accounts if account.left_out],
        "split": split,
        "rows": len(dataset),
        "tokens": sum(map(len, ids)),
        "assistant_tokens": int(sum((part != IGNORED).sum() for part in labels)),
    }
    return Rows(dataset, account)


def conversation_texts(
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    accounts: list[Account],
) -> Iterator[Text]:
    """Conversations as the target's chat template renders them; the assistant's turns are learnt.

    One that the template refuses or hides the answers of is left out and counted.

    Args:
        names: the sources (`read_conversations`).
        tokenizer: the target's.
        seed: decides the order of a catalogued set.
        accounts: of each source one is added.

    Raises:
        ConfigError: if a source cannot be read, has no conversation that can be used, or the
            tokenizer has no chat template.
    """
    require_template(tokenizer)
    for name in names:
        account = Account(name)
        accounts.append(account)
        for row, messages in read_conversations(name, seed):
            account.read += 1
            if isinstance(messages, str):
                account.leave_out(row, messages)
                continue
            try:
                ids, mask = assistant_mask(tokenizer, messages)
            except TemplateRefusedError as error:
                account.leave_out(row, "refused", str(error))
            except UnmaskableError as error:
                account.leave_out(row, "unmaskable", str(error))
            else:
                yield np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)
        account.check()


def rollout_texts(rollouts: Sequence[Mapping[str, list[int]]]) -> Iterator[Text]:
    """Prompts and completions of the target; the completions are learnt.

    Sequence-level distillation: the draft learns the target's own words as if they were the truth
    (Kim and Rush, arXiv 1606.07947, section 3.2).
    """
    for row in rollouts:
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        learnt = np.zeros(len(prompt) + len(completion), dtype=bool)
        learnt[len(prompt) :] = True
        yield np.array([*prompt, *completion], dtype=np.int32), learnt


def collate_texts(
    pad_id: int,
    vocab_size: int,
    kept: Tensor | None = None,
    *,
    packed: bool,
    process: int = 0,
    processes: int = 1,
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]:
    """Return the collator of rows: (B, T) `input_ids`, `labels` and what keeps texts apart.

    Packed rows have (B, T) `position_ids`, which begin with 0 in every text (and in the padding),
    and no mask: from those transformers makes one by which no text sees another. TRL's own collator
    flattens the rows of a batch into one instead, which needs FlashAttention: other attention would
    compare every two tokens of the batch. Rows of one text each have an `attention_mask`.

    Args:
        pad_id: fills up `input_ids`.
        vocab_size: of the draft. Ids beyond it, of a target that is padded to more, are read as 0
            and not learnt.
        kept: (N,) ids that a draft with a reduced vocabulary can propose, increasing. The others
            are not learnt, and labels are rows of its output matrix instead of ids, which is what
            TRL's fused loss takes them for.
        packed: whether a row may hold several texts.
        process: which of the `processes` shares of the rows to collate_texts. A share without a row
            becomes a row without labels, because collective operations need a batch.
        processes: among how many the rows are divided.
    """
    of_label = torch.arange(vocab_size)
    if kept is not None:
        of_label = torch.full((vocab_size,), IGNORED)
        of_label[kept.cpu()] = torch.arange(len(kept))

    def batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = rows[process::processes] or [_nothing(rows[0])]
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
        positions, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).long()
        for index, row in enumerate(rows):
            end = len(row["input_ids"])
            ids[index, :end] = torch.tensor(row["input_ids"])
            labels[index, :end] = torch.tensor(row["labels"])
            attention[index, :end] = 1
            lengths = [*row["seq_lengths"], shape[1] - end]
            positions[index] = torch.cat([torch.arange(length) for length in lengths])
        known = ids < vocab_size
        ids = torch.where(known, ids, 0)
        labels = torch.where(known & (labels != IGNORED), of_label[ids], IGNORED)
        apart = {"position_ids": positions} if packed else {"attention_mask": attention}
        return {"input_ids": ids, "labels": labels, **apart}

    return batch


def _nothing(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of two tokens without labels."""
    return {"input_ids": row["input_ids"][:2], "labels": [IGNORED] * 2, "seq_lengths": [2]}
