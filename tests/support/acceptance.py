"""What several files of tests use of `test_acceptance`."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from specdata.config import LabelsConfig
from specdata.labels.make import Labeller, make_labels
from specdata.lm_head import find_lm_head
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Label, Rollout
from specdata.texts import ModelSource
from specdata.top_logits import TopLogits


def rollout(
    number: int, completion: list[int], *, prompt: tuple[int, ...] = (2, 3), turn: int = 0
) -> Rollout:
    return Rollout(
        example_id=f"id{number}",
        dataset="d",
        split="train",
        sample=0,
        turn=turn,
        prompt_ids=list(prompt),
        completion_ids=completion,
        finish="length",
    )


def rollouts(count: int, *, vocab: int, seed: int = 0) -> list[Rollout]:
    """Rows of random lengths, longer ones anywhere."""
    draw = torch.Generator().manual_seed(seed)

    def sequence(longest: int) -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=draw))
        return torch.randint(2, vocab, (length,), generator=draw).tolist()

    return [rollout(n, sequence(14), prompt=tuple(sequence(6))) for n in range(count)]


def stored(folder: Path, rows: list[Rollout]) -> Path:
    fill_dataset(folder, ROLLOUTS, Settings({}), [lambda: rows], lambda rows: None)
    return folder


def labeller(
    target: PreTrainedModel, draft: PreTrainedModel, sampling: SamplingConfig, *, draws: int = 1
) -> Labeller:
    source = ModelSource(find_lm_head(target), sampling)
    return Labeller(source, find_lm_head(draft), sampling, 0, 64, draws)


def labelled(
    folder: Path,
    target: PreTrainedModel | TopLogits,
    draft: PreTrainedModel,
    rows: Dataset,
    config: LabelsConfig,
    sampling: SamplingConfig,
) -> list[Label]:
    """Labels as they are stored."""
    made: dict[str, Any] = {"sampling": sampling, "seed": 5, "settings": Settings({})}
    make_labels(target, draft, rows, folder, config, report=lambda rows: None, **made)
    return load_stored(folder).to_list()
