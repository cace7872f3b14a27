"""What several files of tests use of `test_initial`."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from distill.config import InitConfig
from distill.initial import make_initial
from distill.toy import save_tokenizer, train_tokenizer
from tests.support.families import tiny

ROWS = Dataset.from_dict(
    {
        "prompt_ids": [[2, 3], [9, 9, 9], [4]],
        "completion_ids": [[5, 6, 6, 7], [7, 6, 8], [8, 20, 30, 39]],
    }
)


def stored(folder: Path, family: str = "llama", *, tokens: int = 290, **changes: Any) -> Path:
    """A folder of a tiny model with a tokenizer; its vocabulary is padded by eight ids."""
    text = ["a short text about nothing at all, 0123456789"]
    tokenizer = train_tokenizer(text * 4, tokens)
    model = tiny(family, 0, vocab=len(tokenizer) + 8, dtype=torch.float32, **changes)
    model.generation_config.eos_token_id = [1, 3]
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def make(
    target: Path, out: Path, rows: Dataset = ROWS, *, draft: Path | None = None, **config: Any
) -> dict[str, Any]:
    """Make a draft of a target, by default on three short rollouts."""
    own = {"target": target, "draft": draft, "config": InitConfig(**config), "seed": 3}
    return make_initial(rollouts=rows, out=out, **own)
