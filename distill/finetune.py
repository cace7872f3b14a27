"""Train a draft on texts: conversations, or completions of its target (TRL's SFTTrainer)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from distill.config import FinetuneConfig, LoraConfig


def finetune(
    *,
    target: str | Path,
    draft: str | Path,
    rollouts: Dataset,
    out: Path,
    config: FinetuneConfig,
    lora: LoraConfig | None,
    seed: int,
) -> dict[str, Any]:
    """Train a copy of the draft to predict what the assistant says, and save it as a model folder.

    A killed run goes on from its last checkpoint when called again.

    Args:
        target: folder or Hub id of the target, whose tokenizer and chat template are used.
        draft: folder or Hub id of the draft to start from.
        rollouts: of split "train"; used if the configuration names no conversations.
        out: the new model folder; it appears once it is complete.
        config: texts and schedule.
        lora: adapters, if not all weights are trained.
        seed: decides the order of the texts.

    Returns:
        What was done, as JSON values.
    """
    raise NotImplementedError
